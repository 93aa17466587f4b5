"""MultiMixQASample: one unpacked conversation."""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.conversation import Conversation
from energon_packed.flavors.base import PackSample, conversation_from_json
from energon_packed.shards.layouts import multi_mix_qa


@edataclass
class MultiMixQASample(PackSample):
    """One conversation, packed with others while training.

    Attributes:
        sample: id, length, and one of messages / text / input_ids + labels, with tools, video, fps,
            timestamp_decimal when given.
        images: bytes of the images.
        patch_positions: bytes of the .npy files.
        length: tokens.
    """

    sample: dict[str, Any]
    images: list[bytes]
    patch_positions: list[bytes]
    length: int | None = None

    def conversations(self) -> list[Conversation]:
        """The one sample."""
        return [conversation_from_json(self.sample, self.images, self.patch_positions)]

    def expected_lengths(self) -> list[int | None]:
        """Recorded tokens."""
        return [self.length]

    def truncate_to(self) -> int | None:
        """Tokens that the sample was cut to, or None."""
        return self.sample.get("truncate")


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a MultiMixQASample from the parts of a tar member."""
    return multi_mix_qa.read_single(raw)


def part_filter(part: str) -> bool:
    """Which parts are read from the tar."""
    return part == "json" or part.startswith("img")
