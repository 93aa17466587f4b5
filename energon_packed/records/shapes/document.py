"""A plain document: `{"text": "..."}`; every token is supervised."""

from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import COMMON_FIELDS
from energon_packed.records.fields import Record, read_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape


class Document(Shape):
    """Text without turns."""

    key = "text"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"text"}

    def read(self, record: Record, media: Media) -> Draft:
        """The text."""
        text = read_text(record["text"], "text")
        if not text.strip():
            raise RecordError(Reason.EMPTY, "text is empty")
        return Draft(text=text)
