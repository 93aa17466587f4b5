"""Values of video fields in; VideoReferences of files, or lists of frame images, out.

    "a.mp4"                         a file; also bytes, a `file://` or `data:` URL, {"path"}, {"bytes"}, {"url"}
    {"video": "a.mp4", "fps": 1.0}  a file with its own sampling settings
    ["1.jpg", "2.jpg"]              frames of a video
    ["a.mp4", "b.mp4"]              several files
    ["a.mp4", ["1.jpg", "2.jpg"]]   a file, and frames of another video

In a list, only values that are certainly video files count as files: by the extension of the name, the type of a
`data:` URL, or the first bytes. A single value is a file, whatever its name.

Settings of a video file, in the names of processors and of qwen-vl-utils (`nframes`): `fps`, `num_frames`,
`min_frames`, `max_frames`, `min_pixels`, `max_pixels`, `total_pixels`. Fields that select a part of the file, or that
resize it to a fixed size, reject the record.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import Record, given, is_given, is_number, read_setting, shown, unsupported_field
from energon_packed.records.media.file_types import SIGNATURE_BYTES, is_video_content
from energon_packed.records.media.kinds import IMAGE, VIDEO
from energon_packed.records.media.reference import ImageRoot, MediaReference
from energon_packed.records.media.video import VideoReference
from energon_packed.records.unused_fields import unused_fields

Video = VideoReference | list[MediaReference]
"""A video file, or the frames of a video."""
# `datasets` stores {"bytes", "path"}, and its path is a name without a file.
VIDEO_KEYS = ("video", "video_url", "bytes", "path", "url")
"""Fields of a content part or object with its video file, in order of preference."""
_COUNTS = ("num_frames", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
_ALIASES = {"nframes": "num_frames"}
SETTINGS = ("fps", *_COUNTS)
_CUT = "the frames of the whole file are sampled; cut the clip into a file of its own, or remove the field"
_SIZE = "write min_pixels and max_pixels of the video instead"
# They select a part of a video file in qwen-vl-utils, InternVL, VideoChat2 and LLaVA-NeXT.
_PARTS_OF_FILE = (
    *("video_start", "video_end", "start", "end", "start_time", "end_time", "start_frame", "end_frame", "clip"),
    *("start_sec", "end_sec", "start_second", "end_second"),
)
_IN_OBJECT = "write it into the content part or object of the video, as in videos=[{path, max_frames}]"
# Without `fps` and `num_frames`: in a record, they also describe the file.
_ONLY_SETTINGS = tuple(name for name in SETTINGS if name not in ("fps", "num_frames"))
_UNSUPPORTED = {
    **dict.fromkeys(_PARTS_OF_FILE, _CUT),
    **dict.fromkeys(("resized_height", "resized_width"), _SIZE),
    "do_sample_frames": "frames are always sampled; write num_frames of the video, or pass a list of its frames",
}
FILE_FIELDS = frozenset(("type", *VIDEO_KEYS, *SETTINGS, *_UNSUPPORTED))
"""Fields of a content part or object with a video file that are read or checked."""
_DATA_URL = re.compile(r"data:([^;,\s]*)")
_LISTED = (".gif",)  # an image in other fields, and decoded as a video by FFmpeg
_SIGNATURE_TEXT = 4 * -(-SIGNATURE_BYTES // 3)  # base64 characters of the signature


def read_videos(value: Any, label: str, root: str | ImageRoot | None) -> list[Video]:
    """Read the videos of a field.

    Args:
        value: a file, a list of files, a list of frames, or a list of lists of frames and files.
        label: name of the field, for errors.
        root: folder that relative paths start from.

    Raises:
        RecordError: `unsupported_media` if files and frames cannot be told apart or a list is empty; `missing_video`,
            `missing_image`, or `unsupported_field` for the values.
    """
    if not isinstance(value, list | tuple):
        if not is_video_file(value, alone=True):
            kind = f"the image {shown(value)}" if isinstance(value, str) else type(value).__name__
            raise unsupported_media(f"{label} is {kind}; pass a list of frames, or a video file")
        return [read_video(value, root)]
    if not any(is_video_file(item) for outer in value for item in _listed(outer)):
        return [*_read_frames(value, label, root)]
    videos: list[Video] = []
    for item in value:
        files = [is_video_file(inner) for inner in _listed(item)]
        if files and all(files):
            videos += [read_video(inner, root) for inner in _listed(item)]
        elif isinstance(item, list | tuple) and not any(files):
            videos += _read_frames([item], label, root)
        else:
            raise unsupported_media(
                f"{label} has video files and images in one list; write the frames of each video as a separate list"
            )
    return videos


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _read_frames(value: Sequence[Any], label: str, root: str | ImageRoot | None) -> list[list[MediaReference]]:
    # A flat list of frames is a single video.
    videos = value if all(isinstance(item, list | tuple) for item in value) else [value]
    if any(isinstance(frame, list | tuple) for frames in videos for frame in frames) or not all(videos):
        raise unsupported_media(f"{label} must be a list of frames for each <video>, none of them empty")
    return [[MediaReference.from_value(frame, root) for frame in frames] for frames in videos]


def read_video(value: Any, root: str | ImageRoot | None, settings: Mapping[str, Any] | None = None) -> VideoReference:
    """Make a reference from the value of a video file.

    Args:
        value: a path, URL, bytes, MediaReference or VideoReference, or an object with one of them and settings.
        root: folder that relative paths start from.
        settings: further settings of the file, as `read_settings`.

    Raises:
        RecordError: `missing_video` if the value does not name a file; `unsupported_media` if it is remote;
            `unsupported_field` for a field of an object that would change training.
    """
    if isinstance(value, VideoReference):
        return replace(value, settings={**value.settings, **settings}) if settings else value
    if not isinstance(value, Mapping):
        return VideoReference(file=MediaReference.from_value(value, root, kind="video"), settings=dict(settings or {}))
    check_video_fields(value, "a video")
    unused_fields(value, FILE_FIELDS, "a video")  # only for its rejections, as for image objects
    inner = next((value[key] for key in given(value, VIDEO_KEYS)), None)
    if isinstance(inner, Mapping) and any(isinstance(deep, Mapping) for deep in inner.values()):
        raise RecordError(Reason.MISSING_VIDEO, "a video is nested in several objects; use a path, url or bytes")
    return read_video(inner, root, {**read_settings(value), **(settings or {})})


def read_settings(record: Record) -> dict[str, Any]:
    """Read the sampling settings of a content part or object, in the names of the processors.

    Raises:
        RecordError: `unsupported_field` if a value is not a positive number, or if two settings exclude each other.
    """
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        if (value := record.get(name)) is None:
            continue
        target = _ALIASES.get(name, name)
        number = read_setting(value, f"{name} of a video", is_whole=name in _COUNTS)
        if settings.setdefault(target, number) != number:
            raise unsupported_field(f"num_frames and nframes of a video differ: {settings[target]} and {number}")
    # As in qwen-vl-utils and Transformers: both decide the number of frames.
    if "fps" in settings and "num_frames" in settings:
        raise unsupported_field("fps and num_frames of a video exclude each other; keep one of them")
    return settings


def check_video_fields(record: Record, label: str, *, of_one_video: bool = True) -> None:
    """Reject a record, turn, content part or object whose video file would be sampled differently elsewhere.

    Args:
        record: the object with the fields.
        label: the object, for errors.
        of_one_video: the object belongs to one video, so that it may have settings; False for records and turns.

    Raises:
        RecordError: `unsupported_field`.
    """
    for name in () if of_one_video else _ONLY_SETTINGS:
        if is_given(record.get(name)):
            raise unsupported_field(f"the field {name} of {label} is not supported for a video file: {_IN_OBJECT}")
    for name, remedy in _UNSUPPORTED.items():
        if name in record and _has_effect(name, record[name]):
            raise unsupported_field(f"the field {name} of {label} is not supported for a video file: {remedy}")


def _has_effect(name: str, value: Any) -> bool:
    """Whether a value of one of the unsupported fields changes the frames; other types of values are metadata."""
    if name == "do_sample_frames":
        return value is False
    if isinstance(value, str):
        return _is_time(value)
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(isinstance(item, int | float) for item in value)
    # A start of 0 selects nothing.
    return is_number(value) and value != 0


def _is_time(text: str) -> bool:
    """Whether a string is a time other than 0, such as `12.5` or `00:01:30`."""
    return re.fullmatch(r"[\d:.]*[1-9][\d:.]*", text) is not None


def is_video_file(value: Any, *, alone: bool = False) -> bool:
    """Whether a value of a video field is a video file, and not an image.

    Args:
        value: a value of any type.
        alone: the value is not in a list, in which a name without an extension is a frame.
    """
    if isinstance(value, VideoReference):
        return True
    if isinstance(value, Mapping):
        if is_given(value.get("video")) or is_given(value.get("video_url")):
            return True
        inner = [value[key] for key in ("bytes", "path", "url") if value.get(key)]
        return any(is_video_file(item) for item in inner) or (alone and bool(inner))
    if isinstance(value, MediaReference):
        if value.data is not None:
            return alone or is_video_content(value.data)
        # The name of a tar does not identify the type of its members.
        return (value.offset is None and VIDEO.has_suffix(value.path or "")) or alone
    if isinstance(value, bytes | bytearray | memoryview):
        return alone or is_video_content(bytes(value[:SIGNATURE_BYTES]))
    if not isinstance(value, str) or not value:
        return False
    if match := _DATA_URL.match(value):
        return _is_video_url(match[1], value)
    name = value.partition("?")[0].lower() if "://" in value else value.lower()
    return VIDEO.has_suffix(name) or name.endswith(_LISTED) or (alone and not name.endswith(IMAGE.suffixes))


def _is_video_url(kind: str, url: str) -> bool:
    """Whether a `data:` URL is a video, by its type or, without a usable type, by its first bytes."""
    if "/" in kind and kind != "application/octet-stream":
        return kind.startswith("video/")
    try:
        return is_video_content(base64.b64decode(url.partition(",")[2][:_SIGNATURE_TEXT]))
    except (binascii.Error, ValueError):
        return False


def unsupported_media(detail: str) -> RecordError:
    """Make the RecordError for media that are not supported."""
    return RecordError(Reason.UNSUPPORTED_MEDIA, detail)
