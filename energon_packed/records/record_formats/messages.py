"""Records with a list of turns (or a transcript) in; Messages out.

    Messages     {"messages": [{"role": "user", "content": "..."}, ...]}                    OpenAI
    ShareGPT     {"conversations": [{"from": "human", "value": "..."}, ...]}                also `conversation`
    Contents     {"contents": [{"role": "user", "parts": [{"text"}, {"inline_data"}]}]}     Gemini
    Alternating  {"data": ["question", "answer", ...]}                                      UltraChat
    Transcript   {"system": "SYSTEM: ...", "chat": "USER: ... ASSISTANT: ... <|endoftext|> FUNCTION RESPONSE: ..."}

The list of Messages and ShareGPT may be JSON text (Orca AgentInstruct, tables), and both spellings of turns are valid
in both. A record that is a bare list of turns is read as Messages. ShareGPT also reads strings that alternate between
user and assistant (LIMA), and pairs `{"input": "...", "output": "..."}` (Capybara).

Contents has the roles `user` and `model`, and `systemInstruction` as system prompt. A part is `text`, `inline_data`
(`mime_type` and base64 `data`) or `file_data` (`file_uri`), in snake case or camel case.

Transcript is glaive-function-calling-v2. `FUNCTION RESPONSE` is a tool turn. Calls (`<functioncall> {...}`) and the
functions of the system prompt stay text, as Glaive writes them. `<|endoftext|>` at the end of a turn is dropped,
because the chat template writes its own end of turn.
"""

import re
from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import Message
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    SYSTEM_FIELDS,
    Record,
    given,
    is_given,
    key_names,
    missing_field,
    read_json_list,
    read_list,
    read_objects,
    read_text,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.media.kinds import IMAGE, MEDIA_KINDS, VIDEO
from energon_packed.records.media.video_fields import check_video_fields
from energon_packed.records.record_formats.base import PartialConversation, RecordFormat, alternating
from energon_packed.records.turns import FUNCTION_CALL, read_messages, read_role

_PAIR = ("input", "output")
_CONTENTS_TURN = frozenset(("role", "parts"))
_INLINE, _FILE = ("inline_data", "inlineData"), ("file_data", "fileData")
_PART = frozenset(("text", *_INLINE, *_FILE))
_BLOB = frozenset(("mime_type", "mimeType", "data", "file_uri", "fileUri", "display_name", "displayName"))
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool", "SYSTEM": "system"}
_TURN_START = re.compile(rf"(?:^|\n\s*)({'|'.join(_ROLES)}):[ ]?")
_END = "<|endoftext|>"


class Messages(RecordFormat):
    """Turns under `messages`."""

    key = "messages"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"messages", "instruction"}
    instruction_is_system: ClassVar[bool] = True
    has_roles: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the messages, with their tool calls, reasoning and weights."""
        return PartialConversation(read_messages(read_turn_list(record[self.key], self.key), self.key, media))


class ShareGPT(RecordFormat):
    """Turns under `conversations` or `conversation`."""

    key = "conversations"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"conversations", "conversation", "instruction"}
    instruction_is_system: ClassVar[bool] = True
    has_roles: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether either field has a value."""
        return record.get("conversations") is not None or isinstance(record.get("conversation"), list | tuple)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the turns, with the roles of `turns.ROLE_NAMES`."""
        key = self.key if record.get(self.key) is not None else "conversation"
        turns = read_turn_list(record[key], key)
        if turns and all(isinstance(turn, str) for turn in turns):
            return PartialConversation(alternating(turns))
        if turns and all(isinstance(turn, OBJECT) and turn.keys() >= {*_PAIR} for turn in turns):
            texts = []
            for pair in turns:
                media.add_unused(pair, frozenset(_PAIR), "a turn")
                texts += [read_text(pair[name], f"{name} of a turn") for name in _PAIR]
            return PartialConversation(alternating(texts))
        return PartialConversation(read_messages(turns, key, media))


def read_turn_list(value: Any, key: str) -> Any:
    """Read a list of turns, which may be JSON text.

    Raises:
        RecordError: `missing_field` for another type.
    """
    return read_json_list(value, key) or [] if isinstance(value, str) else read_list(value, key)


class Alternating(RecordFormat):
    """Strings that alternate between user and assistant."""

    key = "data"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"data"}
    images_first: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether `data` is a list of two strings or more."""
        data = record.get(self.key)
        return isinstance(data, list | tuple) and len(data) > 1 and all(isinstance(text, str) for text in data)

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read user and assistant turns."""
        return PartialConversation(alternating(record[self.key]))


class Contents(RecordFormat):
    """Turns under `contents`, each with a role and parts."""

    key = "contents"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"contents"}
    has_roles: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the turns; `model` is the assistant."""
        turns = read_objects(record[self.key], self.key)
        return PartialConversation([_contents_message(turn, media) for turn in turns])


def _contents_message(turn: Record, media: Media) -> Message:
    media.add_unused(turn, _CONTENTS_TURN, "a turn")
    if not is_given(turn.get("role")):
        raise missing_field(f"a turn of contents has no role; its keys are {key_names(turn)}")
    role = read_role(turn["role"], "role")
    if role == FUNCTION_CALL:
        raise RecordError(Reason.BAD_ROLE, "role 'function_call' in contents; use user or model")
    return Message(role, "".join([_part(part, media) for part in read_objects(turn.get("parts"), "parts of a turn")]))


def _part(part: Record, media: Media) -> str:
    for name in ("functionCall", "function_call", "functionResponse", "function_response", "thought"):
        if is_given(part.get(name)) and part[name] is not False:
            raise unsupported_field(
                f"{name} in a part of contents is not supported: write the conversation as messages with tool_calls "
                "or reasoning_content"
            )
    media.add_unused(part, _PART | {"thought"}, "a part")
    if part.get("text") is not None:
        return read_text(part["text"], "a text part")
    blob = next((part[name] for name in given(part, (*_INLINE, *_FILE))), None)
    if not isinstance(blob, OBJECT):
        raise missing_field(f"a part has the keys {key_names(part)}; use text, inline_data or file_data")
    media.add_unused(blob, _BLOB, "a part")
    mime_type = blob.get("mime_type") or blob.get("mimeType") or "image/"  # the decoder detects the type itself
    name, slash, _ = str(mime_type).partition("/")
    kind = MEDIA_KINDS.get(name) if slash else None
    if kind is None:
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA, f"a part of type {mime_type}; only text, images, videos and audio are supported"
        )
    if kind is VIDEO:
        check_video_fields(part, "a part")
    if not is_given(data := blob.get("data")):
        media.add(kind, blob.get("file_uri") or blob.get("fileUri"))
    elif kind is IMAGE:
        media.add(kind, {"type": "base64", "media_type": mime_type, "data": data})
    else:
        media.add(kind, f"data:{mime_type};base64,{data}")
    return kind.placeholder


def read_gemini_text(value: Any, label: str) -> str:
    """Join the strings of `{"parts": [{"text": ...}]}`."""
    parts = value.get("parts") if isinstance(value, OBJECT) else None
    parts = [parts] if isinstance(parts, OBJECT) else parts
    return "".join(
        [read_text(part.get("text"), f"a part of {label}") for part in read_objects(parts, f"parts of {label}")]
    )


class Transcript(RecordFormat):
    """A conversation in a single string; turns start with `USER:`, `ASSISTANT:` or `FUNCTION RESPONSE:`."""

    key = "chat"
    fields: ClassVar[frozenset[str]] = (COMMON_FIELDS - {*SYSTEM_FIELDS}) | {"chat", "system"}
    has_roles: ClassVar[bool] = True
    reads_system: ClassVar[bool] = True

    def read(self, record: Record, media: Media) -> PartialConversation:
        """Read the system prompt and the turns."""
        messages = []
        if is_given(record.get("system")):
            system = read_text(record["system"], "system").strip().removeprefix("SYSTEM:")
            messages.append(Message("system", system.strip()))
        before, *pieces = _TURN_START.split(read_text(record[self.key], self.key))
        if before.strip() or not pieces:
            raise missing_field(
                f"chat does not start with one of {', '.join(f'{name}:' for name in _ROLES)}; convert it to messages"
            )
        for name, text in zip(pieces[::2], pieces[1::2], strict=True):
            messages.append(Message(_ROLES[name], text.strip().removesuffix(_END).strip()))
        return PartialConversation(messages)
