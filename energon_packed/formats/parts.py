"""JSON and media parts of a pack, shared by the built-in codecs. Input: samples or parts. Output: parts or contents.

    write_json, read_json, read_object       the `json` part
    write_media, read_media                  image, .npy, video and audio parts, and their names in the json
    names_by_sample, member_names            third-party packs whose JSON has other names than their members

LLaVA-OneVision-2's packer lists `img000_sub000.jpg` and stores `img0_0.jpg`; LLaVA-OneVision-1.5's packer lists paths
and stores `img0.jpg`. A name that no member has is therefore resolved by its position:

    img{i}_{j}.*   image j of sample i
    img0_{k}.*     image k of the pack, if the JSON lists the images of all samples in one list
    img{k}.*       image k of the pack

All absent names of a pack follow the same pattern. Source: `s4_pack_samples.py` and `s5_convert_to_webdataset.py` of
LLaVA-OneVision-2, `4_convert_packedsample_to_wds.py` of its 1.5 examples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import orjson

from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.files import of_type
from energon_packed.formats.audios import clip_as_dict, clip_from_dict, is_audio_part
from energon_packed.formats.codec import Part, RawPack
from energon_packed.formats.references import MEDIA_PART, PATHS
from energon_packed.formats.videos import frames_as_dict, frames_from_dict, is_video_part
from energon_packed.options import short
from energon_packed.records import (
    IMAGE_PLACEHOLDER,
    AudioReference,
    Conversation,
    MediaReference,
    VideoReference,
)
from energon_packed.records.media.kinds import VIDEO
from energon_packed.records.media.reference import read_image_settings

# Extensions of parts that are not images; any other extension is an image.
_NO_IMAGES = ("npy", "json", "txt", *[suffix[1:] for suffix in VIDEO.suffixes])
_Position = tuple[int, int, int]  # (sample i, image j of the sample, image k of the pack)
_STEMS: tuple[Callable[[_Position], str], ...] = (
    lambda position: f"img{position[0]}_{position[1]}",
    lambda position: f"img0_{position[2]}",
    lambda position: f"img{position[2]}",
)


def write_json(value: Any) -> bytes:
    """Serialize compact JSON in the order of the keys; a type that JSON lacks, such as a decimal, becomes a string."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=str)


def read_json(raw: RawPack) -> dict[str, Any]:
    """Parse the `json` part, from bytes or as a decoder left it.

    Raises:
        FormatError: the part is missing, or not an object.
    """
    value = raw.get("json")
    if isinstance(value, bytes | bytearray | memoryview | str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{raw.get('__key__')}: the json part is damaged: {error}") from error
    if value is None:
        raise FormatError(f"{raw.get('__key__')} has no json part; is this a packed dataset?")
    if not isinstance(value, dict):
        raise FormatError(f"{raw.get('__key__')}: the json part is a {type(value).__name__}, not an object")
    return value


def read_object(raw: RawPack) -> dict[str, Any]:
    """Parse the `json` part for `Codec.matches`: {} if it is missing or damaged."""
    try:
        return read_json(raw)
    except FormatError:
        return {}


def has_value(column: Sequence[Any]) -> bool:
    """Return whether any value of a column is neither None, False nor empty."""
    return any(value is not None and value is not False and value != () and value != [] for value in column)


def optional(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the columns in which any sample has a value."""
    return {name: column for name, column in columns.items() if has_value(column)}


MEDIA_COLUMNS = ("images", "patch_positions", "video_files", "audio_files", "image_settings")
"""Keys of the json with the media of each sample: image names, .npy names, entries as in videos.py and audios.py, and
the settings of each image or None."""


def write_media(samples: Sequence[Conversation]) -> tuple[list[Part], dict[str, list[list[Any]]]]:
    """Return the media parts of a pack, and its entries in the json: `MEDIA_COLUMNS`, with an entry for each sample.

    Files with a locator are listed in the part `media.json`, which is then the first of the parts.
    """
    parts: list[Part] = []
    references: dict[str, Any] = {}
    columns: dict[str, list[list[Any]]] = {name: [[] for _ in samples] for name in MEDIA_COLUMNS}
    for i, sample in enumerate(samples):
        if not (sample.images or sample.patch_positions or sample.videos or sample.audios):  # most samples
            continue
        images, positions, videos, audios, settings = (columns[name][i] for name in MEDIA_COLUMNS)
        images += [_part_name(f"img{i}_{j}", image) for j, image in enumerate(sample.images)]
        settings += _settings(sample.images)
        positions += [f"img{i}_{j}.npy" for j in range(len(sample.patch_positions))]
        _add_files(zip(images, sample.images, strict=True), parts, references)
        parts += zip(positions, [file.read() for file in sample.patch_positions], strict=True)
        references |= dict.fromkeys(positions)
        for j, video in enumerate(sample.videos):
            entry, files = _named_video(f"vid{i}_{j}", video)
            videos.append(entry)
            _add_files(files, parts, references)
        for j, audio in enumerate(sample.audios):
            part = _part_name(f"aud{i}_{j}", audio.file)
            assert audio.clip is not None  # of every measured record
            audios.append({"part": part, **clip_as_dict(audio.clip)})
            _add_files([(part, audio.file)], parts, references)
    if any(references.values()):
        parts.insert(0, (MEDIA_PART, write_json(references)))
    return parts, columns


def _settings(images: Sequence[MediaReference]) -> list[Mapping[str, int] | None]:
    """Return the settings of each image; [] if no image has any."""
    settings = [image.settings or None for image in images]
    return settings if any(settings) else []


def _add_files(files: Iterable[tuple[str, MediaReference]], parts: list[Part], references: dict[str, Any]) -> None:
    for name, file in files:
        references[name] = None if file.locator is None else file.locator.as_dict()
        if file.locator is None:
            parts.append((name, file.read()))


def _part_name(stem: str, file: MediaReference) -> str:
    if not file.extension:
        raise ConfigError(f"{stem} has no extension. Set `extension` of the MediaReference, such as 'jpg'")
    return f"{stem}.{file.extension}"


def _named_video(name: str, video: VideoReference) -> tuple[dict[str, Any], list[tuple[str, MediaReference]]]:
    """Return the entry of `video_files`, and the files by part name."""
    assert video.frames is not None  # of every measured record
    frames = frames_as_dict(video.frames)
    if video.images_before is not None:
        frames["images_before"] = video.images_before
    if video.file is not None:
        part = _part_name(name, video.file)
        return {"part": part, **frames}, [(part, video.file)]
    named = [(_part_name(f"{name}_{k}", image), image) for k, image in enumerate(video.images)]
    return {"parts": [part for part, _ in named], **frames}, named


def read_media(raw: RawPack, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the media of each sample, as arguments of Conversation; {} for a sample without media.

    Args:
        raw: the pack.
        columns: `MEDIA_COLUMNS`, with an entry for each sample; None, or left out, for columns that the pack has not.

    Raises:
        FormatError: a member is missing, or a decoder has converted it from bytes.
        ValueError, LookupError: an entry is damaged.
    """
    images = columns["images"]
    given = [columns.get(name) or [()] * len(images) for name in MEDIA_COLUMNS]
    if not any(map(any, given)):  # most packs of many datasets
        return [{}] * len(images)
    return [_read_media(raw, *columns_of_sample) for columns_of_sample in zip(*given, strict=True)]


def _read_media(
    raw: RawPack, image_names: Any, position_names: Any, videos: Any, audios: Any, settings: Any
) -> dict[str, Any]:
    media: dict[str, Any] = {}  # most samples have media of one kind, or none
    names = _names(image_names)
    if names or settings:
        images = [_stored(raw, name) for name in names]
        if settings:
            pairs = zip(images, settings, strict=True)
            images = [replace(image, settings=_checked(own)) if own else image for image, own in pairs]
        media["images"] = tuple(images)
    if names := _names(position_names):
        media["patch_positions"] = tuple([MediaReference(data=_content(raw, name)) for name in names])
    if videos:
        media["videos"] = tuple([_read_video(raw, entry) for entry in videos])
    if audios:
        media["audios"] = tuple(
            [AudioReference(file=_stored(raw, entry["part"]), clip=clip_from_dict(entry)) for entry in audios]
        )
    return media


def _read_video(raw: RawPack, entry: Mapping[str, Any]) -> VideoReference:
    frames, before = frames_from_dict(entry), entry.get("images_before")
    if before is not None and (type(before) is not int or before < 0):
        raise ValueError(f"images_before is {short(before)}")
    if "part" in entry:
        return VideoReference(file=_stored(raw, entry["part"]), frames=frames, images_before=before)
    images = tuple([_stored(raw, name) for name in entry["parts"]])
    if len(images) != len(frames.indices):
        raise ValueError(f"a video has {len(images)} images for {len(frames.indices)} frames")
    return VideoReference(file=None, frames=frames, images=images, images_before=before)


def image_count(names: Iterable[str]) -> int:
    """Return how many of the member names are images of a pack; frames of videos do not count."""
    return sum(
        name.rpartition(".")[2].lower() not in _NO_IMAGES and not is_video_part(name) and not is_audio_part(name)
        for name in names
    )


def audio_count(names: Iterable[str]) -> int:
    """Return how many of the member names are audio files of a pack."""
    return sum(map(is_audio_part, names))


def video_count(names: Iterable[str]) -> int:
    """Return how many videos the member names of a pack have."""
    stems = (name.partition(".")[0].split("_") for name in names if is_video_part(name))
    return len({(stem[0], stem[1]) for stem in stems})


def _stored(raw: RawPack, name: str) -> MediaReference:
    shown = name
    if PATHS in raw and (path := raw[PATHS].get(name)):
        shown = f"{name} ({path})"
    return MediaReference(data=_content(raw, name), name=shown, extension=name.rpartition(".")[2])


def _checked(settings: Any) -> Mapping[str, int]:
    try:
        return read_image_settings(of_type(settings, dict, "settings of an image"))
    except RecordError as error:
        raise ValueError(error.detail) from error


def _names(listed: Any) -> list[str]:
    return [listed] if isinstance(listed, str) else list(listed or ())


def _content(raw: RawPack, name: str) -> bytes:
    if name not in raw:
        raise FormatError(f"{raw.get('__key__')} names {name}, which is not in the tar")
    content = raw[name]
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise FormatError(
            f"{raw.get('__key__')}.{name} came as {type(content).__name__}; set `decoder: null` in dataset.yaml"
        )
    return bytes(content)


def names_by_sample(raw: RawPack, listed: Any, turns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the image names of each sample.

    Args:
        raw: the pack, for its key.
        listed: `images` of the json: a list for each sample, or a list for the pack.
        turns: turns of each sample; their placeholders assign the images of the list to samples.

    Raises:
        FormatError: neither the counts nor the placeholders assign the images to samples.
    """
    if not listed:
        return [[] for _ in turns]
    if not all(isinstance(names, str) for names in listed):
        if len(listed) != len(turns):
            raise FormatError(f"{raw.get('__key__')} lists the images of {len(listed)} samples, but has {len(turns)}")
        return [[names] if isinstance(names, str) else list(names or ()) for names in listed]
    counts = [sum(text.count(IMAGE_PLACEHOLDER) for text in texts) for texts in turns]
    if sum(counts) != len(listed):
        if len(listed) == len(turns):  # one image per sample
            return [[name] for name in listed]
        raise FormatError(
            f"{raw.get('__key__')} lists {len(listed)} images in one list for {len(turns)} samples with {sum(counts)} "
            f"{IMAGE_PLACEHOLDER} placeholders, so whose they are is not known; list them per sample"
        )
    remaining = iter(listed)
    return [[next(remaining) for _ in range(images)] for images in counts]


def member_names(raw: RawPack, names: Sequence[Sequence[str]], *, extension: str = "") -> list[list[str]]:
    """Return the member of each name: the name itself if it is in the pack, else the member at its position.

    Args:
        raw: the pack.
        names: names of each sample; an empty name means that there is no file, and keeps its position.
        extension: extension of the members, such as `npy`; "" for images.

    Returns:
        As `names`; a name without a member stays, so that the error of reading it has the name.
    """
    known = {"", *raw}
    if all(name in known for listed in names for name in listed):
        return [list(listed) for listed in names]
    k = count()
    located = [[(name, (i, j, next(k))) for j, name in enumerate(listed)] for i, listed in enumerate(names)]
    absent = [position for listed in located for name, position in listed if name not in known]
    members = _members_by_stem(raw, extension)
    for stem in _STEMS:
        # All or none: with one pattern for some names and another for the rest, images would change places.
        if all(stem(position) in members for position in absent):
            return [[name if name in known else members[stem(at)] for name, at in listed] for listed in located]
    return [list(listed) for listed in names]


def _members_by_stem(raw: Mapping[str, Any], extension: str) -> dict[str, str]:
    members = {}
    for part in raw:
        stem, _, suffix = part.rpartition(".")
        if stem and (suffix.lower() == extension if extension else suffix.lower() not in _NO_IMAGES):
            members[stem] = part
    return members
