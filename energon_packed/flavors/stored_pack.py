"""StoredPack: the flavor of codecs without a dataclass of their own."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.base import PackSample
from energon_packed.formats import StoredSample, codec_of


@edataclass
class StoredPack(PackSample):
    """A pack as its codec reads it.

    Attributes:
        stored: the samples.
    """

    stored: list[StoredSample]

    def stored_samples(self) -> list[StoredSample]:
        """The samples inside, in order."""
        return self.stored


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a StoredPack from the parts of a tar member, by the codec that matches them."""
    return {"stored": codec_of(raw).read(raw)}


def part_filter(part: str) -> bool:
    """All parts are read from the tar."""
    return True
