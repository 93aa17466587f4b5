"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}`.

The list may also be called `conversation`. Turns are read as those of `messages`: both spellings are valid. Two other
forms of turns are read: texts that alternate between user and assistant (LIMA), and pairs
`{"input": "...", "output": "..."}` (Capybara).
"""

from typing import ClassVar

from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, OBJECT, Record, read_text, unused_fields
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.alternating import alternating
from energon_packed.records.shapes.messages import read_turn_list
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.turns import read_messages

_PAIR = frozenset(("input", "output"))


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
        turns = read_turn_list(record[key], key)
        if turns and all(isinstance(turn, str) for turn in turns):
            return Draft(messages=alternating(turns))
        if turns and all(isinstance(turn, OBJECT) and turn.keys() >= _PAIR for turn in turns):
            return Draft(messages=[message for pair in turns for message in _pair(pair, media)])
        return Draft(messages=read_messages(turns, key, media))


def _pair(pair: Record, media: Media) -> list[Message]:
    media.unused_fields.update(unused_fields(pair, _PAIR, "a turn"))
    return alternating([read_text(pair["input"], "input of a turn"), read_text(pair["output"], "output of a turn")])
