"""PackSample: what every flavor can do."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


def image_bytes(images: Iterable[Iterable[StoredImage]]) -> list[list[bytes]]:
    """The bytes of the images of each sample, as flavors hold them."""
    return [[image.data for image in one] for one in images]


def stored_images(images: Iterable[Iterable[bytes]]) -> list[tuple[StoredImage, ...]]:
    """The inverse of `image_bytes`; the extensions are not known any more."""
    return [tuple([StoredImage("", data) for data in one]) for one in images]


def stored_files(files: Iterable[Iterable[bytes]] | None) -> list[tuple[bytes, ...]] | None:
    """The .npy files of each sample, as codecs hold them."""
    return None if files is None else [tuple(one) for one in files]
