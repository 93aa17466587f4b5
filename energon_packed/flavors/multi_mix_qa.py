"""MultiMixQASample: one unpacked conversation."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, image_bytes, stored_images
from energon_packed.formats import StoredSample
from energon_packed.formats.multi_mix_qa import SingleMultiMixCodec

_CODEC = SingleMultiMixCodec()


@edataclass
class MultiMixQASample(PackSample):
    """One conversation, packed with others while training.

    Attributes:
        sample: id, length, and one of messages / text / input_ids + labels, with tools, video, fps,
            timestamp_decimal when given.
        images: bytes of the images.
        patch_positions: bytes of the .npy files.
        length: tokens.
    """

    sample: dict[str, Any]
    images: list[bytes]
    patch_positions: list[bytes]
    length: int | None = None

    def stored_samples(self) -> list[StoredSample]:
        """The one sample."""
        fields = {"samples": [self.sample], "images": stored_images([self.images])}
        return _CODEC.samples(fields | {"patch_positions": [tuple(self.patch_positions)]})


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a MultiMixQASample from the parts of a tar member."""
    fields = _CODEC.fields(raw)
    sample = fields["samples"][0]
    return {
        "sample": sample,
        "images": image_bytes(fields["images"])[0],
        "patch_positions": list(fields["patch_positions"][0]),
        "length": sample.get("length"),
    }


def part_filter(part: str) -> bool:
    """Which parts are read from the tar."""
    return _CODEC.part_filter(part)
