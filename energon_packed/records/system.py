"""The system prompt of a record: in any of `SYSTEM_FIELDS`, or in `instruction` beside a conversation.

An `instruction` that repeats a user turn (Magpie) is none.
"""

from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import SYSTEM_FIELDS, is_given, unsupported
from energon_packed.records.conversation import Message
from energon_packed.records.fields import OBJECT, Record, read_objects, read_text
from energon_packed.records.shapes import Draft, Shape
from energon_packed.records.shapes.contents import read_gemini_text

_NAMES = frozenset((*SYSTEM_FIELDS, "instruction"))


def add_system(draft: Draft, record: Record, shape: Shape) -> None:
    """Make the system prompt of a record the first message.

    Args:
        draft: of the record; a message is added.
        record: with any system field, or none.
        shape: of the record; says whether `instruction` is a system prompt.

    Raises:
        RecordError: the value is not text, there are two different ones, or nothing would render it.
    """
    if shape.reads_system or _NAMES.isdisjoint(record):
        return
    names = (*SYSTEM_FIELDS, "instruction") if shape.instruction_is_system else SYSTEM_FIELDS
    given = [name for name in names if is_given(record.get(name))]
    if "instruction" in given and _repeats_a_turn(record["instruction"], draft):
        given.remove("instruction")
    if not given:
        return
    system = _text(record[given[0]], given[0])
    if draft.input_ids is not None:
        raise unsupported(given[0], remedy="input_ids are used as they are; put the prompt into them")
    if draft.text is not None:
        raise RecordError(Reason.BAD_ROLE, f"a text record has a {given[0]} field, which no template would render")
    if any(_text(record[name], name) != system for name in given[1:]):
        raise RecordError(Reason.BAD_ROLE, f"{' and '.join(given)} of the record differ; keep the one that is meant")
    first = draft.messages[0] if draft.messages else None
    if first is None or first.role != "system":
        draft.messages.insert(0, Message("system", system))
    elif first.content != system:
        raise RecordError(Reason.BAD_ROLE, f"the record has a {given[0]} field and another system message")


def _repeats_a_turn(instruction: Any, draft: Draft) -> bool:
    texts = (message.content.strip() for message in draft.messages if message.role == "user")
    return isinstance(instruction, str) and instruction.strip() in texts


def _text(value: Any, name: str) -> str:
    if isinstance(value, list | tuple):  # content parts, of Anthropic and Bedrock
        return "".join([read_text(part.get("text"), f"a part of {name}") for part in read_objects(value, name)])
    if isinstance(value, OBJECT):
        return read_gemini_text(value, name)
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_FIELD, f"{name} must be text, not {type(value).__name__}")
    return value
