"""Layouts: which tar members a pack of each flavor has.

A layout is one module with `write(samples) -> parts` for the build and `read(raw) -> fields` for the flavor. Adding a
flavor is adding a module here, a dataclass in `energon_packed.flavors`, and a line in `LAYOUTS`.
"""

from collections.abc import Mapping
from typing import Any

from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards.layouts import captioning, multi_mix_qa, tokens
from energon_packed.shards.layouts.base import Layout, StoredSample, read_json

LAYOUTS: dict[str, Layout] = {
    layout.sample_class: layout
    for layout in (captioning.PACKED, multi_mix_qa.PACKED, multi_mix_qa.SINGLE, tokens.PACKED)
}


def layout_for(sample_class: str) -> Layout:
    """The layout of a flavor.

    Raises:
        ConfigError: an unknown name; the message lists the valid ones.
    """
    if sample_class not in LAYOUTS:
        raise ConfigError(f"unknown sample class {sample_class!r}; use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[sample_class]


def sample_class_of(raw: Mapping[str, Any]) -> str:
    """Name of the flavor that has these parts.

    Raises:
        FormatError: there is none.
    """
    if "input_ids.npy" in raw:
        return tokens.PACKED.sample_class
    value = read_json(raw)
    for key, layout in (("captions", captioning.PACKED), ("samples", multi_mix_qa.PACKED)):
        if key in value:
            return layout.sample_class
    if {"messages", "text", "input_ids"} & set(value):
        return multi_mix_qa.SINGLE.sample_class
    raise FormatError(f"{raw.get('__key__')} has the json keys {', '.join(value)}, of no flavor that is known")


__all__ = ["LAYOUTS", "Layout", "StoredSample", "layout_for", "sample_class_of"]
