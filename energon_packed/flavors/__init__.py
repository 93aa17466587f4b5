"""Energon sample dataclasses. Input: the raw parts of a tar key. Output: a dataclass with its samples.

packed_captioning.py     image and text samples, encoded at training time
packed_multi_mix_qa.py   full conversations: any roles, tools, video frames; multi_mix_qa.py: one unpacked conversation
packed_tokens.py         tokenized offline, image bytes kept
stored_pack.py           any codec, and the base class of the flavors above; base.py: PackSample, the base class of all

Each module is a thin shell over a codec: a dataclass, its `sample_loader` and `part_filter`, which datasets name in
`.nv-meta`. Every flavor returns its samples as `stored_samples()`, the only input of encoding.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from energon_packed.flavors.base import PackSample
from energon_packed.flavors.multi_mix_qa import MultiMixQASample
from energon_packed.flavors.packed_captioning import PackedCaptioningSample
from energon_packed.flavors.packed_multi_mix_qa import PackedMultiMixQASample
from energon_packed.flavors.packed_tokens import PackedTokensSample
from energon_packed.flavors.stored_pack import StoredPack
from energon_packed.formats import Codec


def flavor_class(codec: Codec) -> type[PackSample]:
    """Return the Energon dataclass of a codec."""
    return _flavor(codec.flavor_module, codec.flavor_class)[1]


def load_pack(codec: Codec, raw: Mapping[str, Any], sample_keys: Mapping[str, Any] | None = None) -> PackSample:
    """Make the Energon sample of a pack from its raw parts.

    Args:
        codec: codec of the flavor.
        raw: `__key__` and bytes by part name.
        sample_keys: fields of Energon's `Sample`, such as `__key__` and `__subflavors__`; by default the key of `raw`.

    Raises:
        FormatError: a part is missing or damaged.
    """
    sample_loader, flavor = _flavor(codec.flavor_module, codec.flavor_class)
    keys = sample_keys or {"__key__": raw["__key__"], "__restore_key__": (), "__subflavors__": {}}
    return flavor(**keys, **sample_loader(raw))


# By name rather than by class: a codec that is registered later may name a module of its package.
@cache
def _flavor(module: str, name: str) -> tuple[Callable[[Mapping[str, Any]], dict[str, Any]], type[PackSample]]:
    flavor = importlib.import_module(module)
    return flavor.sample_loader, getattr(flavor, name)


__all__ = [
    "MultiMixQASample",
    "PackSample",
    "PackedCaptioningSample",
    "PackedMultiMixQASample",
    "PackedTokensSample",
    "StoredPack",
    "flavor_class",
    "load_pack",
]
