"""Videos of a record: lists of frame images in `video` or `videos`, each at a `<video>` in the text.

A frame is an image to everything that follows: `<video>` becomes one `<image>` per frame. Fields that hold media which
nothing here reads are refused, or their placeholders would be trained on as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from energon_packed.conversation.conversation import IMAGE_PLACEHOLDER
from energon_packed.conversation.media import MediaReference
from energon_packed.errors import Reason, RecordError

VIDEO_PLACEHOLDER = "<video>"
_EITHER = re.compile(f"{IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER}")
_IMAGES = ("image_path", "image_paths", "image_file", "image_files", "img", "imgs")
_VIDEOS = ("frames", "video_frames", "video_path", "video_paths")
_UNREAD = {
    **dict.fromkeys(("audio", "audios"), "leave it out, or make it text"),
    **dict.fromkeys(_IMAGES, "name it images"),
    **dict.fromkeys(_VIDEOS, "name it videos, with a list of frames for each <video>"),
}
_FILES = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".ts", ".gif")
_VIDEO_FIELDS = ("video", "videos")
_MEDIA_FIELDS = frozenset((*_UNREAD, *_VIDEO_FIELDS))


def read_videos(record: Mapping[str, Any], root: str | None) -> list[list[MediaReference]]:
    """Frames of each video of a record; most have none.

    Raises:
        RecordError: `unsupported_media`, for a video file, audio, or images in a field of another name.
    """
    if _MEDIA_FIELDS.isdisjoint(record):
        return []
    for key, remedy in _UNREAD.items():
        if _names_media(record.get(key)):
            raise _unsupported(f"the field {key} is not read; {remedy}")
    given = [key for key in _VIDEO_FIELDS if _is_given(record.get(key))]
    if len(given) > 1:
        raise _unsupported("both video and videos are given; use one")
    if not given:
        return []
    value = record[given[0]]
    if _is_file(value) or (isinstance(value, list | tuple) and any(_is_file(item) for item in value)):
        raise _unsupported(f"{given[0]} holds a video file; give a list of its frames, video files are not decoded")
    if not isinstance(value, list | tuple):
        raise _unsupported(f"{given[0]} is {type(value).__name__}; give a list of frames")
    videos = value if all(isinstance(item, list | tuple) for item in value) else [value]
    if any(isinstance(frame, list | tuple) for frames in videos for frame in frames) or not all(videos):
        raise _unsupported(f"{given[0]} must be a list of frames for each {VIDEO_PLACEHOLDER}, none of them empty")
    return [[MediaReference.from_value(frame, root) for frame in frames] for frames in videos]


def place_frames(
    texts: Sequence[str], images: Sequence[MediaReference], videos: Sequence[Sequence[MediaReference]]
) -> tuple[list[str], list[MediaReference]]:
    """Texts with `<image>` alone, and all media in the order of their placeholders.

    Args:
        texts: of the turns, in order.
        images: one for each `<image>`, in order.
        videos: frames for each `<video>`, in order.

    Raises:
        RecordError: `image_count_mismatch`, where there are more or fewer `<video>` than videos.
    """
    found = sum(text.count(VIDEO_PLACEHOLDER) for text in texts)
    if found != len(videos):
        raise RecordError(
            Reason.IMAGE_COUNT_MISMATCH, f"{found} {VIDEO_PLACEHOLDER} placeholders for {len(videos)} videos"
        )
    images_left: Iterator[MediaReference] = iter(images)
    videos_left = iter(videos)
    media: list[MediaReference] = []

    def placed(match: re.Match[str]) -> str:
        frames = next(videos_left) if match[0] == VIDEO_PLACEHOLDER else [i for i in [next(images_left, None)] if i]
        media.extend(frames)
        return IMAGE_PLACEHOLDER * len(frames) if match[0] == VIDEO_PLACEHOLDER else IMAGE_PLACEHOLDER

    return [_EITHER.sub(placed, text) for text in texts], [*media, *images_left]


def has_videos(record: Mapping[str, Any]) -> bool:
    """Whether a record has a place for videos, even an empty one: then each `<video>` needs one.

    Elsewhere `<video>` is text: it is an element of HTML.
    """
    return "videos" in record or ("video" in record and not isinstance(record["video"], bool))


def _is_given(value: Any) -> bool:
    """Neither missing nor empty; a bool says of the images that they are frames, as our own layouts do."""
    return value is not None and not isinstance(value, bool) and (not hasattr(value, "__len__") or len(value) > 0)


def _names_media(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | Mapping) and len(value) > 0


def _is_file(value: Any) -> bool:
    path = value.get("path") if isinstance(value, Mapping) else value
    return isinstance(path, str) and path.lower().endswith(_FILES)


def _unsupported(detail: str) -> RecordError:
    return RecordError(Reason.UNSUPPORTED_MEDIA, detail)
