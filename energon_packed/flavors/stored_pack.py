"""Flavor StoredPack: the parts of a tar key to samples, for codecs without a dataclass."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample, fatal_media_errors
from energon_packed.formats import StoredSample, codec_of


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


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a StoredPack, by the codec that matches them."""
    with fatal_media_errors():
        return {"stored": codec_of(raw).read(raw)}


def part_filter(part: str) -> bool:
    """Return True: Energon reads all parts, as any codec may be registered."""
    return True
