"""Flavor MultiMixQASample: the parts of a tar key to one unpacked conversation."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, flavor_fields
from energon_packed.formats import StoredImage, StoredSample, StoredVideo
from energon_packed.formats.multi_mix_qa import SingleMultiMixCodec

_CODEC = SingleMultiMixCodec()


@edataclass
class MultiMixQASample(PackSample):
    """One conversation, which is packed with other conversations while training.

    Attributes:
        sample: id, length, and one of messages / text / input_ids + labels, with tools, video, fps,
            timestamp_decimal if present.
        images: bytes of the images.
        patch_positions: bytes of the .npy files.
        length: number of tokens, or None.
        video_files: video files, with their selected frames.

    Examples:
        >>> result = pack(data, output_dir="MultiMixQASample", **options, unpacked=True)
        >>> result.manifest.sample_class, result.manifest.packed
        ('MultiMixQASample', 154)
    """

    sample: dict[str, Any]
    images: list[bytes]
    patch_positions: list[bytes]
    length: int | None = None
    video_files: list[StoredVideo] | None = None

    def stored_samples(self) -> list[StoredSample]:
        """Return the only sample."""
        images = tuple([StoredImage("", data) for data in self.images])
        positions = [tuple(self.patch_positions)]
        videos = None if self.video_files is None else [self.video_files]
        columns = {"images": [images], "patch_positions": positions, "video_files": videos}
        return _CODEC.samples({"samples": [self.sample], **columns})


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a MultiMixQASample."""
    fields = flavor_fields(_CODEC, raw)
    sample = fields["samples"][0]
    images, positions = fields["images"][0], fields["patch_positions"][0]
    videos = fields["video_files"] and fields["video_files"][0]
    media = {"images": images, "patch_positions": positions, "video_files": videos}
    return {"sample": sample, **media, "length": sample.get("length")}


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
