"""PackSample: what every flavor can do."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from megatron.energon import Sample, edataclass

from energon_packed.conversation import Conversation, MediaReference, Message


@edataclass
class PackSample(Sample):
    """One member of a shard: one sample or several that share a row."""

    @abstractmethod
    def conversations(self) -> list[Conversation]:
        """The samples inside, in order."""

    def expected_lengths(self) -> Sequence[int | None]:
        """Recorded tokens of each sample, None where none was recorded."""
        return [None] * len(self.conversations())

    def truncate_to(self) -> int | None:
        """Tokens that samples were cut to while packing, or None."""
        return None


def references(media: Iterable[bytes]) -> tuple[MediaReference, ...]:
    """Media bytes as references."""
    return tuple(MediaReference(data=data) for data in media)


def conversation_from_json(
    value: Mapping[str, Any], images: Iterable[bytes], positions: Iterable[bytes]
) -> Conversation:
    """A conversation from the SAMPLE object of the multi-mix layouts."""
    extra = ("role", "content")
    return Conversation(
        id=value.get("id"),
        messages=tuple(
            Message(m["role"], m["content"], {k: v for k, v in m.items() if k not in extra})
            for m in value.get("messages") or ()
        ),
        text=value.get("text"),
        input_ids=_array(value.get("input_ids")),
        labels=_array(value.get("labels")),
        images=references(images),
        patch_positions=references(positions),
        tools=value.get("tools"),
        video=bool(value.get("video")),
        fps=value.get("fps"),
        timestamp_decimal=value.get("timestamp_decimal"),
    )


def _array(value: Any) -> Any:
    return None if value is None else np.asarray(value, dtype=np.int64)
