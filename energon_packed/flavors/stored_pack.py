"""Flavor StoredPack, the base class of flavors: the parts of a tar key to samples, by the codec that matches them."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, fatal_media_errors
from energon_packed.formats import Codec, StoredSample, codec_of


@edataclass
class StoredPack(PackSample):
    """The samples of a pack, as the codec reads them.

    Attributes:
        stored: the samples.
    """

    stored: list[StoredSample]

    def stored_samples(self) -> list[StoredSample]:
        """Return the samples in order."""
        return self.stored


def read_stored(codec: Codec, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a StoredPack.

    Raises:
        FormatError: a part is missing or damaged.
        FatalDataChangedError, FatalResourceError: as `fatal_media_errors`.
    """
    with fatal_media_errors():
        return {"stored": codec.read(raw)}


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a StoredPack, by the codec that matches them."""
    return read_stored(codec_of(raw), raw)


def part_filter(part: str) -> bool:
    """Return True: Energon reads all parts, as any codec may be registered."""
    return True
