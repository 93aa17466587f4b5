"""PackSample: what every flavor can do."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from megatron.energon import Sample, edataclass

from energon_packed.formats import StoredImage, StoredSample
from energon_packed.records import Conversation


class TokenRow(NamedTuple):
    """A row of tokenized text without images.

    Attributes:
        ids: names of the S samples.
        input_ids: int64 (T,).
        labels: int64 (T,), -100 where not supervised.
        cu_seqlens: int32 (S+1,), boundaries.
    """

    ids: Sequence[str | None]
    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]


@edataclass
class PackSample(Sample):
    """One member of a shard: one sample, or several that share a row."""

    @abstractmethod
    def stored_samples(self) -> list[StoredSample]:
        """The samples inside, in order."""

    def conversations(self) -> list[Conversation]:
        """The conversations inside, in order."""
        return [sample.conversation for sample in self.stored_samples()]

    def expected_lengths(self) -> list[int | None]:
        """Recorded tokens of each sample, None where none was recorded."""
        return [sample.length for sample in self.stored_samples()]

    def token_row(self) -> TokenRow | None:
        """The row, where it is tokenized text without images."""
        return None


def flavor_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a codec as flavors hold them: images as bytes, and lists."""
    positions = fields["patch_positions"] and [list(one) for one in fields["patch_positions"]]
    images = [[image.data for image in one] for one in fields["images"]]
    return {**fields, "images": images, "patch_positions": positions}


def codec_fields(sample: Any, names: Iterable[str]) -> dict[str, Any]:
    """The inverse of `flavor_fields`; the extensions of images are not known any more.

    Args:
        sample: of a flavor.
        names: of its columns, without `images` and `patch_positions`.
    """
    images = [tuple([StoredImage("", data) for data in one]) for one in sample.images]
    positions = sample.patch_positions and [tuple(one) for one in sample.patch_positions]
    return {name: getattr(sample, name) for name in names} | {"images": images, "patch_positions": positions}
