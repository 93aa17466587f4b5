"""Turns of a conversation: one reader for every spelling of role and content.

    {"role": "user", "content": "Hi"}    {"from": "human", "value": "Hi"}    {"speaker": "bot", "text": "Hello."}

Role, content, weight and reasoning become a `Message`; `tool_calls`, `tool_call_id` and `name` go to the template.
A field that nothing reads is counted, or rejected where it would change training (`accounting`).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import is_given, unused_fields
from energon_packed.records.conversation import EXTRA_FIELDS, IMAGE_PLACEHOLDER, Message
from energon_packed.records.fields import Record, flatten, key_names, read_objects, read_text
from energon_packed.records.media_fields import Media
from energon_packed.records.parts import read_parts
from energon_packed.records.tool_calls import read_tool_calls
from energon_packed.records.weights import WEIGHT_FIELDS, read_weight

ROLE_FIELDS = ("role", "from", "speaker")
CONTENT_FIELDS = ("content", "value", "text")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALL_FIELDS = ("tool_calls", "function_call")
IMAGE_FIELDS = ("images", "image")
FUNCTION_CALL = "function_call"  # the role of a turn whose content is the call
ROLE_NAMES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatgpt", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("tool", "observation", "function", "function_response", "tool_response", "tool_output", "ipython"), "tool"
    ),
    **dict.fromkeys((FUNCTION_CALL, "tool_call"), FUNCTION_CALL),
}
PLAIN_ROLES = {name: role for name, role in ROLE_NAMES.items() if role != FUNCTION_CALL}
_KNOWN = frozenset(
    (*ROLE_FIELDS, *CONTENT_FIELDS, *EXTRA_FIELDS, *REASONING_FIELDS, *WEIGHT_FIELDS, *CALL_FIELDS, *IMAGE_FIELDS)
)


@dataclass(frozen=True, slots=True)
class TurnKeys:
    """What the keys of a turn are; most turns of a file have the same.

    Attributes:
        role, content: the fields with these meanings.
        is_plain: one role, one content, and nothing else.
    """

    role: tuple[str, ...]
    content: tuple[str, ...]
    is_plain: bool


@lru_cache(maxsize=1024)
def keys_of(names: tuple[str, ...]) -> TurnKeys:
    """What the keys of a turn are, by their names."""
    role = tuple(name for name in ROLE_FIELDS if name in names)
    content = tuple(name for name in CONTENT_FIELDS if name in names)
    return TurnKeys(role, content, is_plain=len(role) == len(content) == 1 and len(names) == 2)


def read_messages(turns: Any, what: str, media: Media) -> list[Message]:
    """The messages of a list of turns; calls in turns of their own, one after another, become one turn (ms-swift).

    Args:
        turns: a list of objects.
        what: the field that holds them, for errors.
        media: images of content parts and unused fields join it.

    Raises:
        RecordError: a turn has no role or content, an unknown role, or a field that cannot be honoured.
    """
    messages: list[Message] = []
    for turn in read_objects(turns, what):
        message = _message(turn, media)
        joined = _joined(messages[-1], message) if messages and message.extra else None
        if joined is None:
            messages.append(message)
        else:
            messages[-1] = joined
    return messages


def _joined(message: Message, following: Message) -> Message | None:
    """One turn with the calls of two that hold nothing else; None where they hold more."""
    calls = [one.extra.get("tool_calls") or [] for one in (message, following)]
    if not all(calls) or following.content.strip() or len(following.extra) > 1 or message.weight != following.weight:
        return None
    return message._replace(extra={**message.extra, "tool_calls": [*calls[0], *calls[1]]})


def _message(turn: Record, media: Media) -> Message:
    keys = keys_of(tuple(turn))
    field, name = _one_of(turn, keys.role)
    if name is None:
        raise RecordError(Reason.MISSING_FIELD, f"a message has no role; its keys are {key_names(turn)}")
    role = read_role(name, field)
    _, content = _one_of(turn, keys.content)
    extra = {} if keys.is_plain else _extra(turn)
    weight = 1.0
    if not keys.is_plain:
        media.unused_fields.update(unused_fields(turn, _KNOWN, "a turn"))
        weight = read_weight(turn, "assistant" if role == FUNCTION_CALL else role)
    if role == FUNCTION_CALL:
        return Message(
            "assistant", "", {**extra, "tool_calls": read_tool_calls(content, "a function_call turn")}, weight
        )
    if content is None and not extra:
        raise RecordError(Reason.MISSING_FIELD, f"the {role} message has no content")
    if isinstance(content, list | tuple):
        text = read_parts(content, media)
    else:
        text = media.take_tagged(read_text("" if content is None else content, f"content of a {role} message"))
    return Message(role, text if keys.is_plain else _own_images(turn, text, media), extra, weight)


def read_role(name: Any, field: str) -> str:
    """A role of `ROLES`, or `FUNCTION_CALL`.

    Raises:
        RecordError: `bad_role`.
    """
    role = (ROLE_NAMES.get(name) or ROLE_NAMES.get(name.strip().lower())) if isinstance(name, str) else None
    if role is None:
        raise RecordError(Reason.BAD_ROLE, f"{field} {name!r}; use one of {', '.join(ROLE_NAMES)}")
    return role


def _one_of(turn: Record, fields: tuple[str, ...]) -> tuple[str, Any]:
    """Name and value of the one field that has a value; ("", None) without any."""
    if len(fields) == 1:
        return fields[0], turn[fields[0]]
    given = [field for field in fields if turn[field] is not None]
    if not given:
        return "", None
    if any(turn[field] != turn[given[0]] for field in given[1:]):
        raise RecordError(
            Reason.UNSUPPORTED_FIELD, f"a turn has {' and '.join(given)}, which differ; keep the one that is meant"
        )
    return given[0], turn[given[0]]


def _extra(turn: Record) -> dict[str, Any]:
    """What the chat template gets beside role and content."""
    extra = {key: turn[key] for key in ("tool_call_id", "name") if turn.get(key)}
    _, reasoning = _one_of(turn, tuple(key for key in REASONING_FIELDS if turn.get(key)))
    if reasoning is not None:
        extra["reasoning_content"] = read_text(reasoning, "reasoning of a turn")
    calls = [key for key in CALL_FIELDS if is_given(turn.get(key))]
    if len(calls) > 1:
        raise RecordError(Reason.UNSUPPORTED_FIELD, "a turn has both tool_calls and function_call; keep tool_calls")
    if calls:
        extra["tool_calls"] = read_tool_calls(turn[calls[0]], calls[0])
    return extra


def _own_images(turn: Record, text: str, media: Media) -> str:
    """The content with a placeholder for each image that the turn lists, before it where it has none."""
    given = [key for key in IMAGE_FIELDS if is_given(turn.get(key))]
    if not given:
        return text
    images = flatten(turn[given[0]])
    if len(given) > 1 or (IMAGE_PLACEHOLDER in text and text.count(IMAGE_PLACEHOLDER) != len(images)):
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH,
            f"a turn has {' and '.join(given)} with {len(images)} images for {text.count(IMAGE_PLACEHOLDER)} "
            f"{IMAGE_PLACEHOLDER}; give one list and one placeholder per image",
        )
    for image in images:
        media.add_inline(image)
    return text if IMAGE_PLACEHOLDER in text else IMAGE_PLACEHOLDER * len(images) + text
