"""Flavor PackedMultiMixQASample: the parts of a tar key to a pack of full conversations."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, codec_fields, flavor_fields
from energon_packed.formats import StoredSample, StoredVideo
from energon_packed.formats.multi_mix_qa import MultiMixCodec

_CODEC = MultiMixCodec()


@edataclass
class PackedMultiMixQASample(PackSample):
    """S conversations that share a row; lists have one entry per sample.

    Attributes:
        samples: id, length, and one of messages / text / input_ids + labels, with tools, video, fps,
            timestamp_decimal if present.
        images: bytes of the images of each sample.
        patch_positions: bytes of the .npy files of each sample.
        lengths: tokens of each sample.
        video_files: video files of each sample, with their selected frames, or None.

    Examples:
        >>> result = pack(data, output_dir="PackedMultiMixQASample", **options, sample_class="PackedMultiMixQASample")
        >>> result.manifest.sample_class, result.manifest.packed
        ('PackedMultiMixQASample', 154)
    """

    samples: list[dict[str, Any]]
    images: list[list[bytes]]
    patch_positions: list[list[bytes]]
    lengths: list[int | None]
    video_files: list[list[StoredVideo]] | None = None

    def stored_samples(self) -> list[StoredSample]:
        """Return the samples in order."""
        return _CODEC.samples(codec_fields(self, ("samples",)))


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a PackedMultiMixQASample."""
    fields = flavor_fields(_CODEC, raw)
    return fields | {"lengths": [sample.get("length") for sample in fields["samples"]]}


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
