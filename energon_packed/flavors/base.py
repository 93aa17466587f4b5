"""PackSample, the base class of all flavors, and the conversion between the columns of a codec and of a flavor."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.errors import DataChangedError, ResourceError
from energon_packed.formats import StoredImage, StoredSample
from energon_packed.libraries import check_energon
from energon_packed.records import Conversation

check_energon()  # before Energon is imported

from megatron.energon import Sample, edataclass  # noqa: E402
from megatron.energon.errors import FatalSampleError  # noqa: E402


class TokenRow(NamedTuple):
    """Row of tokenized text without images and videos.

    Attributes:
        ids: ids of the S samples.
        input_ids: int64 (T,).
        labels: int64 (T,), -100 for tokens that are not supervised.
        cu_seqlens: int32 (S+1,), boundaries of the samples.
        loss_weights: float32 (T,), loss weight of each token; None if all weights are 1.
    """

    ids: Sequence[str | None]
    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]
    loss_weights: npt.NDArray[np.float32] | None = None


@edataclass
class PackSample(Sample):
    """One pack of a shard: several samples that share a row, or one sample."""

    @abstractmethod
    def stored_samples(self) -> list[StoredSample]:
        """Return the samples in order."""

    def conversations(self) -> list[Conversation]:
        """Return the conversations in order."""
        return [sample.conversation for sample in self.stored_samples()]

    def token_row(self) -> TokenRow | None:
        """Return the row if it is tokenized text without images and videos; None otherwise."""
        return None


class FatalDataChangedError(DataChangedError, FatalSampleError):
    """A DataChangedError that Energon raises; Energon skips samples with other errors."""


class FatalResourceError(ResourceError, FatalSampleError):
    """A ResourceError that Energon raises."""


@contextmanager
def fatal_media_errors() -> Iterator[None]:
    """Make Energon raise the errors of referenced media, so that no sample is skipped.

    Raises:
        FatalDataChangedError: referenced media changed.
        FatalResourceError: referenced media cannot be read.
    """
    try:
        yield
    except DataChangedError as error:
        raise FatalDataChangedError(str(error)) from error
    except ResourceError as error:
        raise FatalResourceError(str(error)) from error


def flavor_fields(codec: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the columns of a codec as fields of a flavor: images as bytes, tuples as lists, videos as StoredVideos.

    Args:
        codec: a codec with `fields`.
        raw: parts of a pack.

    Raises:
        FormatError: a part is missing or damaged.
        FatalDataChangedError, FatalResourceError: as `fatal_media_errors`.
    """
    with fatal_media_errors():
        fields = codec.fields(raw)
    positions = fields["patch_positions"] and [list(files) for files in fields["patch_positions"]]
    images = [[image.data for image in sample] for sample in fields["images"]]
    videos = fields.get("video_files") and [list(files) for files in fields["video_files"]]
    return {**fields, "images": images, "patch_positions": positions, "video_files": videos}


def codec_fields(sample: Any, names: Iterable[str]) -> dict[str, Any]:
    """Convert fields of a flavor back to columns of a codec, without the extensions of images, which flavors lack.

    Args:
        sample: sample of a flavor.
        names: names of its columns, without `images`, `patch_positions` and `video_files`.
    """
    images = [tuple([StoredImage("", data) for data in files]) for files in sample.images]
    # `and` keeps None and an empty list as they are.
    positions = sample.patch_positions and [tuple(files) for files in sample.patch_positions]
    media = {"images": images, "patch_positions": positions, "video_files": sample.video_files}
    return {name: getattr(sample, name) for name in names} | media
