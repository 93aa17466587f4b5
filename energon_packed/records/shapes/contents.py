"""Gemini: `{"contents": [{"role": "user", "parts": [{"text": "..."}, {"inline_data": {...}}]}, ...]}`.

The roles are `user` and `model`; `systemInstruction` is the system prompt. A part is `text`,
`inline_data` (`mime_type` and base64 `data`) or `file_data` (`file_uri`), in snake case or camel case.
"""

import base64
import binascii
from typing import Any, ClassVar

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER, Message
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    is_given,
    key_names,
    read_objects,
    read_text,
    unused_fields,
)
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.turns import FUNCTION_CALL, read_role

_TURN = frozenset(("role", "parts"))
_INLINE, _FILE = ("inline_data", "inlineData"), ("file_data", "fileData")
_PART = frozenset(("text", *_INLINE, *_FILE))
_MEDIUM = frozenset(("mime_type", "mimeType", "data", "file_uri", "fileUri", "display_name", "displayName"))


class Contents(Shape):
    """Turns with a role and parts."""

    key = "contents"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"contents"}

    def read(self, record: Record, media: Media) -> Draft:
        """The turns; `model` is the assistant."""
        return Draft(messages=[_message(turn, media) for turn in read_objects(record[self.key], self.key)])


def read_gemini_text(value: Any, what: str) -> str:
    """Text of `{"parts": [{"text": ...}]}`."""
    parts = value.get("parts") if isinstance(value, OBJECT) else None
    parts = [parts] if isinstance(parts, OBJECT) else parts
    return "".join(
        [read_text(part.get("text"), f"a part of {what}") for part in read_objects(parts, f"parts of {what}")]
    )


def _message(turn: Record, media: Media) -> Message:
    media.unused_fields.update(unused_fields(turn, _TURN, "a turn"))
    role = read_role(turn.get("role") or "user", "role")
    if role == FUNCTION_CALL:
        raise RecordError(Reason.BAD_ROLE, "role 'function_call' in contents; use user or model")
    return Message(role, "".join([_part(part, media) for part in read_objects(turn.get("parts"), "parts of a turn")]))


def _part(part: Record, media: Media) -> str:
    for name in ("functionCall", "function_call", "functionResponse", "function_response", "thought"):
        if is_given(part.get(name)) and part[name] is not False:
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{name} in a part of contents is not supported: write the conversation as messages with tool_calls "
                "or reasoning_content",
            )
    media.unused_fields.update(unused_fields(part, _PART | {"thought"}, "a part"))
    if part.get("text") is not None:
        return read_text(part["text"], "a text part")
    medium = next((part[name] for name in (*_INLINE, *_FILE) if is_given(part.get(name))), None)
    if not isinstance(medium, OBJECT):
        raise RecordError(
            Reason.MISSING_FIELD, f"a part has the keys {key_names(part)}; use text, inline_data or file_data"
        )
    media.unused_fields.update(unused_fields(medium, _MEDIUM, "a part"))
    kind = medium.get("mime_type") or medium.get("mimeType") or "image/"
    if not str(kind).startswith("image/"):
        raise RecordError(Reason.UNSUPPORTED_MEDIA, f"a part of type {kind}; only text and images are supported")
    if is_given(medium.get("data")):
        media.add_inline(_decoded(medium["data"]))
    else:
        media.add_inline(medium.get("file_uri") or medium.get("fileUri"))
    return IMAGE_PLACEHOLDER


def _decoded(data: Any) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(read_text(data, "data of a part"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(Reason.CORRUPT_IMAGE, f"data of a part is not base64: {error}") from error
