"""PackedMultiMixQASample: a pack of full conversations."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.conversation import Conversation
from energon_packed.flavors.base import PackSample, conversation_from_json
from energon_packed.shards.layouts import multi_mix_qa


@edataclass
class PackedMultiMixQASample(PackSample):
    """S conversations that share a row; lists have one entry per sample.

    Attributes:
        samples: id, length, and one of messages / text / input_ids + labels, with tools, video, fps,
            timestamp_decimal when given.
        images: bytes of the images of each sample.
        patch_positions: bytes of the .npy files of each sample.
        lengths: tokens.
    """

    samples: list[dict[str, Any]]
    images: list[list[bytes]]
    patch_positions: list[list[bytes]]
    lengths: list[int | None]

    def conversations(self) -> list[Conversation]:
        """The samples inside, in order."""
        columns = zip(self.samples, self.images, self.patch_positions, strict=True)
        return [conversation_from_json(*column) for column in columns]

    def expected_lengths(self) -> list[int | None]:
        """Recorded tokens of each sample."""
        return self.lengths

    def truncate_to(self) -> int | None:
        """Tokens that samples were cut to, or None."""
        return self.samples[0].get("truncate")


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PackedMultiMixQASample from the parts of a tar member."""
    return multi_mix_qa.read_packed(raw)


def part_filter(part: str) -> bool:
    """Which parts are read from the tar."""
    return part == "json" or part.startswith("img")
