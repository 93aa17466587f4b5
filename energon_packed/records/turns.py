"""Turns of a record in any spelling in, Messages out: role, content, loss weight, reasoning and tool calls.

    {"role": "user", "content": "Hi"}    {"from": "human", "value": "Hi"}    {"speaker": "bot", "text": "Hello."}

`tool_calls`, `tool_call_id` and `name` are passed to the chat template. Calls are converted to the form of OpenAI,
with `arguments` as an object. Records may also write `arguments` as JSON text (OpenAI) or as `parameters` (Llama),
calls as `{name, arguments}` (ShareGPT, xLAM), or all of it as JSON text.

Fields for the loss weight of a turn, in the spellings of trainers:

weight       OpenAI fine-tuning and axolotl: 0 or 1; other numbers scale the loss of the turn
loss_weight  a number
loss_scale   ms-swift: a number
loss         ms-swift: true or false
train        axolotl (also `training`): true or false
loss_mask    Megatron: 1 is a target, 0 is not
masked       torchtune: true is not a target
mask         ambiguous (trained in some datasets, hidden in others), so it is rejected

`advantage` and `reward` of an assistant turn are values of its targets (`columns.py`).

Other fields are counted by name, or reject the record if they would change training (`unused_fields.unused_fields`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.records.columns import read_numbers
from energon_packed.records.conversation import EXTRA_FIELDS, LOSS_WEIGHTS, Message, is_loss_weight
from energon_packed.records.exact_json import parse_json
from energon_packed.records.fields import (
    OBJECT,
    Record,
    check_writable,
    flatten,
    given,
    is_given,
    key_names,
    missing_field,
    read_objects,
    read_text,
    shown,
    unsupported_field,
)
from energon_packed.records.media.audio import FILE_FIELDS as AUDIO_FILE_FIELDS
from energon_packed.records.media.audio import KEYS as AUDIO_KEYS
from energon_packed.records.media.fields import Media, has_tags
from energon_packed.records.media.kinds import AUDIO, IMAGE, MEDIA_KINDS, VIDEO
from energon_packed.records.media.reference import IMAGE_SETTINGS, read_image_settings
from energon_packed.records.media.video import VideoReference
from energon_packed.records.media.video_fields import (
    FILE_FIELDS,
    VIDEO_KEYS,
    check_video_fields,
    is_video_file,
    read_settings,
    read_video,
    read_videos,
)
from energon_packed.records.unused_fields import unsupported

_NUMBERS = ("weight", "loss_weight", "loss_scale")
_FLAGS = ("loss", "train", "training", "loss_mask")
_NEGATED = "masked"
_AMBIGUOUS = "mask"
WEIGHT_FIELDS = (*_NUMBERS, *_FLAGS, _NEGATED, _AMBIGUOUS)
ROLE_FIELDS = ("role", "from", "speaker")
CONTENT_FIELDS = ("content", "value", "text")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALL_FIELDS = ("tool_calls", "function_call")
FUNCTION_CALL = "function_call"  # the role of a turn whose content is the call
# Spellings of roles in published datasets; ShareGPT alone has human, gpt, chatgpt, bing and bard.
ROLE_NAMES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatgpt", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("tool", "observation", "function", "function_response", "tool_response", "tool_output", "ipython"), "tool"
    ),
    **dict.fromkeys((FUNCTION_CALL, "tool_call"), FUNCTION_CALL),
}
# Roles whose content is text: `function_call` turns contain JSON and are not plain.
PLAIN_ROLES = {name: role for name, role in ROLE_NAMES.items() if role != FUNCTION_CALL}
_KNOWN = frozenset(
    (
        *(*ROLE_FIELDS, *CONTENT_FIELDS, *EXTRA_FIELDS, *REASONING_FIELDS, *WEIGHT_FIELDS, *CALL_FIELDS),
        *(name for kind in MEDIA_KINDS.values() for name in kind.fields),
    )
)
_CALL = frozenset(("id", "type", "index", "function"))
_FUNCTION = frozenset(("name", "arguments", "parameters"))
_PART_IMAGES = ("image", "image_url", "path", "url", "source")
_KINDS = {
    **{"text": "text", "input_text": "text", "image": "image", "image_url": "image"},
    **{"video": "video", "video_url": "video"},
    **{"audio": "audio", "audio_url": "audio", "input_audio": "audio"},
}
_AS_CALLS = "write it as tool_calls of the turn"
_AS_TURN = "write it as a turn of the role tool"
_HINTS = {
    **{"tool_use": _AS_CALLS, "tool_call": _AS_CALLS, "tool_result": _AS_TURN, "tool_response": _AS_TURN},
    **dict.fromkeys(("thinking", "reasoning"), "write it as reasoning_content of the turn"),
}
_WITH_VALUE = frozenset(("type", "value"))
_VALUES = (
    "text",
    "image_url",
    "video_url",
    "audio_url",
)  # types whose value has the name of the type in other formats
_FIELDS = {
    "text": frozenset(("type", "text")),
    "image": frozenset(("type", *_PART_IMAGES, *IMAGE_SETTINGS)),
    "video": frozenset(("type", "video", "frames")),
    "video file": FILE_FIELDS,
    "audio": AUDIO_FILE_FIELDS,
}


def read_messages(turns: Any, label: str, media: Media) -> list[Message]:
    """Read a list of turns; consecutive turns that contain only calls become one turn (ms-swift).

    Args:
        turns: a list of objects.
        label: the field with the turns, for errors.
        media: gets the images of content parts and the unused fields.

    Raises:
        RecordError: a turn has no role or content, an unknown role, or an unsupported field.
    """
    messages: list[Message] = []
    for turn in read_objects(turns, label):
        message = _message(turn, media)
        joined = _joined(messages[-1], message) if messages and message.extra else None
        # ms-swift writes parallel calls as consecutive turns; templates expect them in a single turn.
        if joined is None:
            messages.append(message)
        else:
            messages[-1] = joined
    return messages


def _joined(message: Message, following: Message) -> Message | None:
    """Merge two turns that contain only calls; None if one of them contains anything else."""
    calls = [turn.extra.get("tool_calls") or [] for turn in (message, following)]
    if not all(calls) or following.content.strip() or len(following.extra) > 1:
        return None
    if (message.weight, message.values) != (following.weight, following.values):
        return None
    return message._replace(extra={**message.extra, "tool_calls": [*calls[0], *calls[1]]})


def _message(turn: Record, media: Media) -> Message:
    # Most turns have two keys, so the optional fields are read only if another key exists.
    keys = keys_of(tuple(turn))
    field, name = _one_of(turn, keys.role)
    if name is None:
        raise missing_field(f"a message has no role; its keys are {key_names(turn)}")
    role = read_role(name, field)
    _, content = _one_of(turn, keys.content)
    extra = {} if keys.is_plain else _extra(turn)
    weight, values = 1.0, dict[str, float]()
    if not keys.is_plain:
        if role in ("assistant", FUNCTION_CALL):  # other turns have no targets
            values = read_numbers(turn, "a turn")
        media.add_unused(turn, _KNOWN.union(values) if values else _KNOWN, "a turn")
        weight = read_weight(turn, "assistant" if role == FUNCTION_CALL else role)
    if role == FUNCTION_CALL:
        return Message(
            "assistant", "", {**extra, "tool_calls": read_tool_calls(content, "a function_call turn")}, weight, values
        )
    if isinstance(content, list | tuple):
        content, of_parts = _parts_with_values(content)
        if of_parts.keys() & extra.keys():
            raise unsupported_field(f"a turn has {' and '.join(of_parts)} as a field and as parts; keep one")
        extra = extra | of_parts if of_parts else extra
    # An assistant turn with calls alone has no content.
    if content is None and not extra:
        raise missing_field(f"the {role} message has no content")
    if isinstance(content, list | tuple):
        text = "".join([_read_part(part, media) for part in content])
    else:
        if not isinstance(content, str):
            content = read_text("" if content is None else content, f"content of the {role} message")
        text = media.take_tagged(content) if has_tags(content) else content
    if not keys.is_plain:
        text = _with_own_media(turn, text, media)
    return Message(role, text, extra, weight, values)


def _parts_with_values(parts: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Read parts `{"type": "text", "value": "..."}`, the format of LLaMA-Factory 1.0 (`v1/utils/types.py`).

    Returns:
        The parts with text and media under the names of other formats, and the fields of the turn that the other parts
        make: `reasoning_content` and `tool_calls`.
    """
    if not any(isinstance(part, OBJECT) and part.keys() == _WITH_VALUE for part in parts):
        return parts, {}
    others, reasoning, calls = list[Any](), list[str](), list[dict[str, Any]]()
    for part in parts:
        kind = part["type"] if isinstance(part, OBJECT) and part.keys() == _WITH_VALUE else None
        if kind == "reasoning":
            reasoning.append(read_text(part["value"], "a reasoning part"))
        elif kind == "tool_call":
            calls += read_tool_calls(part["value"], "a tool_call part")
        else:
            others.append({"type": kind, kind: part["value"]} if kind in _VALUES else part)
    extra: dict[str, Any] = {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return others, extra | ({"tool_calls": calls} if calls else {})


def _with_own_media(turn: Record, text: str, media: Media) -> str:
    """Add the media that the turn lists; their placeholders precede the content if it has none of the kind."""
    for kind in (AUDIO, VIDEO, IMAGE):  # as each puts its placeholders before the others, images are the first
        filled = given(turn, kind.fields)
        if not filled:
            continue
        values = flatten(turn[filled[0]])  # a value or a list
        if kind is VIDEO and not all(is_video_file(value, alone=len(values) == 1) for value in values):
            remedy = "pass video files, or the frames of each video as videos of the record"
            raise unsupported(filled[0], "a turn", remedy)
        count = text.count(kind.placeholder)
        if len(filled) > 1 or count not in (0, len(values)):
            one = kind.noun.rpartition(" ")[2]
            raise RecordError(
                kind.mismatch,
                f"a turn has {' and '.join(filled)} with {len(values)} {kind.plural} for {count} {kind.placeholder}; "
                f"use one list and one placeholder per {one}",
            )
        if kind is VIDEO:
            check_video_fields(turn, "a turn", of_one_video=False)
        for value in values:
            media.add(kind, value)
        text = text if count else kind.placeholder * len(values) + text
    return text


@dataclass(frozen=True, slots=True)
class TurnKeys:
    """Meaning of the keys of a turn.

    Attributes:
        role, content: the keys with these meanings.
        is_plain: the turn has a single role, a single content, and no other key.
    """

    role: tuple[str, ...]
    content: tuple[str, ...]
    is_plain: bool


@lru_cache(maxsize=1024)
def keys_of(names: tuple[str, ...]) -> TurnKeys:
    """Classify the keys of a turn; cached, since most turns of a file have the same keys."""
    role = tuple(name for name in ROLE_FIELDS if name in names)
    content = tuple(name for name in CONTENT_FIELDS if name in names)
    return TurnKeys(role, content, is_plain=len(role) == len(content) == 1 and len(names) == 2)


def is_turn(value: Any) -> bool:
    """Whether a value is an object with a role: a list of turns is a conversation, and other lists are not."""
    return isinstance(value, OBJECT) and bool(keys_of(tuple(value)).role)


def read_role(name: Any, field: str) -> str:
    """Map a role name to a role of `ROLES`, or to `FUNCTION_CALL`.

    Raises:
        RecordError: `bad_role`.
    """
    role = (ROLE_NAMES.get(name) or ROLE_NAMES.get(name.strip().lower())) if isinstance(name, str) else None
    if role is None:
        raise RecordError(Reason.BAD_ROLE, f"{field} {name!r}; use one of {', '.join(ROLE_NAMES)}")
    return role


def _one_of(turn: Record, fields: tuple[str, ...]) -> tuple[str, Any]:
    """Name and value of the field that has a value; ("", None) if all are null."""
    if len(fields) == 1:
        return fields[0], turn[fields[0]]
    filled = [field for field in fields if turn[field] is not None]
    if not filled:
        return "", None
    # Equal copies are harmless: some exports write both `content` and `value`.
    if any(turn[field] != turn[filled[0]] for field in filled[1:]):
        raise unsupported_field(f"a turn has {' and '.join(filled)}, which differ; keep the one that is meant")
    return filled[0], turn[filled[0]]


def _extra(turn: Record) -> dict[str, Any]:
    """Read the fields for the chat template beside role and content."""
    extra = {key: turn[key] for key in ("tool_call_id", "name") if turn.get(key)}
    _, reasoning = _one_of(turn, tuple(key for key in REASONING_FIELDS if turn.get(key)))
    if reasoning is not None:
        extra["reasoning_content"] = read_text(reasoning, "reasoning of a turn")
    calls = given(turn, CALL_FIELDS)
    if len(calls) > 1:
        raise unsupported_field("a turn has both tool_calls and function_call; keep tool_calls")
    if calls:
        extra["tool_calls"] = read_tool_calls(turn[calls[0]], calls[0])
    return extra


def _read_part(part: Any, media: Media) -> str:
    """Convert a content part to text with placeholders; its images and unused fields are added to `media`.

    Raises:
        RecordError: a part of an unknown type, a video that is not a list of frames, or an unsupported field.
    """
    if isinstance(part, str):
        return part
    kind = _kind_of_part(part) if isinstance(part, Mapping) else None
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if kind is None and isinstance(part_type, str) and part_type in _HINTS:
        raise unsupported_field(f"a content part of type {part_type!r} is not supported; {_HINTS[part_type]}")
    if kind is None:
        name = repr(part_type)[:80] if isinstance(part, Mapping) else type(part).__name__
        keys = f" with the keys {key_names(part)}" if isinstance(part, Mapping) and part_type is None else ""
        raise missing_field(f"a content part of type {name}{keys}; use text, image, video or audio, or their _url")
    if kind == "video":
        return _read_video(part, media)
    if kind == "audio":
        return _read_audio(part, media)
    media.add_unused(part, _FIELDS[kind], f"a content part of type {kind}")
    if kind == "text":
        text = read_text(part.get("text"), "a text part")
        return media.take_tagged(text) if has_tags(text) else text
    value = next((part[name] for name in _PART_IMAGES if part.get(name)), None)
    settings = read_image_settings(part)
    if value:
        media.add_inline(value, settings)
    elif settings:  # a placeholder of an image in the images field
        raise unsupported_field(
            f"{' and '.join(settings)} of a content part without an image; write it into the object of the image, as "
            "in images=[{path, max_pixels}]"
        )
    return IMAGE.placeholder


def _kind_of_part(part: Record) -> str | None:
    """`text`, `image`, `video` or `audio`: by the type of the part, or else by its only field with a value."""
    if part.get("type") is not None:
        return _KINDS.get(part["type"]) if isinstance(part["type"], str) else None
    names = ("text", "image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
    kinds = {_KINDS[name] for name in given(part, names)}
    return kinds.pop() if len(kinds) == 1 else None


def _read_video(part: Mapping[str, Any], media: Media) -> str:
    """Add the video of a part: a file, with its own settings, or frames; return its placeholders."""
    value = next((part[name] for name in given(part, ("frames", *VIDEO_KEYS))), None)
    if value is None:
        media.add_unused(part, _FIELDS["video"], "a content part of type video")
        # The part is only a placeholder: its frames or its file are in the videos field.
        if media.in_field(VIDEO):
            return VIDEO.placeholder
        raise RecordError(Reason.MISSING_VIDEO, "a content part of type video has no video; use a file or frames")
    videos = read_videos(value, "video of a content part", media.root)
    has_files = any(isinstance(video, VideoReference) for video in videos)
    if has_files:
        check_video_fields(part, "a content part of type video")
    media.add_unused(part, _FIELDS["video file" if has_files else "video"], "a content part of type video")
    settings = read_settings(part) if has_files else {}
    texts = []
    for video in videos:
        if isinstance(video, VideoReference):
            media.extend(VIDEO, [read_video(video, media.root, settings)])
            texts.append(VIDEO.placeholder)
        else:
            media.is_video = True
            media.extend(IMAGE, video)
            texts.append(IMAGE.placeholder * len(video))
    return "".join(texts)


def _read_audio(part: Mapping[str, Any], media: Media) -> str:
    """Add the audio file of a part; without a file, the part is the placeholder of a file in the audios field."""
    media.add_unused(part, _FIELDS["audio"], "a content part of type audio")
    if given(part, ("input_audio", *AUDIO_KEYS)):
        media.add(AUDIO, part)
    elif not media.in_field(AUDIO):
        raise RecordError(Reason.MISSING_AUDIO, "a content part of type audio has no file; use a path, url or bytes")
    return AUDIO.placeholder


def read_tool_calls(value: Any, label: str) -> list[dict[str, Any]]:
    """Read the calls of a turn.

    Args:
        value: a call, a list of calls, or JSON text of either.
        label: the field or turn with the calls, for errors.

    Raises:
        RecordError: `bad_json` for invalid JSON text, `missing_field` for a call without a name.
    """
    calls = _parsed_json(value, label) if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, OBJECT) else calls
    if not isinstance(calls, list | tuple) or not calls:
        raise missing_field(f"{label} is {shown(value)}; use a list of calls with a name and arguments")
    return [_call(call, label) for call in calls]


def _call(call: Any, label: str) -> dict[str, Any]:
    if not isinstance(call, OBJECT):
        raise missing_field(f"a call of {label} is {shown(call)}, not an object")
    function = call.get("function")
    if isinstance(function, OBJECT):
        _check_keys(call, _CALL)
        _check_keys(function, _FUNCTION)
        return {**call, "function": _function(function, label)}
    _check_keys(call, (_CALL | _FUNCTION) - {"function"})
    ident = {"id": call["id"]} if is_given(call.get("id")) else {}
    return {**ident, "type": "function", "function": _function(call, label)}


def _check_keys(call: Record, known: frozenset[str]) -> None:
    for name in call:
        if name not in known and is_given(call[name]):
            raise unsupported_field(
                f"the field {name} of a tool call is not supported: a call has a name and arguments"
            )


def _function(function: Record, label: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise missing_field(f"a call of {label} has no name: {shown(function)}")
    # A table has both columns, so an empty value counts as absent.
    filled = [key for key in ("arguments", "parameters") if function.get(key) not in (None, "", {}, [])]
    if len(filled) > 1:
        raise unsupported_field(f"a call of {name} has arguments and parameters; keep arguments")
    arguments = function[filled[0]] if filled else {}
    if isinstance(arguments, str):
        arguments = _parsed_json(arguments, f"arguments of {name}")
    if not isinstance(arguments, Mapping):
        raise RecordError(Reason.BAD_JSON, f"arguments of {name} are {shown(arguments)}; use a JSON object")
    return {"name": name, "arguments": dict(arguments)}


def _parsed_json(text: str, label: str) -> Any:
    try:
        value = parse_json(text)
    except orjson.JSONDecodeError as error:
        raise RecordError(Reason.BAD_JSON, f"{label} is not JSON: {error}; it starts with {shown(text)}") from error
    # Checked after parsing: the check of the record cannot see inside JSON text.
    check_writable(value, label)
    return value


def read_weight(turn: Record, role: str) -> float:
    """Read the loss weight of a turn; 1 by default.

    Args:
        turn: a turn, with or without one of `WEIGHT_FIELDS`.
        role: role of the turn: only assistant turns can be targets.

    Raises:
        RecordError: `unsupported_field` if a value is invalid or ambiguous, two masks differ, or a turn of another
            role has a positive weight.
    """
    weights = {key: _weight(key, turn[key]) for key in WEIGHT_FIELDS if turn.get(key) is not None}
    if not weights:
        return 1.0
    # Masks that agree are accepted: a file may be written for several trainers. A flag agrees with any weight above 0.
    numbers = {key: weight for key, weight in weights.items() if key in _NUMBERS} or weights
    key, weight = next(iter(numbers.items()))
    if {*numbers.values()} != {weight} or {value > 0 for value in weights.values()} != {weight > 0}:
        raise unsupported_field(f"a turn has {' and '.join(weights)}, which differ; keep weight alone")
    # Only assistant turns can be targets, so a positive weight elsewhere would be dropped silently.
    if role != "assistant" and weight > 0:
        raise unsupported_field(
            f"{key} is {turn[key]!r} for a {role} turn; only assistant turns are trained, write 0 or remove the field"
        )
    return weight


def _weight(key: str, value: Any) -> float:
    if key == _AMBIGUOUS:
        raise unsupported_field(
            "`mask` is ambiguous (true means trained in some datasets, masked in others). Use weight: 1 or weight: 0."
        )
    weight = float(value) if isinstance(value, bool | int | float) else math.nan
    if key in _NUMBERS:
        if not is_loss_weight(weight):
            raise unsupported_field(f"{key} of a turn is {value!r}; use 0, or a number {LOSS_WEIGHTS}")
        return weight
    if weight not in (0.0, 1.0):
        raise unsupported_field(f"{key} of a turn is {value!r}; use true or false, or weight for a number")
    # torchtune's `masked` has the opposite meaning.
    return 1.0 - weight if key == _NEGATED else weight


def read_history(record: Record) -> list[Message]:
    """Read `history` as user and assistant turns. Its answers are targets, as in LLaMA-Factory and ms-swift.

    Raises:
        RecordError: the history is not a list of pairs of strings.
    """
    history = record.get("history")
    if not is_given(history):
        return []
    if not isinstance(history, list | tuple):
        raise missing_field(f"history must be a list of pairs, not {type(history).__name__}")
    messages = []
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise missing_field("an entry of history is not a pair of question and answer")
        messages += [
            Message("user", read_text(pair[0], "a question of history")),
            Message("assistant", read_text(pair[1], "an answer of history")),
        ]
    return messages
