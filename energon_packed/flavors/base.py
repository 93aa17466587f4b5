"""PackSample, the base class of all flavors."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from energon_packed.errors import DataChangedError, ResourceError
from energon_packed.formats import StoredSample
from energon_packed.formats.tokens import TokenRow
from energon_packed.libraries import check_energon
from energon_packed.records import Conversation

check_energon()  # before Energon is imported

from megatron.energon import Sample, edataclass  # noqa: E402
from megatron.energon.errors import FatalSampleError  # noqa: E402


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
