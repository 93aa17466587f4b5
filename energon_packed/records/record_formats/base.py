"""Shape: one way in which records say what a conversation is. Two methods: `matches` and `read`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.records.conversation import Message
from energon_packed.records.fields import Record
from energon_packed.records.media_fields import Media


@dataclass(slots=True)
class PartialConversation:
    """What a shape reads: exactly one of `messages`, `text` and `input_ids`.

    Attributes:
        messages: turns in order; a system field of the record is added later.
        text: a document, every token supervised.
        input_ids: int64 (L,), with `labels` int64 (L,).
    """

    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    input_ids: npt.NDArray[np.int64] | None = None
    labels: npt.NDArray[np.int64] | None = None


class RecordFormat(ABC):
    """Reads records of one shape.

    Attributes:
        key: the field that identifies the shape; also its name in messages.
        fields: fields of the record that are read, those of every shape included; others are counted as unused, or
            rejected where ignoring them would change training. None, where a shape does not say: nothing is counted.
        instruction_is_system: `instruction` is a system prompt beside this shape.
        images_first: images stand before the first user turn where no placeholder places them. Elsewhere they do too,
            but the conversation gets a note.
        reads_images: the shape reads `images` and `image` itself.
        reads_system: the shape reads `system` itself.
    """

    key: ClassVar[str]
    fields: ClassVar[frozenset[str] | None] = None
    instruction_is_system: ClassVar[bool] = False
    images_first: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False
    reads_system: ClassVar[bool] = False

    def matches(self, record: Record) -> bool:
        """Whether the record has this shape: by default, whether `key` has a value."""
        return record.get(self.key) is not None

    @abstractmethod
    def read(self, record: Record, media: Media) -> PartialConversation:
        """Turns, text or tokens of a record.

        Args:
            record: a mapping that `matches`.
            media: images and videos of its fields; images of content parts are added to it.

        Raises:
            RecordError: the record cannot be used.
        """
