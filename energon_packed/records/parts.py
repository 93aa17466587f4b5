"""Content parts: `[{"type": "text", "text": ...}, {"type": "image", "image": ...}]`, with or without their type."""

from collections.abc import Iterable, Mapping
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import is_given, unused_fields
from energon_packed.records.conversation import IMAGE_PLACEHOLDER
from energon_packed.records.fields import Record, key_names, read_text
from energon_packed.records.media_fields import VIDEO_PLACEHOLDER, Media

_IMAGE_FIELDS = ("image", "image_url", "path", "url", "source")
_KINDS = {"text": "text", "image": "image", "image_url": "image", "video": "video", "input_text": "text"}
_CALL = "write it as tool_calls of the turn"
_RESULT = "write it as a turn of the role tool"
_AUDIO = "convert audio to text"
_HINTS = {
    **{"tool_use": _CALL, "tool_call": _CALL, "tool_result": _RESULT, "tool_response": _RESULT},
    **dict.fromkeys(("thinking", "reasoning"), "write it as reasoning_content of the turn"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), _AUDIO),
    "video_url": "pass the frames of the video as a list, video files are not decoded",
}
_FIELDS = {
    "text": frozenset(("type", "text")),
    "image": frozenset(("type", *_IMAGE_FIELDS)),
    "video": frozenset(("type", "video", "frames")),
}


def read_parts(parts: Iterable[Any], media: Media) -> str:
    """Text of content parts with placeholders; their images and unused fields join `media`.

    Raises:
        RecordError: a part of an unknown type, a video that is not a list of frames, or an unsupported field.
    """
    return "".join([_read_part(part, media) for part in parts])


def _read_part(part: Any, media: Media) -> str:
    if isinstance(part, str):
        return part
    kind = _kind(part) if isinstance(part, Mapping) else None
    given = part.get("type") if isinstance(part, Mapping) else None
    if kind is None and isinstance(given, str) and given in _HINTS:
        raise RecordError(
            Reason.UNSUPPORTED_FIELD, f"a content part of type {given!r} is not supported; {_HINTS[given]}"
        )
    if kind is None:
        name = repr(given)[:80] if isinstance(part, Mapping) else type(part).__name__
        keys = f" with the keys {key_names(part)}" if isinstance(part, Mapping) and given is None else ""
        raise RecordError(
            Reason.MISSING_FIELD, f"a content part of type {name}{keys}; use text, image, image_url or video"
        )
    media.unused_fields.update(unused_fields(part, _FIELDS[kind], f"a content part of type {kind}"))
    if kind == "text":
        return media.take_tagged(read_text(part.get("text"), "a text part"))
    if kind == "video":
        return _read_video(part, media)
    value = next((part[name] for name in _IMAGE_FIELDS if part.get(name)), None)
    if value:
        media.add_inline(value)
    return IMAGE_PLACEHOLDER


def _kind(part: Record) -> str | None:
    """`text`, `image` or `video`: by its type, or else by the one of its fields that has a value."""
    if part.get("type") is not None:
        return _KINDS.get(part["type"]) if isinstance(part["type"], str) else None
    found = {_KINDS[name] for name in ("text", "image", "image_url", "video") if is_given(part.get(name))}
    return found.pop() if len(found) == 1 else None


def _read_video(part: Mapping[str, Any], media: Media) -> str:
    frames = part.get("video") or part.get("frames")
    media.is_video = True
    if not frames and media.videos:
        return VIDEO_PLACEHOLDER  # its frames are in the videos field
    if not isinstance(frames, list | tuple) or not frames:
        raise RecordError(Reason.MISSING_IMAGE, "a video must be a list of frame images; video files are not decoded")
    for frame in frames:
        media.add_inline(frame)
    return IMAGE_PLACEHOLDER * len(frames)
