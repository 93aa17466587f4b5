"""Flavor PackedMultiMixQASample: the parts of a tar key to a pack of full conversations."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.stored_pack import StoredPack, read_stored
from energon_packed.formats.multi_mix_qa import MultiMixCodec

_CODEC = MultiMixCodec()


@edataclass
class PackedMultiMixQASample(StoredPack):
    """Conversations that share a row, with any roles, tools, images and videos.

    Examples:
        >>> result = pack(data, output_dir="PackedMultiMixQASample", **options, sample_class="PackedMultiMixQASample")
        >>> result.manifest.sample_class, result.manifest.packed
        ('PackedMultiMixQASample', 154)
    """


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a PackedMultiMixQASample."""
    return read_stored(_CODEC, raw)


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
