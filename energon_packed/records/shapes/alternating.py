"""Alternating texts: `{"id": "0", "data": ["question", "answer", ...]}`, as UltraChat was first published.

The user begins; roles are not written.
"""

from collections.abc import Sequence
from typing import ClassVar

from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, Record
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape


class Alternating(Shape):
    """A list of texts, the user's first."""

    key = "data"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"data"}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `data` is a list of two texts or more."""
        data = record.get(self.key)
        return isinstance(data, list | tuple) and len(data) > 1 and all(isinstance(text, str) for text in data)

    def read(self, record: Record, media: Media) -> Draft:
        """User and assistant turns."""
        return Draft(messages=alternating(record[self.key]))


def alternating(texts: Sequence[str]) -> list[Message]:
    """Turns of texts: the first is the user's."""
    return [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
