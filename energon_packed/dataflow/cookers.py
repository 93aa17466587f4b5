"""Cooker: the same shards, prepared as a CrudeWebdataset whose dataset.yaml names no flavor.

The flavor is taken from the subflavor `sample_class` where there is one, else from the parts of the sample.
"""

from collections.abc import Mapping
from typing import Any

from megatron.energon import CrudeSample, basic_sample_keys, stateless

from energon_packed.errors import FormatError
from energon_packed.flavors import (
    MultiMixQASample,
    PackedCaptioningSample,
    PackedMultiMixQASample,
    PackedTokensSample,
    PackSample,
    multi_mix_qa,
    packed_captioning,
    packed_multi_mix_qa,
    packed_tokens,
)
from energon_packed.shards.layouts.base import read_json

FLAVORS: dict[str, tuple[type[PackSample], Any]] = {
    "PackedCaptioningSample": (PackedCaptioningSample, packed_captioning.sample_loader),
    "PackedMultiMixQASample": (PackedMultiMixQASample, packed_multi_mix_qa.sample_loader),
    "PackedTokensSample": (PackedTokensSample, packed_tokens.sample_loader),
    "MultiMixQASample": (MultiMixQASample, multi_mix_qa.sample_loader),
}


@stateless
def cook_pack(sample: CrudeSample) -> PackSample:
    """A pack of its flavor from raw parts.

    Raises:
        FormatError: the parts are those of no flavor.
    """
    subflavors = sample.get("__subflavors__") or {}
    name = subflavors.get("sample_class") or flavor_of(sample)
    if name not in FLAVORS:
        raise FormatError(f"subflavor sample_class is {name!r}; use one of {', '.join(FLAVORS)}")
    flavor, load = FLAVORS[name]
    return flavor(**basic_sample_keys(sample), **load(sample))


def flavor_of(sample: Mapping[str, Any]) -> str:
    """Name of the flavor that has these parts.

    Raises:
        FormatError: there is none.
    """
    if "input_ids.npy" in sample:
        return "PackedTokensSample"
    value = read_json(sample)
    for key, name in (("captions", "PackedCaptioningSample"), ("samples", "PackedMultiMixQASample")):
        if key in value:
            return name
    if {"messages", "text", "input_ids"} & set(value):
        return "MultiMixQASample"
    raise FormatError(f"{sample.get('__key__')} has the json keys {', '.join(value)}, of no flavor that is known")
