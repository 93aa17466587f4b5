"""Flavor PackedTokensSample: the parts of a tar key to a pack tokenized offline, which loads without a tokenizer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, fatal_media_errors
from energon_packed.formats import StoredSample
from energon_packed.formats.tokens import TokenRow, TokensCodec

_CODEC = TokensCodec()


@edataclass
class PackedTokensSample(PackSample):
    """S tokenized samples that share a row of T tokens.

    Attributes:
        row: the columns of the samples.

    Examples:
        >>> result = pack(data, output_dir="PackedTokensSample", **options, sample_class="PackedTokensSample")
        >>> result.manifest.sample_class, result.manifest.packed
        ('PackedTokensSample', 154)
    """

    row: TokenRow

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 (T,); images are runs of the image token."""
        return self.row.input_ids

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """Unshifted labels, int32 (T,); -100 for tokens that are not supervised."""
        return self.row.labels

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Boundaries of the samples, int32 (S+1,)."""
        return self.row.cu_seqlens

    def stored_samples(self) -> list[StoredSample]:
        """Return the tokenized samples in order."""
        return self.row.samples()

    def token_row(self) -> TokenRow | None:
        """Return the row if it has no images and no videos; None otherwise."""
        return None if any(self.row.media) else self.row


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a PackedTokensSample.

    Raises:
        FormatError: a part is missing or damaged.
        FatalDataChangedError, FatalResourceError: as `fatal_media_errors`.
    """
    with fatal_media_errors():
        return {"row": _CODEC.read_row(raw)}


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
