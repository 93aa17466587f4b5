"""Media of a record: image, video and audio fields in, references in the order of the placeholders out.

A video is a file or a list of frame images. A file keeps its `<video>`. All later code sees frames as images: each
`<video>` of frames becomes an `<image>` for each frame. Fields with media that no code reads are rejected; otherwise
their placeholders would be trained on as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import COMMON_FIELDS, Record, flatten, is_given, unsupported_field
from energon_packed.records.media.audio import AudioReference, read_audio
from energon_packed.records.media.kinds import (
    AUDIO,
    IMAGE,
    IMAGE_PLACEHOLDER,
    MEDIA_KINDS,
    VIDEO,
    VIDEO_PLACEHOLDER,
    MediaKind,
)
from energon_packed.records.media.reference import IMAGE_SETTINGS, ImageRoot, MediaReference
from energon_packed.records.media.unlisted import IMAGE_OBJECT, UnlistedMedia, find_unlisted
from energon_packed.records.media.video import VideoReference
from energon_packed.records.media.video_fields import Video, read_video, read_videos, unsupported_media
from energon_packed.records.objects import BOX_PLACEHOLDER, BOX_REMEDY, REF_PLACEHOLDER
from energon_packed.records.unused_fields import unused_fields

_EITHER = re.compile(f"{IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER}")
_TAGGED = {
    # Qwen-VL writes `Picture 1: <img>path</img>`; the prefix is removed with the tag.
    IMAGE: re.compile(r"(?:Picture \d+: ?)?<img>(?!\s*</img>)([^<>\n]+)</img>"),
    # ms-swift 2 writes `<video>path</video>`; other content is not read as a path.
    VIDEO: re.compile(rf"<video>([^<>\n]+(?:{'|'.join(map(re.escape, VIDEO.suffixes))}))</video>", re.IGNORECASE),
    # As ms-swift 2; Qwen-Audio writes `Audio 1: <audio>path</audio>`.
    AUDIO: re.compile(
        rf"(?:Audio \d+: ?)?<audio>([^<>\n]+(?:{'|'.join(map(re.escape, AUDIO.suffixes))}))</audio>", re.IGNORECASE
    ),
}
# Placeholders of other data formats: Qwen-VL without a path, DeepSeek-VL, InternLM-XComposer, MiniCPM-V, MMMU and Phi.
_UNREAD = re.compile(
    r"<img>\s*</img>|<image_placeholder>|<ImageHere>|<(?P<bar>\|)?(?P<kind>image|video|audio)[ _]?\d+(?(bar)\|)>"
)
_BOXES = re.compile(f"{REF_PLACEHOLDER}|{BOX_PLACEHOLDER}")  # of ms-swift, whose `objects` replace them
_IMAGE_KNOWN = IMAGE_OBJECT | {*IMAGE_SETTINGS}
_UNSUPPORTED = {
    **dict.fromkeys(("frames", "video_frames"), "rename it to videos, with a list of frames for each <video>"),
    "video_path": "read it with `map=video=video_path`",
    "video_paths": "read it with `map=videos=video_paths`",
}
NO_IMAGE = "image field is null or empty: read without an image"
"""Note of a record that has an image field without a value. An empty list is the usual form of no images."""
_BASE64 = "image_base64_str"  # the image field of M3IT
_BEYOND_IMAGES = frozenset((*_UNSUPPORTED, *VIDEO.fields, *AUDIO.fields))


@dataclass(slots=True)
class Media:
    """Media of one record.

    Attributes:
        root: folder that relative paths start from.
        images, videos, audios: media of the field of the kind, or of turns and content parts, in order. A video is a
            file, or a list of frames.
        in_turns: names of the kinds whose media are of turns and content parts.
        per_turn: number of images in each inner list, if the images field is a list of several lists.
        is_video: the images are frames of a video.
        has_objects: the record has objects, which may replace the placeholders of names and boxes.
        unused_fields: fields of turns, content parts and objects of media that are not read.
        unlisted: fields that refer to media and are not read.
        notes: decisions made while reading, such as the choice of a caption.
    """

    root: str | ImageRoot | None
    images: list[MediaReference] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)
    audios: list[AudioReference] = field(default_factory=list)
    in_turns: set[str] = field(default_factory=set)
    per_turn: list[int] | None = None
    is_video: bool = False
    has_objects: bool = False
    unlisted: list[UnlistedMedia] = field(default_factory=list)
    unused_fields: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[VideoReference]:
        """The video files of the record, in order."""
        return [video for video in self.videos if isinstance(video, VideoReference)]

    def in_field(self, kind: MediaKind) -> bool:
        """Whether a field of the record has the media of a kind."""
        return bool(getattr(self, kind.field)) and kind.name not in self.in_turns

    def set_videos(self, videos: list[Video]) -> None:
        """Set the videos of the video field, and whether the images are frames."""
        self.videos = videos
        self.is_video = any(isinstance(video, list) for video in videos)

    def take_tagged(self, text: str) -> str:
        """Replace `<img>path</img>` by `<image>`, and `<video>path</video>` by `<video>`; keep the references.

        Qwen-VL writes the first, with `Picture 1:` before it, and ms-swift 2 both, and the same of `<audio>`.
        """
        for kind, pattern in _TAGGED.items():
            for match in pattern.finditer(text):
                self.add(kind, match[1].strip())
            text = pattern.sub(kind.placeholder, text)
        return text

    def add(self, kind: MediaKind, value: Any) -> None:
        """Add a file of a turn or content part."""
        if kind is VIDEO:
            self.extend(kind, [read_video(value, self.root)])
        elif kind is AUDIO:
            self.extend(kind, [read_audio(value, self.root)])
        else:
            self.add_inline(value)

    def extend(self, kind: MediaKind, files: Sequence[Any]) -> None:
        """Add references of a turn or content part.

        Raises:
            RecordError: the mismatch of the kind, such as `image_count_mismatch`, if a field has media of it, too.
        """
        if self.in_field(kind):  # the order of the two lists relative to each other is not defined
            detail = f"{kind.plural} are both in the messages and in the {kind.field} field; use one"
            raise RecordError(kind.mismatch, detail)
        self.in_turns.add(kind.name)
        getattr(self, kind.field).extend(files)

    def add_unused(self, record: Record, known: frozenset[str] | None, label: str = "the record") -> None:
        """Count the fields of a record, a turn or a content part that are not read, and keep those with media.

        Args:
            record: the object with the fields.
            known: fields that are read; None if unknown: then no field is counted or rejected by its name.
            label: the object with the fields, for errors.

        Raises:
            RecordError: as `unused_fields`.
        """
        if known is None:
            names = tuple(str(name) for name in record if name not in COMMON_FIELDS)
        else:
            names = unused_fields(record, known, label)
            self.unused_fields.update(names)
        if names:
            self.unlisted += find_unlisted(record, names, label, self.root)

    def add_inline(self, value: Any, settings: Mapping[str, int] | None = None) -> None:
        """Add the image of a content part; Anthropic's source is `{"type": "base64", "media_type", "data"}`.

        Args:
            value: the image.
            settings: settings of the content part, as `read_image_settings`.
        """
        # `base64` and `url` are types of Anthropic's API; an object without a type is an image object of datasets.
        if isinstance(value, Mapping) and value.get("type") == "base64":
            data, kind = value.get("data"), str(value.get("media_type"))
            value = data if isinstance(data, bytes) else _data_url(data, kind)
        elif isinstance(value, Mapping) and value.get("type") == "url":
            value = value.get("url")
        self.unused_fields.update(_unused(value))
        self.extend(IMAGE, [MediaReference.from_value(value, self.root).with_settings(settings or {})])

    def place(self, strings: Sequence[str]) -> list[str]:
        """Replace each `<video>` of frames by an `<image>` for each frame; `images` gets all images in text order.

        Raises:
            RecordError: `video_count_mismatch` if the number of `<video>` is not the number of videos.
        """
        # Checked here because frames are indistinguishable from images afterwards.
        placeholders = sum(text.count(VIDEO_PLACEHOLDER) for text in strings)
        if placeholders != len(self.videos):
            raise RecordError(
                Reason.VIDEO_COUNT_MISMATCH,
                f"{placeholders} {VIDEO_PLACEHOLDER} placeholders for {len(self.videos)} videos",
            )
        images: Iterator[MediaReference] = iter(self.images)  # may run out: Conversation rejects a wrong count later
        videos = iter(self.videos)
        ordered: list[MediaReference] = []

        def expand(match: re.Match[str]) -> str:
            if match[0] == IMAGE_PLACEHOLDER:
                ordered.extend([image for image in [next(images, None)] if image])
                return IMAGE_PLACEHOLDER
            video = next(videos)
            if isinstance(video, VideoReference):
                return VIDEO_PLACEHOLDER
            ordered.extend(video)
            return IMAGE_PLACEHOLDER * len(video)

        strings = [_EITHER.sub(expand, text) for text in strings]
        self.images = [*ordered, *images]
        return strings


def has_tags(text: str) -> bool:
    """Whether a text may have tags with paths, for `Media.take_tagged`."""
    return "<img>" in text or "</video>" in text or "</audio>" in text


def check_spellings(contents: Sequence[str], *, has_objects: bool = False) -> None:
    """Reject placeholders that are not read, but not numbers of media that other placeholders place.

    Args:
        contents: the content of each turn, or of a document.
        has_objects: the record has objects for the placeholders of boxes.

    Raises:
        RecordError: the mismatch of their kind, such as `image_count_mismatch`; `unsupported_field` for boxes.
    """
    for text in contents:
        if box := _BOXES.search(text) if "<" in text and not has_objects else None:
            raise unsupported_field(
                f"{box[0]} is not replaced by a box of `objects`, which the messages do not have; {BOX_REMEDY}"
            )
        for match in _UNREAD.finditer(text) if "<" in text else ():
            kind = MEDIA_KINDS[match["kind"] or IMAGE.name]
            if match["kind"] is None or not any(kind.placeholder in other for other in contents):
                detail = f"{match[0]} is not read as a placeholder; write {kind.placeholder} instead"
                raise RecordError(kind.mismatch, detail)


def read_media(
    record: Record, root: str | ImageRoot | None, *, with_images: bool = True, known: frozenset[str] = frozenset()
) -> Media:
    """Read the media fields of a record.

    Args:
        record: a record, with or without image and video fields.
        root: folder that relative paths start from.
        with_images: read `images` and `image`; False if the record format reads them.
        known: fields that the record format reads itself, so that their names are not wrong.

    Raises:
        RecordError: `unsupported_media` for media in a field of another name, `missing_image`, `missing_audio`,
            `image_count_mismatch` if the record lists its images twice, and the errors of `read_videos`.
    """
    media = Media(root)
    if with_images:
        media.images = references(record, IMAGE.fields, root, media.unused_fields)
    media.has_objects = is_given(record.get("objects"))
    if is_given(record.get(_BASE64)):
        # M3IT has a single image field; with a second field, the order of the images would be undefined.
        if not with_images or media.images:
            raise RecordError(Reason.IMAGE_COUNT_MISMATCH, f"both images and {_BASE64} are in the record; use one")
        media.images = [MediaReference.from_value(_data_url(encoded)) for encoded in flatten(record[_BASE64])]
    if media.images:
        media.per_turn = _images_per_turn(record.get("images"))
    # The early return is for speed: most records have no video fields.
    if _BEYOND_IMAGES.isdisjoint(record):
        return media
    media.set_videos(_read_videos(record, root, known))
    media.is_video |= record.get("video") is True
    media.audios = _read_audios(record, root)
    return media


def references(
    record: Record, keys: Sequence[str], root: str | ImageRoot | None, unused: set[str]
) -> list[MediaReference]:
    """Read the media of the first field that has any; `unused` gets the fields of their objects that are not read.

    Raises:
        RecordError: two of the fields have media, or a value does not name media.
    """
    filled = {}
    for key in keys:
        value = record.get(key)
        if _has_media(value) and (items := flatten(value)):
            filled[key] = items
    if len(filled) > 1:
        raise RecordError(Reason.IMAGE_COUNT_MISMATCH, f"both {' and '.join(filled)} are in the record; use one")
    items = next(iter(filled.values()), [])
    for item in items:
        unused.update(_unused(item))
    return [MediaReference.from_value(item, root) for item in items]


def has_empty_image_field(record: Record) -> bool:
    """Whether a record without images has an image field: null or an empty string, not an empty list."""
    return any(key in record and not isinstance(record[key], list | tuple) for key in IMAGE.fields)


def _has_media(value: Any) -> bool:
    """Whether a value is given. A file of 0 bytes is: it is damaged, and not a file that the record does not have."""
    if value is None or is_given(value):
        return value is not None
    data = value.get("bytes") if isinstance(value, Mapping) else value
    return isinstance(data, bytes)


def _unused(image: Any) -> tuple[str, ...]:
    """List the unused fields of an image object; fields that would change training are rejected."""
    return unused_fields(image, _IMAGE_KNOWN, "an image") if isinstance(image, Mapping) else ()


def _data_url(value: Any, kind: str = "image/jpeg") -> str:
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_IMAGE, f"an image is {type(value).__name__}; its data must be base64 text")
    return f"data:{kind};base64,{''.join(value.split())}"


def _images_per_turn(value: Any) -> list[int] | None:
    # A list that contains a single list is the nested form of a flat list, and does not assign images to turns.
    if not isinstance(value, list | tuple) or len(value) == 1:
        return None
    if not any(isinstance(item, list | tuple) for item in value):
        return None
    return [len(flatten(item)) for item in value]


def _read_videos(record: Record, root: str | ImageRoot | None, known: frozenset[str]) -> list[Video]:
    for key, remedy in _UNSUPPORTED.items():
        if (
            key not in known
            and isinstance(value := record.get(key), str | bytes | list | tuple | Mapping)
            and len(value) > 0
        ):
            raise unsupported_media(f"the field {key} is not supported; {remedy}")
    filled = [key for key in VIDEO.fields if not isinstance(record.get(key), bool) and _has_media(record.get(key))]
    if len(filled) > 1:
        raise unsupported_media("both video and videos are in the record; use one")
    return read_videos(record[filled[0]], filled[0], root) if filled else []


def _read_audios(record: Record, root: str | ImageRoot | None) -> list[AudioReference]:
    filled = [key for key in AUDIO.fields if _has_media(record.get(key))]
    if len(filled) > 1:
        raise RecordError(Reason.AUDIO_COUNT_MISMATCH, "both audio and audios are in the record; use one")
    return [read_audio(item, root) for key in filled for item in flatten(record[key])]
