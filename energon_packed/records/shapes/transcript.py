"""A conversation in one text: glaive-function-calling-v2.

    {"system": "SYSTEM: ...", "chat": "USER: ... ASSISTANT: ... <|endoftext|> FUNCTION RESPONSE: ... ASSISTANT: ..."}

`FUNCTION RESPONSE` is a tool turn. Calls (`<functioncall> {...}`) and the functions of the system prompt stay text, as
Glaive writes them. `<|endoftext|>` at the end of a turn is dropped: the chat template writes its own.
"""

import re
from typing import ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, SYSTEM_FIELDS, Record, is_given, read_text
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool", "SYSTEM": "system"}
_HEAD = re.compile(rf"(?:^|\n\s*)({'|'.join(_ROLES)}):[ ]?")
_END = "<|endoftext|>"


class Transcript(Shape):
    """Turns that begin with `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:`."""

    key = "chat"
    fields: ClassVar[frozenset[str]] = (COMMON_FIELDS - {*SYSTEM_FIELDS}) | {"chat", "system"}
    reads_system: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> Draft:
        """The turns, with the system prompt before them."""
        if is_given(record.get("system")):
            system = read_text(record["system"], "system").strip()
            return Draft(messages=[Message("system", system.removeprefix("SYSTEM:").strip()), *self._turns(record)])
        return Draft(messages=self._turns(record))

    def _turns(self, record: Record) -> list[Message]:
        before, *pieces = _HEAD.split(read_text(record[self.key], self.key))
        if before.strip() or not pieces:
            raise RecordError(
                Reason.MISSING_FIELD,
                f"chat does not begin with one of {', '.join(f'{name}:' for name in _ROLES)}; convert it to messages",
            )
        turns = [(_ROLES[name], text.strip()) for name, text in zip(pieces[::2], pieces[1::2], strict=True)]
        return [Message(role, text.removesuffix(_END).strip()) for role, text in turns]
