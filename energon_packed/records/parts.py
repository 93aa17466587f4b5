"""Typed content parts: `[{"type": "text", "text": ...}, {"type": "image", "image": ...}]`."""

from collections.abc import Iterable, Mapping
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER
from energon_packed.records.fields import read_text
from energon_packed.records.media_fields import VIDEO_PLACEHOLDER, Media


def read_parts(parts: Iterable[Any], media: Media) -> str:
    """Text of content parts with placeholders; their images join `media.inline`.

    Raises:
        RecordError: a part of an unknown type, or a video that is not a list of frames.
    """
    return "".join([_read_part(part, media) for part in parts])


def _read_part(part: Any, media: Media) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return read_text(part.get("text"), "a text part")
    if kind in ("image", "image_url"):
        value = part.get("image") or part.get("image_url") or part.get("path") or part.get("url")
        if value:
            media.add_inline(value)
        return IMAGE_PLACEHOLDER
    if kind == "video":
        return _read_video(part, media)
    raise RecordError(Reason.MISSING_FIELD, f"a content part of type {kind!r}; use text, image, image_url or video")


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
