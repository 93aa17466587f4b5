"""OpenAI-style chat: `{"messages": [{"role": "user", "content": "..."}, ...]}`; content is text or typed parts.

A record that is a bare list of messages is read as this shape. The list may be JSON text (Orca AgentInstruct, tables).
"""

from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import COMMON_FIELDS, Record, read_json_list
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
        return Draft(messages=read_messages(read_turn_list(record[self.key], self.key), self.key, media))


def read_turn_list(value: Any, key: str) -> Any:
    """The list of turns, from JSON text where it is that.

    Raises:
        RecordError: `missing_field`, for another type.
    """
    turns = read_json_list(value, key) or [] if isinstance(value, str) else value
    if not isinstance(turns, list | tuple):
        raise RecordError(Reason.MISSING_FIELD, f"{key} must be a list, not {type(turns).__name__}")
    return turns
