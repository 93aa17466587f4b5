"""Cooker: the same shards, prepared as a CrudeWebdataset whose dataset.yaml names no flavor.

The flavor is taken from the subflavor `sample_class` where there is one, else from the parts of the sample.
"""

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
from energon_packed.shards.layouts import sample_class_of

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
    name = subflavors.get("sample_class") or sample_class_of(sample)
    if name not in FLAVORS:
        raise FormatError(f"subflavor sample_class is {name!r}; use one of {', '.join(FLAVORS)}")
    flavor, load = FLAVORS[name]
    return flavor(**basic_sample_keys(sample), **load(sample))
