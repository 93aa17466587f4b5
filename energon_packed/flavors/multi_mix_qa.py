"""Flavor MultiMixQASample: the parts of a tar key to one unpacked conversation."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.stored_pack import StoredPack, read_stored
from energon_packed.formats.multi_mix_qa import SingleMultiMixCodec

_CODEC = SingleMultiMixCodec()


@edataclass
class MultiMixQASample(StoredPack):
    """One conversation, which is packed with other conversations while training.

    Examples:
        >>> result = pack(data, output_dir="MultiMixQASample", **options, unpacked=True)
        >>> result.manifest.sample_class, result.manifest.packed
        ('MultiMixQASample', 154)
    """


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a MultiMixQASample."""
    return read_stored(_CODEC, raw)


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
