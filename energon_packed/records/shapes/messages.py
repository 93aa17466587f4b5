"""OpenAI-style chat: `{"messages": [{"role": "user", "content": "..."}, ...]}`; content is text or typed parts."""

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import EXTRA_FIELDS, Message
from energon_packed.records.fields import Record, key_names, read_text, read_turns
from energon_packed.records.media_fields import Media
from energon_packed.records.parts import read_parts
from energon_packed.records.shapes.shape import Draft, Shape


class Messages(Shape):
    """Turns with a role and a content."""

    key = "messages"

    def read(self, record: Record, media: Media) -> Draft:
        """The messages, with their tool calls and reasoning."""
        return Draft(messages=[_message(turn, media) for turn in read_turns(record, self.key)])


def _message(turn: Record, media: Media) -> Message:
    role, content = turn.get("role"), turn.get("content")
    if role is None:
        raise RecordError(Reason.MISSING_FIELD, f"a message has no role; its keys are {key_names(turn)}")
    extra = {}
    if content is None or len(turn) > 2:  # most messages have a role and a content, and nothing else
        extra = {key: turn[key] for key in EXTRA_FIELDS if turn.get(key)}
    if content is None and not extra:
        raise RecordError(Reason.MISSING_FIELD, f"the {role} message has no content")
    if isinstance(content, list | tuple):
        content = read_parts(content, media)
    return Message(str(role), read_text(content or "", f"content of a {role} message"), extra)
