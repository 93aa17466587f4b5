"""Layouts: which tar members a pack of each flavor has.

A layout is one module with `write(samples) -> parts` for the build and `read(raw) -> fields` for the flavor. Adding a
flavor is adding a module here, a dataclass in `energon_packed.flavors`, and a line in `LAYOUTS`.
"""

from energon_packed.errors import ConfigError
from energon_packed.shards.layouts import captioning, multi_mix_qa, tokens
from energon_packed.shards.layouts.base import Layout, StoredSample

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


__all__ = ["LAYOUTS", "Layout", "StoredSample", "layout_for"]
