"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}`.

The list may also be called `conversation`. Turns are read as those of `messages`: both spellings are valid.
"""

from typing import ClassVar

from energon_packed.records.accounting import COMMON_FIELDS
from energon_packed.records.fields import Record
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.turns import read_messages


class ShareGPT(Shape):
    """Turns under `conversations` or `conversation`."""

    key = "conversations"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"conversations", "conversation", "instruction"}
    instruction_is_system: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether either field has a value."""
        return record.get("conversations") is not None or isinstance(record.get("conversation"), list | tuple)

    def read(self, record: Record, media: Media) -> Draft:
        """The turns, with the roles of `turns.ROLE_NAMES`."""
        key = self.key if record.get(self.key) is not None else "conversation"
        return Draft(messages=read_messages(record[key], key, media))
