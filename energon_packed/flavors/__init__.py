"""Energon sample dataclasses, each with its `sample_loader` and `part_filter`: thin shells over the codecs.

    PackedCaptioningSample   image and text samples, raw: prompts, captions, image bytes
    PackedMultiMixQASample   full conversations: any roles, tools, video frames
    MultiMixQASample         one unpacked conversation, for packing on the fly
    PackedTokensSample       tokenized offline, image bytes kept
    StoredPack               a flavor without a dataclass of its own

Every flavor returns its samples as `stored_samples()`, which is all that encoding needs.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from energon_packed.flavors.base import PackSample, TokenRow
from energon_packed.flavors.multi_mix_qa import MultiMixQASample
from energon_packed.flavors.packed_captioning import PackedCaptioningSample
from energon_packed.flavors.packed_multi_mix_qa import PackedMultiMixQASample
from energon_packed.flavors.packed_tokens import PackedTokensSample
from energon_packed.flavors.stored_pack import StoredPack
from energon_packed.formats import Codec


def flavor_class(codec: Codec) -> type[PackSample]:
    """The Energon dataclass of a codec."""
    return _flavor(codec.flavor_module, codec.flavor_class)[1]


def load_pack(codec: Codec, raw: Mapping[str, Any], **sample_keys: Any) -> PackSample:
    """A pack of its flavor from raw parts.

    Args:
        codec: of the flavor.
        raw: `__key__` and bytes by part name.
        sample_keys: Energon's keys of every sample; made up where there are none.

    Raises:
        FormatError: a part is missing or damaged.
    """
    sample_loader, flavor = _flavor(codec.flavor_module, codec.flavor_class)
    keys = sample_keys or {"__key__": raw["__key__"], "__restore_key__": (), "__subflavors__": {}}
    return flavor(**keys, **sample_loader(raw))


@cache
def _flavor(module: str, name: str) -> tuple[Callable[[Mapping[str, Any]], dict[str, Any]], type[PackSample]]:
    found = importlib.import_module(module)
    return found.sample_loader, getattr(found, name)


__all__ = [
    "MultiMixQASample",
    "PackSample",
    "PackedCaptioningSample",
    "PackedMultiMixQASample",
    "PackedTokensSample",
    "StoredPack",
    "TokenRow",
    "flavor_class",
    "load_pack",
]
