"""Media of a record: images and videos in fields of their own, and images inside content parts.

A video is a list of frame images. To everything that follows a frame is an image: each `<video>` becomes one `<image>`
per frame. Fields that hold media which nothing reads are rejected, or their placeholders would be trained on as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.conversation import IMAGE_PLACEHOLDER
from energon_packed.records.fields import Record, flatten, is_given, unused_fields
from energon_packed.records.media import MediaReference

VIDEO_PLACEHOLDER = "<video>"
_EITHER = re.compile(f"{IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER}")
_TAGGED = re.compile(r"(?:Picture \d+: ?)?<img>([^<>\n]+)</img>")
_IMAGE_FIELDS = ("images", "image")
_OBJECT_FIELDS = frozenset(("bytes", "path", "url", "image"))
_VIDEO_FIELDS = ("video", "videos")
_MISNAMED_IMAGES = ("image_path", "image_paths", "image_file", "image_files", "img", "imgs")
_MISNAMED_VIDEOS = ("frames", "video_frames", "video_path", "video_paths")
_UNSUPPORTED = {
    **dict.fromkeys(("audio", "audios"), "remove it, or convert it to text"),
    **dict.fromkeys(_MISNAMED_IMAGES, "rename it to images"),
    **dict.fromkeys(_MISNAMED_VIDEOS, "rename it to videos, with a list of frames for each <video>"),
}
_BASE64 = "image_base64_str"  # of M3IT
_NAME = re.compile(r"(?:image|img|photo|picture|pic)(?:_?(?:id|name|file|path))?|file_?(?:name|path)?")
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_VIDEO_FILES = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".ts", ".gif")
_BEYOND_IMAGES = frozenset((*_UNSUPPORTED, *_VIDEO_FIELDS))


@dataclass(slots=True)
class Media:
    """Media of one record.

    Attributes:
        root: folder that relative paths start from.
        images: of the images field, in order.
        per_turn: number of images in each inner list, where the images field is a list of several lists.
        videos: frames of each video.
        has_videos: the record has a video field, so each `<video>` in its text is a placeholder.
        is_video: the images are frames of a video.
        inline: images of content parts, in order.
        unused_fields: of turns and parts: fields that nothing reads.
        elsewhere: fields that name an image which the record does not hold: `image_id`, or the name of a file.
        notes: what was decided while reading.
    """

    root: str | None
    images: list[MediaReference] = field(default_factory=list)
    per_turn: list[int] | None = None
    videos: list[list[MediaReference]] = field(default_factory=list)
    has_videos: bool = False
    is_video: bool = False
    inline: list[MediaReference] = field(default_factory=list)
    elsewhere: tuple[str, ...] = ()
    unused_fields: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def take_tagged(self, text: str) -> str:
        """The text with `<image>` for each `<img>path</img>` of Qwen-VL, its `Picture 1:` included."""
        if "<img>" not in text:
            return text
        for match in _TAGGED.finditer(text):
            self.add_inline(match[1].strip())
        return _TAGGED.sub(IMAGE_PLACEHOLDER, text)

    def add_inline(self, value: Any) -> None:
        """An image of a content part; Anthropic's has `{"type": "base64", "media_type", "data"}` as its source."""
        if isinstance(value, Mapping) and value.get("type") == "base64":
            data, kind = value.get("data"), str(value.get("media_type"))
            value = data if isinstance(data, bytes) else _data_url(data, kind)
        elif isinstance(value, Mapping) and value.get("type") == "url":
            value = value.get("url")
        self.unused_fields.update(_unused(value))
        self.inline.append(MediaReference.from_value(value, self.root))

    def place(self, texts: Sequence[str]) -> list[str]:
        """Texts with `<image>` only; frames join `images` in the order of all placeholders.

        Raises:
            RecordError: `image_count_mismatch`, when there are more or fewer `<video>` than videos.
        """
        found = sum(text.count(VIDEO_PLACEHOLDER) for text in texts)
        if found != len(self.videos):
            raise RecordError(
                Reason.IMAGE_COUNT_MISMATCH, f"{found} {VIDEO_PLACEHOLDER} placeholders for {len(self.videos)} videos"
            )
        images: Iterator[MediaReference] = iter(self.images)
        videos = iter(self.videos)
        add_location: list[MediaReference] = []

        def expand(match: re.Match[str]) -> str:
            frames = next(videos) if match[0] == VIDEO_PLACEHOLDER else [i for i in [next(images, None)] if i]
            add_location.extend(frames)
            return IMAGE_PLACEHOLDER * len(frames) if match[0] == VIDEO_PLACEHOLDER else IMAGE_PLACEHOLDER

        texts = [_EITHER.sub(expand, text) for text in texts]
        self.images = [*add_location, *images]
        return texts


def read_media(record: Record, root: str | None, *, with_images: bool = True) -> Media:
    """Media of the fields of a record.

    Args:
        record: with image and video fields, or none.
        root: folder that relative paths start from.
        with_images: read `images` and `image`; False where the shape does.

    Raises:
        RecordError: `unsupported_media` for a video file, audio, or media in a field of another name; `missing_image`;
            `image_count_mismatch` when images are given twice.
    """
    media = Media(root, images=references(record, _IMAGE_FIELDS, root) if with_images else [])
    if is_given(record.get(_BASE64)):
        if not with_images or media.images:
            raise RecordError(Reason.IMAGE_COUNT_MISMATCH, f"both images and {_BASE64} are given; use one")
        media.images = [MediaReference.from_value(_data_url(one)) for one in flatten(record[_BASE64])]
    media.elsewhere = tuple(name for name in _named(tuple(record)) if _names_image(name, record[name]))
    if media.images:
        media.per_turn = _images_per_turn(record.get("images"))
    if _BEYOND_IMAGES.isdisjoint(record):
        return media
    media.videos = _read_videos(record, root)
    # An empty field counts: the record has a place for videos. Elsewhere `<video>` is text, an element of HTML.
    media.has_videos = "videos" in record or ("video" in record and not isinstance(record["video"], bool))
    media.is_video = bool(media.videos) or record.get("video") is True
    return media


def references(record: Record, keys: Sequence[str], root: str | None) -> list[MediaReference]:
    """Media of the first of these fields that has any.

    Raises:
        RecordError: two of the fields have media, or a value is not a medium.
    """
    given = [key for key in keys if record.get(key) is not None]
    if not given:
        return []
    given = [key for key in given if is_given(record[key]) and flatten(record[key])]
    if len(given) > 1:
        raise RecordError(Reason.IMAGE_COUNT_MISMATCH, f"both {' and '.join(given)} are given; use one")
    items = [item for key in given for item in flatten(record[key])]
    for item in items:
        _unused(item)
    return [MediaReference.from_value(item, root) for item in items]


def _unused(image: Any) -> tuple[str, ...]:
    """Fields of an image object that nothing reads; those that would change training are rejected."""
    return unused_fields(image, _OBJECT_FIELDS, "an image") if isinstance(image, Mapping) else ()


@lru_cache(maxsize=4096)
def _named(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Fields that may name an image."""
    return tuple(name for name in fields if isinstance(name, str) and _NAME.fullmatch(name))


def _names_image(field_name: str, value: Any) -> bool:
    """Whether it does: an id always, a name where it ends like an image file."""
    if field_name.endswith("id"):
        return is_given(value)
    return isinstance(value, str) and value.lower().endswith(IMAGE_FILES)


def _data_url(value: Any, kind: str = "image/jpeg") -> str:
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_IMAGE, f"an image is {type(value).__name__}; its data must be base64 text")
    return f"data:{kind};base64,{''.join(value.split())}"


def _images_per_turn(value: Any) -> list[int] | None:
    if not isinstance(value, list | tuple) or len(value) == 1:
        return None
    if not any(isinstance(item, list | tuple) for item in value):
        return None
    return [len(flatten(item)) for item in value]


def _read_videos(record: Record, root: str | None) -> list[list[MediaReference]]:
    for key, remedy in _UNSUPPORTED.items():
        if isinstance(value := record.get(key), str | bytes | list | tuple | Mapping) and len(value) > 0:
            raise _unsupported(f"the field {key} is not supported; {remedy}")
    given = [key for key in _VIDEO_FIELDS if not isinstance(record.get(key), bool) and is_given(record.get(key))]
    if len(given) > 1:
        raise _unsupported("both video and videos are given; use one")
    if not given:
        return []
    value = record[given[0]]
    if _is_file(value) or (isinstance(value, list | tuple) and any(_is_file(item) for item in value)):
        raise _unsupported(f"{given[0]} holds a video file; pass a list of its frames, video files are not decoded")
    if not isinstance(value, list | tuple):
        raise _unsupported(f"{given[0]} is {type(value).__name__}; pass a list of frames")
    videos = value if all(isinstance(item, list | tuple) for item in value) else [value]
    if any(isinstance(frame, list | tuple) for frames in videos for frame in frames) or not all(videos):
        raise _unsupported(f"{given[0]} must be a list of frames for each {VIDEO_PLACEHOLDER}, none of them empty")
    return [[MediaReference.from_value(frame, root) for frame in frames] for frames in videos]


def _is_file(value: Any) -> bool:
    path = value.get("path") if isinstance(value, Mapping) else value
    return isinstance(path, str) and path.lower().endswith(_VIDEO_FILES)


def _unsupported(detail: str) -> RecordError:
    return RecordError(Reason.UNSUPPORTED_MEDIA, detail)
