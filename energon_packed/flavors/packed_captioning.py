"""Flavor PackedCaptioningSample: the parts of a tar key to a pack of image and text samples, encoded at training time.

It loads packs in the default layout and in layout llava-onevision2, and packs of LLaVA-OneVision-1.5 and -2. The
class of this name in LLaVA-OneVision-2's `aiak_training_llm` loads layout llava-onevision2 only.
"""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, codec_fields, flavor_fields
from energon_packed.formats import StoredSample, StoredVideo
from energon_packed.formats.captioning import COLUMNS, CaptioningCodec

_CODEC = CaptioningCodec()


@edataclass
class PackedCaptioningSample(PackSample):
    """S samples that share a row; lists have one entry per sample.

    Attributes:
        images: bytes of the images of each sample.
        prompts: user turns of each sample.
        captions: assistant turns of each sample; a plain text has no prompt and one caption.
        sample_count: S.
        ids: ids, or None in third-party packs.
        systems: system prompts, or None.
        lengths: tokens of each sample, or None in third-party packs.
        patch_positions: bytes of the .npy files of each sample, or None.
        timestamp_decimal: decimals of frame timestamps, or None.
        fps: frames per second, or None.
        timestamps: whether the lengths have the timestamps of `fps`, or None.
        videos: whether the images are frames of a video, or None.
        video_files: video files of each sample, with their selected frames, or None.
        weights: weight of each turn in the loss (0 is context), or None.
        record_weights: factor of the loss weights of each sample, None for 1, or None.
        truncate: tokens that longer samples were truncated to, or None.
        truncated: which samples were truncated, or None.

    Examples:
        >>> result = pack(data, output_dir="PackedCaptioningSample", **options, sample_class="PackedCaptioningSample")
        >>> result.manifest.sample_class, result.manifest.packed
        ('PackedCaptioningSample', 154)
    """

    images: list[list[bytes]]
    prompts: list[list[str]]
    captions: list[list[str]]
    sample_count: int
    ids: list[str | None] | None = None
    systems: list[str | None] | None = None
    lengths: list[int] | None = None
    patch_positions: list[list[bytes]] | None = None
    timestamp_decimal: list[int | None] | None = None
    fps: list[float | None] | None = None
    timestamps: list[bool | None] | None = None
    videos: list[bool] | None = None
    video_files: list[list[StoredVideo]] | None = None
    weights: list[list[float] | None] | None = None
    record_weights: list[float | None] | None = None
    truncate: int | None = None
    truncated: list[bool] | None = None

    def stored_samples(self) -> list[StoredSample]:
        """Return the samples in order."""
        return _CODEC.samples(codec_fields(self, ("prompts", "captions", "sample_count", "truncate", *COLUMNS)))


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a PackedCaptioningSample."""
    return flavor_fields(_CODEC, raw)


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
