"""Flavor PackedTokensSample: the parts of a tar key to a pack tokenized offline, which loads without a tokenizer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, TokenRow, codec_fields, flavor_fields
from energon_packed.formats import StoredSample, StoredVideo
from energon_packed.formats.tokens import TokensCodec

_CODEC = TokensCodec()


@edataclass
class PackedTokensSample(PackSample):
    """S tokenized samples that share a row of T tokens.

    Attributes:
        input_ids: int32 (T,), images as runs of the image token.
        labels: int32 (T,), unshifted, -100 for tokens that are not supervised.
        cu_seqlens: int32 (S+1,).
        images: bytes of the images of each sample.
        ids: ids of the samples.
        patch_positions: bytes of the .npy files of each sample, or None.
        loss_weights: float32 (T,), loss weight of each target, else 0; None if all weights are 1.
        video_files: video files of each sample, with their selected frames, or None.

    Examples:
        >>> result = pack(data, output_dir="PackedTokensSample", **options, sample_class="PackedTokensSample")
        >>> result.manifest.sample_class, result.manifest.packed
        ('PackedTokensSample', 154)
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    images: list[list[bytes]]
    ids: list[str | None]
    patch_positions: list[list[bytes]] | None = None
    loss_weights: npt.NDArray[np.float32] | None = None
    video_files: list[list[StoredVideo]] | None = None

    def stored_samples(self) -> list[StoredSample]:
        """Return the tokenized samples in order."""
        return _CODEC.samples(codec_fields(self, ("input_ids", "labels", "cu_seqlens", "ids", "loss_weights")))

    def token_row(self) -> TokenRow | None:
        """Return the row if it has no images and no videos; None otherwise."""
        if any(self.images) or self.video_files:
            return None
        # Whole arrays rather than samples: text packs skip the conversion of each sample.
        ids, labels = self.input_ids.astype(np.int64), self.labels.astype(np.int64)
        return TokenRow(self.ids, ids, labels, self.cu_seqlens, self.loss_weights)


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a PackedTokensSample."""
    return flavor_fields(_CODEC, raw)


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
