"""OpenAI-style chat: `{"messages": [{"role": "user", "content": "..."}, ...]}`; content is text or typed parts.

A record that is a bare list of messages is read as this shape.
"""

from typing import ClassVar

from energon_packed.records.accounting import COMMON_FIELDS
from energon_packed.records.fields import Record
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.turns import read_messages


class Messages(Shape):
    """Turns with a role and a content."""

    key = "messages"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"messages", "instruction"}
    instruction_is_system: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> Draft:
        """The messages, with their tool calls, reasoning and weights."""
        return Draft(messages=read_messages(record[self.key], self.key, media))
