"""Members of a tar key in, its records out, by the names of the members' parts.

    images (jpg png webp ...)   references to byte ranges of the tar, in natural order of their names
    videos (mp4 mkv webm ...)   the same
    audio (wav flac mp3 ...)    the same
    txt, caption, text          the caption or transcript; without media, a document
    json                        a conversation of any known record format, with media among the members of the key; or
                                metadata with a caption or transcript
    packs of energon-packed     a Conversation per sample

A text part overrides a caption in the json. Other parts become unused fields, so that a run counts them by name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from energon_packed.errors import FormatError, Reason, RecordError
from energon_packed.formats import READ_ONLY, codec_of
from energon_packed.formats.references import FOLDER, MEDIA_PART, located_images
from energon_packed.records import AudioReference, Conversation, MediaReference, VideoReference
from energon_packed.records.conversation import with_files
from energon_packed.records.exact_json import parse_json
from energon_packed.records.fields import is_given
from energon_packed.records.media.file_types import SIGNATURE_BYTES, is_video_content
from energon_packed.records.media.kinds import AUDIO, IMAGE, MEDIA_KINDS, VIDEO, MediaKind
from energon_packed.records.record_formats import RECORD_FORMATS
from energon_packed.sources.base import LONGEST_RECORD
from energon_packed.tarfiles import Member, key_faults, read_content

IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
TEXT_PARTS = ("txt", "caption", "text")
JSON_PARTS = ("json", "jsn")
INTEGER_PARTS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # of Energon's default decoder
VIDEO_PARTS = tuple(suffix[1:] for suffix in VIDEO.suffixes)
_SOURCE_CODE = ("ts", "mts")  # extensions of TypeScript, too: the content of such a member decides
_AUDIO_PARTS = tuple(suffix[1:] for suffix in AUDIO.suffixes)
_PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")
_MEMBER_LISTS = {"image_keys": "images", "patch_positions_keys": "patch_positions"}  # of LLaVA-OneVision-2
_CAPTION_FIELDS = ("caption", "text", "captions")
_TRANSCRIPT_FIELDS = (*_CAPTION_FIELDS, "transcription", "transcript", "sentence")
_VIDEO_FIELDS = (*VIDEO.fields, "frames")
_MEDIA_FIELDS = (*IMAGE.fields, *_VIDEO_FIELDS, "video_path", *AUDIO.fields)
# Paths from before the tar was written.
_PATH_FIELDS = (
    *(*_MEDIA_FIELDS, "image_path", "image_file", "img", "file_name", "video_file", "video_name"),
    *("audio_filepath", "audio_filename", "audio_path", "audio_file", "audio_name"),
)
_NESTED_FIELDS = (
    *("image", "image_url", "path", "url", "file_name", "video", "video_url", "frames", "images", "videos"),
    *("audio", "audio_url", "audios"),
)
_TURN_FIELDS = ("messages", "conversations", "conversation", "contents", "parts", "content", "texts", "value")
_PACKED_FILE = re.compile(r"(?:img\w*|vid\w*|aud\w*|s\d{3}_.*)\.\w+")  # as in `part_filter` of the codecs
_MEMBER_TAG = b"\0member of the tar: "
_LOCATED_TAG = b"\0image in another file: "
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class KeyMembers:
    """Members of a key.

    Attributes:
        path: the tar.
        members: members of the key, in the order of the tar.
    """

    path: Path
    members: Sequence[Member]

    @property
    def key(self) -> str:
        """Name of the record in reports."""
        return self.members[0].key

    def check(self) -> None:
        """Reject a key with ambiguous or unsupported parts.

        Raises:
            RecordError: a part occurs twice, is not a regular file, or is unsupported media.
        """
        for member, fault in key_faults(self.members):
            raise RecordError(Reason.MISSING_IMAGE if member.fault == fault else Reason.MISSING_FIELD, fault)
        for member in self.members:
            if member.extension in _PICKLES:
                raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{member.name} is a pickle, which is never loaded")

    def media_members(self) -> dict[str, list[Member]]:
        """List the members that are media by the field of their kind, in natural order of their parts."""
        found: dict[str, list[Member]] = {kind.field: [] for kind in MEDIA_KINDS.values()}
        for member in sorted(self.members, key=lambda member: _natural(member.part)):
            if (kind := self.kind_of(member)) is not None:
                found[kind.field].append(member)
        return {field: members for field, members in found.items() if members}

    def kind_of(self, member: Member) -> MediaKind | None:
        """Find the kind of media that a member is; None if it is not media."""
        if member.extension in IMAGE_PARTS:
            return IMAGE
        if member.extension in _AUDIO_PARTS:
            return AUDIO
        if member.extension in _SOURCE_CODE:
            with self.reference(member).open() as stream:
                return VIDEO if is_video_content(stream.read(SIGNATURE_BYTES)) else None
        return VIDEO if member.extension in VIDEO_PARTS else None

    def find(self, name: str) -> Member | None:
        """Find the member that a record refers to by full name, base name, or part."""
        for member in self.members:
            if name in (member.name, member.name.rpartition("/")[2], member.part):
                return member
        return None

    def part(self, *parts: str) -> Member | None:
        """Find the first of these parts that the key has.

        Raises:
            RecordError: two of the parts (or one part, as `json` and `JSON`) have different content.
        """
        found = sorted((m for m in self.members if m.part.lower() in parts), key=lambda m: parts.index(m.part.lower()))
        if len(found) > 1 and len({self.content(member) for member in found}) > 1:
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{' and '.join([member.name for member in found])} have different values. Keep only one.",
            )
        return found[0] if found else None

    def reference(self, member: Member) -> MediaReference:
        """Make a reference to the byte range of a member."""
        return MediaReference(path=str(self.path), offset=member.offset, size=member.size)

    def media(self, member: Member) -> MediaReference | VideoReference | AudioReference:
        """Make a reference to an image, video or audio member."""
        reference, kind = self.reference(member), self.kind_of(member)
        if kind is AUDIO:
            return AudioReference(file=reference)
        return VideoReference(file=reference) if kind is VIDEO else reference

    def content(self, member: Member) -> bytes:
        """Read the bytes of a member that is not media.

        Raises:
            RecordError: the member is too large.
        """
        if member.size >= LONGEST_RECORD:
            raise RecordError(
                Reason.BAD_JSON,
                f"{member.name} has {member.size / 1e6:,.0f} MB; a part that is not media must be shorter "
                f"than {LONGEST_RECORD / 1e6:,.0f} MB. Split the record.",
            )
        return read_content(self.path, member)

    def text(self, member: Member) -> str:
        """Read the text of a member.

        Raises:
            RecordError: the member is not UTF-8.
        """
        try:
            return self.content(member).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecordError(Reason.BAD_JSON, f"{member.name} is not UTF-8: {error}") from error

    def json(self, member: Member) -> Any:
        """Parse a JSON member.

        Raises:
            RecordError: the member is not valid JSON.
        """
        try:
            return parse_json(self.content(member).removeprefix(b"\xef\xbb\xbf"))
        except orjson.JSONDecodeError as error:
            raise RecordError(Reason.BAD_JSON, f"{member.name}: {error}") from error


def read_records(group: KeyMembers) -> list[Any]:
    """Read a key: a single record, or the samples of a pack.

    Raises:
        RecordError: the key cannot be used.
    """
    group.check()
    json_member = group.part("json")
    value = group.json(json_member) if json_member is not None else None
    if is_pack(group, value):
        return read_pack(group)
    # A json part may be the bare list of turns, in either spelling.
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        value = {"messages" if "role" in value[0] else "conversations": value}
    if value is not None and not isinstance(value, dict):
        raise RecordError(Reason.BAD_JSON, f"{group.key}.json is {type(value).__name__}, not an object")
    return [_record(group, value or {})]


def raw_records(group: KeyMembers) -> list[Any]:
    """Read a key for an adapter: its parts by name and its `id`; or the samples of a pack.

    Images become MediaReferences, videos VideoReferences, audio files AudioReferences, JSON is decoded, text parts
    become strings, and other parts bytes.

    Raises:
        RecordError: the key cannot be used.
    """
    group.check()
    values: dict[str, Any] = {}
    for member in group.members:
        if group.kind_of(member) is not None:
            values[member.part] = group.media(member)
        elif member.extension in JSON_PARTS:
            values[member.part] = group.json(member)
        else:
            values[member.part] = group.text(member) if member.extension in TEXT_PARTS else group.content(member)
    return read_pack(group) if is_pack(group, values.get("json")) else [{**values, "id": group.key}]


def is_pack(group: KeyMembers, value: Any) -> bool:
    """Whether a key is a pack of energon-packed, LLaVA-OneVision-2 or LoongForge; `value` is its json."""
    if not isinstance(value, dict):
        return False
    # Parts of the flavors of energon-packed; packs of other projects are recognized by their codecs.
    if group.part("input_ids.npy") is not None:
        return True
    if "sample_count" in value and ("captions" in value or "samples" in value):
        return True
    raw = {"__key__": group.key, "json": value}
    return any(codec.matches(raw) for codec in READ_ONLY.values())


def read_pack(group: KeyMembers) -> list[Conversation]:
    """Read the samples of a pack; their images and videos are references into the tar, or are its references.

    Raises:
        RecordError: the pack is damaged.
    """
    raw: dict[str, Any] = {"__key__": group.key}
    for position, member in enumerate(group.members):
        # Codecs return media unchanged, so the position of the member replaces its bytes, which are not read.
        is_file = _PACKED_FILE.fullmatch(member.part) is not None and member.extension != "npy"
        raw[member.part] = _MEMBER_TAG + str(position).encode() if is_file else group.content(member)
    try:
        located = located_images(raw | {FOLDER: group.path.parent}) if MEDIA_PART in raw else {}
        # As in `complete_parts`, without reading the files: the new dataset refers to the same files.
        raw |= {name: _LOCATED_TAG + name.encode() for name in located}
        raw.pop(MEDIA_PART, None)
        samples = codec_of(raw).read(raw)
    except FormatError as error:
        raise RecordError(Reason.BAD_JSON, f"{group.key} is not a valid pack: {error}") from error

    def placed(file: MediaReference) -> MediaReference:
        if file.data is None or not file.data.startswith((_LOCATED_TAG, _MEMBER_TAG)):
            return file
        if file.data.startswith(_LOCATED_TAG):
            reference = located[file.data.removeprefix(_LOCATED_TAG).decode()]
        else:
            reference = group.reference(group.members[int(file.data.removeprefix(_MEMBER_TAG))])
        return replace(reference, settings=file.settings)

    in_group = Counter([sample.conversation.group for sample in samples])

    def key_of(own: str | None) -> str | None:
        """Key that no other pack has; a sample alone in its group needs none."""
        return None if own is None or in_group[own] == 1 else f"{group.key}/{own}"

    return [
        replace(
            with_files(sample.conversation, placed),
            group=key_of(sample.conversation.group),
            timestamps=None,  # the lengths of the old pack are not used
        )
        for sample in samples
    ]


def caption_record(
    group: KeyMembers,
    text: str,
    media: Mapping[str, Sequence[Any]],
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a record of media, by field, with a caption; without media, a document. `metadata` are its other fields."""
    record = {"id": group.key, **(metadata or {}), **{field: list(files) for field, files in media.items() if files}}
    return {**record, "captions": [text]} if any(media.values()) else {**record, "text": text}


def _record(group: KeyMembers, value: Mapping[str, Any]) -> dict[str, Any]:
    members = group.media_members()
    media = {field: [group.media(member) for member in found] for field, found in members.items()}
    files = [file for found in media.values() for file in found]
    has_audio = AUDIO.field in media
    value = _with_member_lists(group, value)
    positions = [group.find(str(name)) for name in _list(value.get("patch_positions"))]
    others = {m.part or m.name: m.name for m in group.members if not _is_known(group, m) and m not in positions}
    texts = _TRANSCRIPT_FIELDS if has_audio else _CAPTION_FIELDS
    if _is_conversation(value, (*texts, *_PATH_FIELDS) if has_audio else texts):
        placer = _Placer(group)
        record = placer.walk(value)
        # The record names no images or videos: all members of these types belong to it.
        if media and placer.named == 0:
            record = {k: v for k, v in record.items() if k not in _MEDIA_FIELDS or v is True}
            record |= media
        elif len(files) == 1 and placer.named == 1 and not _names_members(record):
            record = _Placer(group, only=files[0]).walk(value)  # its path from before the tar was written
        else:
            for kind in (VIDEO, AUDIO):
                if kind.field not in media or _names_files(record, kind):
                    continue
                if any(isinstance(item, str) and kind.placeholder in item for item in leaves(record)):
                    record[kind.field] = media[kind.field]
                else:  # a run counts them by name
                    others |= {member.part: member.name for member in members[kind.field]}
        return {"id": group.key, **others, **record}
    if VIDEO.field in media and has_audio:  # of video2dataset
        detail = f"{members[AUDIO.field][0].name} is audio beside a video, whose sound is not used; remove it"
        raise RecordError(Reason.UNSUPPORTED_MEDIA, detail)
    unread = (*texts, *(_PATH_FIELDS if media else ()))
    metadata = {**others, **{name: item for name, item in value.items() if name not in unread}}
    text = _text(group, value, texts)
    if text is None:
        parts = ", ".join(member.part or member.name for member in group.members)
        raise RecordError(
            Reason.MISSING_FIELD,
            f"{group.key} has the parts {parts} and no text; add a txt part, or a json part with a caption or a "
            "conversation",
        )
    return caption_record(group, text, media, metadata)


def _with_member_lists(group: KeyMembers, value: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the lists of member names in the unpacked samples of LLaVA-OneVision-2.

    Source: `convert_jsonl_to_webdataset_simple.py` of EvolvingLMMs-Lab/LLaVA-OneVision-2.
    """
    renamed = {
        name: other
        for name, other in _MEMBER_LISTS.items()
        if other not in value and all([group.find(str(member)) for member in _list(value.get(name))])
    }
    return {renamed.get(name, name): item for name, item in value.items()}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(group: KeyMembers, value: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    member = group.part(*TEXT_PARTS)
    if member is not None:
        return group.text(member).strip()
    for name in fields:
        caption = value.get(name)
        if isinstance(caption, list) and len(caption) == 1:
            caption = caption[0]
        if isinstance(caption, str):
            return caption
        if caption is not None:
            raise RecordError(Reason.MISSING_FIELD, f"{group.key}: {name} is {type(caption).__name__}, not one text")
    return None


def _is_conversation(value: Mapping[str, Any], texts: Sequence[str]) -> bool:
    """Whether a json part is a conversation, rather than metadata with one of the fields `texts`."""
    if "captions" in value and isinstance(value["captions"], list) and len(value["captions"]) != 1:
        return True
    if "prompts" in value:
        return True
    # Without these fields, because metadata with a caption would match the caption formats.
    plain = {name: item for name, item in value.items() if name not in texts}
    return any(record_format.matches(plain) for record_format in RECORD_FORMATS)


def _is_known(group: KeyMembers, member: Member) -> bool:
    return group.kind_of(member) is not None or member.part.lower() in (*TEXT_PARTS, "json")


def _names_members(record: Any) -> bool:
    return any(isinstance(item, MediaReference | VideoReference | AudioReference) for item in leaves(record))


def _names_files(record: Mapping[str, Any], kind: MediaKind) -> bool:
    """Whether a record names its videos or audio files."""
    if any(isinstance(item, VideoReference if kind is VIDEO else AudioReference) for item in leaves(record)):
        return True
    names = (*_VIDEO_FIELDS, "video_path") if kind is VIDEO else AUDIO.fields
    return any(is_given(record.get(name)) and record[name] is not True for name in names)


def leaves(record: Any) -> Iterator[Any]:
    """Yield the values of a record that are not objects or lists, in any order; names of fields are not among them."""
    left = [record]  # not recursive: records may be nested deeply
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)
        else:
            yield value


class _Placer:
    """Replaces names of members by references; with `only`, every name by this reference.

    Only media fields are changed: a text that equals the name of a member stays text. `named` counts the names.
    """

    def __init__(
        self, group: KeyMembers, only: MediaReference | VideoReference | AudioReference | None = None
    ) -> None:
        self._group = group
        self._only = only
        self.named = 0

    def walk(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the names in the media fields and content parts of a record."""
        return {
            name: self._media(item) if name in _MEDIA_FIELDS else self._turns(name, item)
            for name, item in record.items()
            if name != "patch_positions"
        } | self._positions(record)

    def _positions(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the names of .npy members; they do not count as images."""
        if "patch_positions" not in record:
            return {}
        placer = _Placer(self._group)
        return {"patch_positions": placer._media(record["patch_positions"])}

    def _turns(self, name: str, value: Any) -> Any:
        if name in _TURN_FIELDS and isinstance(value, list):
            return [self._part(item) if isinstance(item, dict) else item for item in value]
        return value

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the names in a turn or content part."""
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
        return value if member is None else self._group.media(member)


def _natural(part: str) -> list[tuple[int, str]]:
    """Sort key that orders img2 before img10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in _DIGITS.split(part)]
