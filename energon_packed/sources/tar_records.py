"""From the members of one key of a tar to its records, by the names of the parts.

    images (jpg png webp ...)   references to byte ranges of the tar, in natural order of their names
    txt, caption, text          the caption; with no image, a document
    json                        a conversation of any known shape, whose images are members of the key where it names
                                them or names none; else metadata, whose caption or text is the caption
    packs of energon-packed     one Conversation per sample

A text part wins over a caption in the json. Parts that are none of these become fields that nothing reads, so that a
run counts them by name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from energon_packed.errors import FormatError, Reason, RecordError
from energon_packed.formats import READ_ONLY, codec_of
from energon_packed.records import Conversation, MediaReference
from energon_packed.records.fields import parse_json
from energon_packed.records.record_formats import RECORD_FORMATS
from energon_packed.tarfiles import Member, key_faults, read_content

IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
TEXT_PARTS = ("txt", "caption", "text")
_OTHER_MEDIA = ("mp4", "mov", "avi", "mkv", "webm", "m4v", "wav", "mp3", "flac", "m4a", "ogg", "opus")
_PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")
_CAPTION_FIELDS = ("caption", "text", "captions")
_IMAGE_FIELDS = ("images", "image", "videos", "video", "frames")
_PATH_FIELDS = (*_IMAGE_FIELDS, "image_path", "image_file", "img", "file_name")  # where an image was before
_NESTED_FIELDS = ("image", "image_url", "path", "url", "file_name", "video", "frames", "images")
_TURN_FIELDS = ("messages", "conversations", "conversation", "contents", "parts", "content", "texts", "value")
_PACKED_IMAGE = re.compile(r"(?:img\w*|s\d{3}_.*)\.\w+")  # as `part_filter` of the codecs has it
_STANDS_FOR = b"\0member of the tar: "
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class KeyMembers:
    """The members of one key.

    Attributes:
        path: the tar.
        members: of the key, in order.
    """

    path: Path
    members: Sequence[Member]

    @property
    def key(self) -> str:
        """Name of the record in reports."""
        return self.members[0].key

    def check(self) -> None:
        """Reject a key whose parts cannot be told apart.

        Raises:
            RecordError: a part occurs twice, is not a regular file, or is a medium that is not supported.
        """
        for member, fault in key_faults(self.members):
            raise RecordError(Reason.MISSING_IMAGE if member.fault == fault else Reason.MISSING_FIELD, fault)
        for member in self.members:
            if member.extension in _OTHER_MEDIA:
                raise RecordError(
                    Reason.UNSUPPORTED_MEDIA, f"{member.name} is video or audio, which is not decoded; pass frames"
                )
            if member.extension in _PICKLES:
                raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{member.name} is a pickle, which is never loaded")

    def images(self) -> list[Member]:
        """Image members, in natural order of their parts."""
        return sorted((m for m in self.members if m.extension in IMAGE_PARTS), key=lambda m: _natural(m.part))

    def find(self, name: str) -> Member | None:
        """The member that a record names by its full name, base name, or part."""
        for member in self.members:
            if name in (member.name, member.name.rpartition("/")[2], member.part):
                return member
        return None

    def part(self, *parts: str) -> Member | None:
        """The first of these parts that the key has."""
        return next((m for part in parts for m in self.members if m.part.lower() == part), None)

    def reference(self, member: Member) -> MediaReference:
        """The byte range of a member."""
        return MediaReference(path=str(self.path), offset=member.offset, size=member.size)

    def content(self, member: Member) -> bytes:
        """Bytes of a member."""
        return read_content(self.path, member)

    def text(self, member: Member) -> str:
        """Text of a member.

        Raises:
            RecordError: it is not UTF-8.
        """
        try:
            return self.content(member).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecordError(Reason.BAD_JSON, f"{member.name} is not UTF-8: {error}") from error

    def json(self, member: Member) -> Any:
        """Value of a JSON member.

        Raises:
            RecordError: it is damaged.
        """
        try:
            return parse_json(self.content(member).removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError as error:
            raise RecordError(Reason.BAD_JSON, f"{member.name}: {error}") from error


def read_records(group: KeyMembers) -> list[Any]:
    """The records of a key: one, or the samples of a pack.

    Raises:
        RecordError: the key cannot be used.
    """
    group.check()
    found = group.part("json")
    value = group.json(found) if found is not None else None
    if is_pack(group, value):
        return read_pack(group)
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        value = {"messages" if "role" in value[0] else "conversations": value}
    if value is not None and not isinstance(value, dict):
        raise RecordError(Reason.BAD_JSON, f"{group.key}.json holds {type(value).__name__}, not an object")
    return [_record(group, value or {})]


def raw_records(group: KeyMembers) -> list[Any]:
    """What an adapter gets: the parts of a key by their names, and its `id`; or the samples of a pack.

    Images are references, JSON is decoded, texts are texts, and other parts are bytes.

    Raises:
        RecordError: the key cannot be used.
    """
    group.check()
    found: dict[str, Any] = {}
    for member in group.members:
        if member.extension in IMAGE_PARTS:
            found[member.part] = group.reference(member)
        elif member.extension in ("json", "jsn"):
            found[member.part] = group.json(member)
        else:
            found[member.part] = group.text(member) if member.extension in TEXT_PARTS else group.content(member)
    return read_pack(group) if is_pack(group, found.get("json")) else [{**found, "id": group.key}]


def is_pack(group: KeyMembers, value: Any) -> bool:
    """Whether a key is a pack that energon-packed, or another packer of its layouts, wrote; `value` is its json."""
    if not isinstance(value, dict):
        return False
    if group.part("input_ids.npy") is not None:
        return True
    if "sample_count" in value and ("captions" in value or "samples" in value):
        return True
    raw = {"__key__": group.key, "json": value}
    return any(codec.matches(raw) for codec in READ_ONLY.values())


def read_pack(group: KeyMembers) -> list[Conversation]:
    """The samples of a pack; their images are references into the tar.

    Raises:
        RecordError: the pack is damaged.
    """
    raw: dict[str, Any] = {"__key__": group.key}
    for number, member in enumerate(group.members):
        # Codecs pass images on as they are: the number of the member stands for its bytes, which are not read.
        is_image = _PACKED_IMAGE.fullmatch(member.part) is not None and member.extension != "npy"
        raw[member.part] = _STANDS_FOR + str(number).encode() if is_image else group.content(member)
    try:
        samples = codec_of(raw).read(raw)
    except FormatError as error:
        raise RecordError(Reason.BAD_JSON, f"{group.key} is not a valid pack: {error}") from error
    return [
        replace(
            sample.conversation,
            images=tuple([_packed_image(group, image.data) for image in sample.images]),
        )
        for sample in samples
    ]


def _packed_image(group: KeyMembers, data: bytes) -> MediaReference:
    if data.startswith(_STANDS_FOR):
        return group.reference(group.members[int(data.removeprefix(_STANDS_FOR))])
    return MediaReference(data=data)


def caption_record(group: KeyMembers, text: str, images: Sequence[MediaReference], **more: Any) -> dict[str, Any]:
    """An image with a caption; without an image, a document."""
    if not images:
        return {"id": group.key, **more, "text": text}
    return {"id": group.key, **more, "images": list(images), "captions": [text]}


def _record(group: KeyMembers, value: Mapping[str, Any]) -> dict[str, Any]:
    images = [group.reference(member) for member in group.images()]
    others = {m.part or m.name: m.name for m in group.members if not _is_known(m)}
    if _is_conversation(value):
        placer = _Placer(group)
        record = placer.walk(value)
        if images and placer.named == 0:
            record = {**{k: v for k, v in record.items() if k not in _IMAGE_FIELDS or v is True}, "images": images}
        elif len(images) == 1 and placer.named == 1 and not _names_members(record):
            record = _Placer(group, only=images[0]).walk(value)  # the path that the image had before it was in the tar
        return {"id": group.key, **others, **record}
    unread = (*_CAPTION_FIELDS, *(_PATH_FIELDS if images else ()))
    more = {**others, **{name: item for name, item in value.items() if name not in unread}}
    text = _text(group, value)
    if text is None:
        parts = ", ".join(member.part or member.name for member in group.members)
        raise RecordError(
            Reason.MISSING_FIELD,
            f"{group.key} has the parts {parts} and no text; add a txt part, or a json part with a caption or a "
            "conversation",
        )
    return caption_record(group, text, images, **more)


def _text(group: KeyMembers, value: Mapping[str, Any]) -> str | None:
    member = group.part(*TEXT_PARTS)
    if member is not None:
        return group.text(member).strip()
    for name in _CAPTION_FIELDS:
        given = value.get(name)
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        if isinstance(given, str):
            return given
        if given is not None:
            raise RecordError(Reason.MISSING_FIELD, f"{group.key}: {name} is {type(given).__name__}, not one text")
    return None


def _is_conversation(value: Mapping[str, Any]) -> bool:
    """Whether a record of a json part is a conversation by itself, rather than metadata with a caption."""
    if "captions" in value and isinstance(value["captions"], list) and len(value["captions"]) != 1:
        return True
    if "prompts" in value:
        return True
    plain = {name: item for name, item in value.items() if name not in _CAPTION_FIELDS}
    return any(shape.matches(plain) for shape in RECORD_FORMATS)


def _is_known(member: Member) -> bool:
    return member.extension in IMAGE_PARTS or member.part.lower() in (*TEXT_PARTS, "json")


def _names_members(record: Any) -> bool:
    return any(isinstance(item, MediaReference) for item in _leaves(record))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


class _Placer:
    """Puts references in the place of names; `only` stands for every medium.

    Only fields that hold media are changed: a text that equals a member's name stays text. `named` counts the media.
    """

    def __init__(self, group: KeyMembers, only: MediaReference | None = None) -> None:
        self._group = group
        self._only = only
        self.named = 0

    def walk(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record with its media fields and content parts."""
        return {
            name: self._media(item) if name in _IMAGE_FIELDS else self._turns(name, item)
            for name, item in record.items()
            if name != "patch_positions"
        } | self._positions(record)

    def _positions(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Names of .npy members, which are no images."""
        if "patch_positions" not in record:
            return {}
        placer = _Placer(self._group)
        return {"patch_positions": placer._media(record["patch_positions"])}

    def _turns(self, name: str, value: Any) -> Any:
        if name in _TURN_FIELDS and isinstance(value, list):
            return [self._part(item) if isinstance(item, dict) else item for item in value]
        return value

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """A turn or a content part."""
        is_turn = "role" in part or "from" in part
        return {
            name: self._media(item) if name in _NESTED_FIELDS and not is_turn else self._turns(name, item)
            for name, item in part.items()
        }

    def _media(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._media(item) for item in value]
        if isinstance(value, dict):
            return {name: self._media(item) if name in _NESTED_FIELDS else item for name, item in value.items()}
        if not isinstance(value, str) or not value:
            return value
        self.named += 1
        if self._only is not None and not value.startswith("data:"):
            return self._only
        member = self._group.find(value)
        return value if member is None else self._group.reference(member)


def _natural(part: str) -> list[tuple[int, str]]:
    """img2 before img10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in _DIGITS.split(part)]
