"""A plain document: every token is supervised.

    C4, FineWeb, RedPajama, The Pile, Wikipedia    {"text": "..."}
    The Stack, StarCoder                           {"content": "..."}
    RedPajama-V2                                   {"raw_content": "..."}

A row of OpenAssistant has a `text` and a `role`: it is one message of a tree, not a document.
"""

from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, one_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

_FIELDS = ("text", "content", "raw_content")


class Document(Shape):
    """Text without turns."""

    key = "text"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | set(_FIELDS)

    def matches(self, record: Record) -> bool:
        """Whether one of the fields has a value."""
        return any(record.get(name) is not None for name in _FIELDS)

    def read(self, record: Record, media: Media) -> Draft:
        """The text."""
        if is_given(record.get("role")) or is_given(record.get("parent_id")):
            raise RecordError(
                Reason.MISSING_FIELD,
                "the record is one message, with a text and a role, not a conversation; join the messages of each "
                "conversation, from the first to the last, as messages",
            )
        text = one_text(record, _FIELDS)
        if text is None or not text.strip():
            raise RecordError(Reason.EMPTY, "text is empty")
        return Draft(text=text)
