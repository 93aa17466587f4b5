"""Media in fields that no code reads: a field name and its value in, whether they refer to media out.

The value decides: a path with the extension of an image, video or audio file, a `data:` URL, base64 of an image file,
bytes, an image in memory, an object or list with one of these. The name extends it: `img_url` and `Image` are
spellings of fields that are read, `image_id` is an image elsewhere, and in `photo` or `screenshot` a URL or a path
without an extension counts, too. A field that is named as an id, such as `question_id`, is never media.
"""

import os
import re
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from energon_packed.errors import Reason, RecordError, ResourceError
from energon_packed.records.fields import OBJECT, SCALARS, Record, is_given, shown
from energon_packed.records.media.audio import AudioReference
from energon_packed.records.media.kinds import AUDIO, IMAGE, VIDEO, MediaKind
from energon_packed.records.media.reference import ImageRoot, MediaReference
from energon_packed.records.media.video import VideoReference
from energon_packed.storage import as_path

IMAGE_URL = "not fetched: URL of an image in the field"
"""Start of the note of a record without an image; the name of the field follows."""
# Without .ts, .mts and .svg: they are also source code, and a path of a code dataset is not media.
_VIDEO_FILES = tuple(suffix for suffix in VIDEO.suffixes if suffix not in (".ts", ".mts"))
_AUDIO_FILES = tuple(suffix for suffix in AUDIO.suffixes if suffix != ".au")  # the end of many web addresses
_MEDIA_FILES = (*IMAGE.suffixes, *_VIDEO_FILES, *_AUDIO_FILES)
_DATA_URL = re.compile(r"data:[^,\s]{0,100};base64,")
_BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|R0lGOD[dl]h|UklGR)[A-Za-z0-9+/\s]{8}")  # JPEG, PNG, GIF, WebP
_STARTS = frozenset(("data", "/9j/", "iVBO", "R0lG", "UklG"))
_ENDS = frozenset(end[-1] for name in _MEDIA_FILES for end in (name, name.upper()))
IMAGE_OBJECT = frozenset(("bytes", "path", "url", "image"))  # fields of an object that is an image
_DEPTH = 4  # lists and objects around a value: a list of lists of {"image": {"url"}}
# Names are compared in lower case, without separators and digits.
_LISTED = re.compile(r"(?:image|img)s?(?:path|file|filename|url|uri|base64|b64|bytes)?s?")
_ID = re.compile(r"(?:image|img|photo|picture|pic)ids?")
_WORDS = re.compile(
    r"(?:image|img|photo|picture|pic|screenshot|figure|thumbnail)s?"
    r"(?:path|file|filename|name|key|url|uri|src|link|location|data|base64|b64|bytes)?s?"
)
_IDENTIFIER = re.compile(r"(?:.*[^A-Za-z])?(?:ids?|keys?|uuid|hash|title)|.*[a-z](?:Ids?|IDs?|Keys?)|__key__")


class _Kind(Enum):
    """Values of a field that refer to media, by the name of the field."""

    IDENTIFIER = "no value"
    ANY_FIELD = "values that are media under any name"
    SAYS_IMAGE = "also URLs, and paths without an extension"
    ID = "every value"
    LISTED = "every string, list or object: the name differs only in spelling from a field that is read or rejected"


class UnlistedMedia(NamedTuple):
    """A field that refers to media and is not read.

    Attributes:
        name: name of the field.
        value: its value.
        label: the object with the field, such as `the record` or `a turn`.
        is_certain: False for a URL that may also be the address of a web page.
    """

    name: str
    value: Any
    label: str
    is_certain: bool = True

    @property
    def is_listed(self) -> bool:
        """Whether the name is a spelling of an image field, so that the field is not metadata of another image."""
        return _kind(self.name) is _Kind.LISTED

    def differs_from(self, used: Sequence[MediaReference], root: str | ImageRoot | None) -> bool:
        """Whether the field names a file or has data that none of the used images has; False if unknown."""
        for item in _items(self.value):
            if isinstance(item, str) and _BASE64.match(item):
                continue
            try:
                reference = MediaReference.from_value(item, root)
            except RecordError:
                continue
            # Only the same kind can be compared: a path beside bytes is usually the origin of the bytes.
            others = {_identity(other) for other in used if other.offset is None}
            others = {other for other in others if isinstance(other, str) is (reference.path is not None)}
            if others and _identity(reference) not in others:
                return True
        return False


def _identity(reference: MediaReference) -> str | bytes | None:
    return reference.data if reference.path is None else os.path.basename(reference.path)


def _items(value: Any) -> list[Any]:
    return [item for item in value if item is not None] if isinstance(value, list | tuple) else [value]


def find_unlisted(
    record: Record, names: tuple[str, ...], label: str, root: str | ImageRoot | None
) -> list[UnlistedMedia]:
    """List the fields that refer to media.

    Args:
        record: a record, a turn or a content part.
        names: its fields that are not read.
        label: the object with the fields, for errors.
        root: folder that relative paths start from.
    """
    found = []
    for name, is_plain in _are_plain(names):
        value: Any = record.get(name)
        # This runs for every field that is not read, so that numbers and almost every text end here.
        kind = value.__class__
        if is_plain and (value[-1:] not in _ENDS and value[:4] not in _STARTS if kind is str else kind in SCALARS):
            continue
        if refers_to_media(name, value, root):
            found.append(UnlistedMedia(name, value, label))
        elif kind is str and value.startswith(("http://", "https://")) and _has_extension(value):
            found.append(UnlistedMedia(name, value, label, is_certain=False))
    return found


@lru_cache(maxsize=4096)
def _are_plain(names: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """List (name, whether the value alone decides) of the fields that can be media."""
    kinds = [(name, _kind(name)) for name in names]
    return tuple((name, kind is _Kind.ANY_FIELD) for name, kind in kinds if kind is not _Kind.IDENTIFIER)


def refers_to_media(name: str, value: Any, root: str | ImageRoot | None = None) -> bool:
    """Whether the value of a field that is not read refers to an image, video or audio file.

    Args:
        name: name of the field.
        value: its value; of a list, the first item that is not null counts.
        root: folder that relative paths start from; None if no file is to be looked up.
    """
    kind = _kind(name)
    if kind is _Kind.IDENTIFIER:
        return False
    if kind is _Kind.ID:
        return is_given(value)
    for _ in range(_DEPTH):
        if value.__class__ is str:
            return value != "" and (kind is _Kind.LISTED or _is_media(value, kind, root))
        if isinstance(value, list | tuple):
            value = next((item for item in value if item is not None), None)
        elif isinstance(value, OBJECT):
            if IMAGE_OBJECT.isdisjoint(value):
                return False
            value = next((inner for key, inner in value.items() if key in IMAGE_OBJECT and inner), None)
        else:
            break
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value) > 0
    # Images of tars, and images that the `datasets` library has decoded.
    return isinstance(value, MediaReference | VideoReference | AudioReference) or type(value).__module__.startswith(
        "PIL."
    )


@lru_cache(maxsize=4096)
def _kind(name: str) -> _Kind:
    """Classify a field name; cached, as the records of a file share names."""
    letters = re.sub(r"[\W\d_]+", "", name).lower()
    if _LISTED.fullmatch(letters):
        return _Kind.LISTED
    if _ID.fullmatch(letters):
        return _Kind.ID
    if _WORDS.fullmatch(letters):
        return _Kind.SAYS_IMAGE
    return _Kind.IDENTIFIER if _IDENTIFIER.fullmatch(name) else _Kind.ANY_FIELD


def _is_media(text: str, kind: _Kind, root: str | ImageRoot | None) -> bool:
    if text[:4] in _STARTS and (_DATA_URL.match(text) or _BASE64.match(text)):
        return True
    has_extension = _has_extension(text)
    if not has_extension and kind is not _Kind.SAYS_IMAGE:
        return False  # almost every text
    is_remote = "://" in text and not text.startswith("file://")
    if len(text.split(maxsplit=1)) == 1:
        # The address of a web page may end in .jpg, and a name such as `url` does not say that it is an image.
        if kind is not _Kind.SAYS_IMAGE:
            return not is_remote
        return has_extension or is_remote or "/" in text or _exists(text, root)
    # A sentence may end in a file name, so a name with spaces counts only if it is certain.
    return has_extension and not is_remote and (kind is _Kind.SAYS_IMAGE or _exists(text, root))


def _has_extension(text: str) -> bool:
    return "." in text[-5:] and text[-5:].lower().endswith(_MEDIA_FILES)


def _exists(path: str, root: str | ImageRoot | None) -> bool:
    try:
        return root is not None and as_path(MediaReference(path=path, root=root).resolved()).is_file()
    except ResourceError:
        raise
    except (RecordError, OSError, ValueError):  # outside the root, or not a path
        return False


def check_unlisted(
    unlisted: Sequence[UnlistedMedia], used: Sequence[MediaReference], root: str | ImageRoot | None
) -> list[str]:
    """Reject a record with media that would be lost; return a note for each field that is not certain.

    Args:
        unlisted: fields that refer to media and are not read.
        used: images, frames, video and audio files of the record.
        root: folder that relative paths start from.

    Raises:
        RecordError: `unsupported_media` if the record uses no media, or if a spelling of an image field names another
            image than those in use.
    """
    certain = [field for field in unlisted if field.is_certain]
    if certain and not used:
        first = certain[0]
        kind = "a video" if _is_video(first) else "an audio file" if _is_audio(first) else "an image"
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA,
            f"{_where(first)} refers to {kind}, but the record contains none. {_remedy(certain)}",
        )
    for field in certain:
        if field.is_listed and field.differs_from(used, root):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"{_where(field)} refers to an image that is not among the images of the record. List all images as "
                "`images`, with an `adapter`",
            )
    return [] if used else sorted({f"{IMAGE_URL} {field.name}" for field in unlisted})


def _where(field: UnlistedMedia) -> str:
    name = field.name if field.name.isprintable() else repr(field.name)
    of = "" if field.label == "the record" else f" of {field.label}"
    return f"{name[:60]} {shown(field.value)}{of}"


def _first(field: UnlistedMedia) -> Any:
    return next(iter(_items(field.value)), None)


def _is_video(field: UnlistedMedia) -> bool:
    return "video" in field.name.lower() or str(_first(field)).lower().endswith(_VIDEO_FILES)


def _is_audio(field: UnlistedMedia) -> bool:
    return str(_first(field)).lower().endswith(_AUDIO_FILES)


def _map_remedy(unlisted: Sequence[UnlistedMedia], kind: MediaKind) -> str:
    name, label = unlisted[0].name, unlisted[0].label
    if label != "the record":
        return f"Rename the field to `{kind.name}` with an `adapter`"
    if len({each.name for each in unlisted}) > 1 or not re.fullmatch(r"[\w .-]+", name):
        return f"List the {kind.plural} as `{kind.field}` with an `adapter`"
    return f"Read it with `map={kind.field}={name}`, or remove the field with an `adapter` if it is only a name"


def _remedy(unlisted: Sequence[UnlistedMedia]) -> str:
    field, text = unlisted[0], _first(unlisted[0])
    text = text if isinstance(text, str) else ""
    is_local = "://" not in text[:8] or text.startswith("file:")
    if is_local and (_is_video(field) or _is_audio(field)):
        return _map_remedy(unlisted, VIDEO if _is_video(field) else AUDIO)
    if "://" in text[:8] and not text.startswith("file:"):
        return "Nothing is fetched: download it, and add its path as `image` with an `adapter`"
    if _BASE64.match(text):
        return "Rename the field to `image_base64_str` with an `adapter`"
    if _kind(field.name) is _Kind.ID:
        return "Add its path as `image` with a `map` or an `adapter`"
    return _map_remedy(unlisted, IMAGE)
