"""RecordFormat, the base class of the record formats, and PartialConversation, the output of its `read`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, Record
from energon_packed.records.media.fields import Media


@dataclass(slots=True)
class PartialConversation:
    """Output of a record format: exactly one of `messages`, `text`, `input_ids` and `members` is set.

    Attributes:
        messages: turns in order; a system field of the record is added later.
        text: a document, every token supervised.
        input_ids: int64 (L,), with `labels` int64 (L,), and `loss_weights` float32 (L,) if any weight is not 1.
        columns, label: as in `Conversation`.
        members: the samples of a record that is a group, in order: each a record in any record format, with `role` and
            `label`; the record itself has no turns, text and tokens then.

    Examples:
        >>> PartialConversation([Message("user", "2 + 2?"), Message("assistant", "4")]).messages[1].role
        'assistant'
    """

    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    input_ids: npt.NDArray[np.int64] | None = None
    labels: npt.NDArray[np.int64] | None = None
    loss_weights: npt.NDArray[np.float32] | None = None
    columns: Mapping[str, npt.NDArray[Any]] | None = None
    label: tuple[float, ...] | None = None
    members: list[dict[str, Any]] = field(default_factory=list)


def alternating(contents: Sequence[str]) -> list[Message]:
    """Make alternating turns; the first is the user turn."""
    return [Message("assistant" if index % 2 else "user", text) for index, text in enumerate(contents)]


def question_answer(question: str, answer: str, extra: Mapping[str, Any] | None = None) -> PartialConversation:
    """Make a user turn and an assistant turn, whose other values for the chat template are `extra`."""
    return PartialConversation([Message("user", question), Message("assistant", answer, extra or {})])


class RecordFormat(ABC):
    """Base class of the record formats: implement `read`, and `matches` if `key` alone does not identify the format.

    Attributes:
        key: the field that identifies the format; also its name in messages.
        fields: fields of the record that are read, including the fields of every format. Other fields are counted as
            unused, or reject the record if ignoring them would change training. None: only media reject it.
        instruction_is_system: `instruction` is a system prompt in this format.
        images_first: images without placeholders belong before the first user turn. If false, they are put there too,
            but the conversation gets a note.
        has_roles: the record names the role of each turn, so that an empty user turn is meant.
        reads_images: the format reads `images` and `image` itself.
        reads_system: the format reads `system` itself.
        marks: a record without these fields does not match, and `matches` is not called; None without such fields.

    Examples:
        >>> class Dialog(RecordFormat):
        ...     key = "dialog"
        ...
        ...     def read(self, record, media):
        ...         roles = ("user", "assistant")
        ...         turns = [Message(roles[i % 2], text) for i, text in enumerate(record["dialog"])]
        ...         return PartialConversation(turns)
        >>> Dialog().read({"dialog": ["2 + 2?", "4"]}, None).messages[1].content
        '4'
    """

    key: ClassVar[str]
    fields: ClassVar[frozenset[str] | None] = None
    instruction_is_system: ClassVar[bool] = False
    images_first: ClassVar[bool] = False
    has_roles: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False
    reads_system: ClassVar[bool] = False
    marks: ClassVar[frozenset[str] | None] = None

    def matches(self, record: Record) -> bool:
        """Whether the record has this format: by default, whether `key` has a value."""
        return record.get(self.key) is not None

    @abstractmethod
    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the turns, text or tokens of a record.

        Args:
            record: a mapping that `matches`.
            media: images and videos of the fields of the record; add images of content parts to it.

        Raises:
            RecordError: the record cannot be used.
        """


class GroupFormat(RecordFormat):
    """Base class of the formats of groups: implement `expand`, whose members are read like other records.

    Attributes:
        marks: the fields of which a record in the format has at least one.
        shares: each member has the media, system prompt, tools and settings of the record; if false, `expand` decides.
    """

    marks: ClassVar[frozenset[str]]
    shares: ClassVar[bool] = True

    @abstractmethod
    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make the members of a record, and list the fields that they contain.

        Raises:
            RecordError: the record cannot be used.
        """

    def shared(self, record: Record) -> dict[str, Any]:
        """Return the fields that every format reads, without the id."""
        return {name: record[name] for name in record if name in _SHARED}

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Make the members, and count or reject the fields that they do not contain."""
        members, used = self.expand(record, media)
        media.unused_fields -= used
        others = {name: record[name] for name in record if name not in used and name not in COMMON_FIELDS}
        media.add_unused({name: value for name, value in others.items() if name in (self.fields or ())}, _SHARED)
        shared = self.shared(record) if self.shares else {}
        return PartialConversation(members=[{**shared, **member} for member in members])


# `objects` replace placeholders of boxes in the turns of a member.
_SHARED = (COMMON_FIELDS - {"id"}) | {"objects"}
