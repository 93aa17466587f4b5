"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}`."""

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import Record, key_names, read_text, read_turns
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape

ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": "assistant",
    "observation": "tool",
}


class ShareGPT(Shape):
    """Turns with `from` and `value`."""

    key = "conversations"

    def read(self, record: Record, media: Media) -> Draft:
        """The turns, with the roles of `ROLE_NAMES`."""
        return Draft(messages=[_message(turn) for turn in read_turns(record, self.key)])


def _message(turn: Record) -> Message:
    if "from" not in turn or "value" not in turn:
        raise RecordError(Reason.MISSING_FIELD, f"a turn needs from and value; it has {key_names(turn)}")
    role = ROLE_NAMES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise RecordError(Reason.BAD_ROLE, f"from {turn['from']!r}; use one of {', '.join(ROLE_NAMES)}")
    return Message(role, read_text(turn["value"], f"value of a {role} turn"))
