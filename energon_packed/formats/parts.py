"""JSON and media parts of a pack, shared by the built-in codecs. Input: samples or parts. Output: parts or contents.

    write_json, read_json, read_object       the `json` part
    write_media, read_images, read_files     image and .npy parts
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
from itertools import count
from typing import Any

import orjson

from energon_packed.errors import FormatError
from energon_packed.formats.codec import Part, RawPack, StoredImage, StoredSample
from energon_packed.formats.references import MEDIA_PART
from energon_packed.records import IMAGE_PLACEHOLDER

_NO_IMAGES = ("npy", "json", "txt")  # extensions of parts that are not images; any other extension is an image
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


def write_media(samples: Sequence[StoredSample]) -> tuple[list[Part], list[list[str]], list[list[str]]]:
    """Return the media parts of a pack, and the image names and .npy names of each sample.

    Images with a locator are listed in the part `media.json`, which is then the first of the parts.
    """
    parts: list[Part] = []
    references: dict[str, Any] = {}
    images: list[list[str]] = []
    positions: list[list[str]] = []
    for i, sample in enumerate(samples):
        if not sample.images and not sample.patch_positions:  # text: most samples of many datasets
            images.append([])
            positions.append([])
            continue
        images.append([f"img{i}_{j}.{image.extension}" for j, image in enumerate(sample.images)])
        positions.append([f"img{i}_{j}.npy" for j in range(len(sample.patch_positions))])
        for name, image in zip(images[-1], sample.images, strict=True):
            references[name] = None if image.locator is None else image.locator.as_dict()
            if image.locator is None:
                parts.append((name, image.data))
        parts += zip(positions[-1], sample.patch_positions, strict=True)
        references |= dict.fromkeys(positions[-1])
    if any(references.values()):
        parts.insert(0, (MEDIA_PART, write_json(references)))
    return parts, images, positions


def read_images(raw: RawPack, names: Any) -> list[tuple[StoredImage, ...]]:
    """Return the images named for each sample.

    Raises:
        FormatError: a member is missing, or a decoder has converted it from bytes.
    """
    return [
        tuple([StoredImage(name.rpartition(".")[2], _content(raw, name), name) for name in _names(listed)])
        if listed
        else ()
        for listed in names
    ]


def read_files(raw: RawPack, names: Any) -> list[tuple[bytes, ...]]:
    """Return the bytes of the members named for each sample. Raises as `read_images` does."""
    return [tuple([_content(raw, name) for name in _names(listed)]) for listed in names]


def image_count(names: Iterable[str]) -> int:
    """Return how many of the member names are images of a pack."""
    return sum(name.rpartition(".")[2].lower() not in _NO_IMAGES for name in names)


def _names(listed: Any) -> list[str]:
    return [listed] if isinstance(listed, str) else list(listed)


def _content(raw: RawPack, name: str) -> bytes:
    if name not in raw:
        raise FormatError(f"{raw.get('__key__')} names {name}, which is not in the tar")
    if not isinstance(raw[name], bytes | bytearray | memoryview):
        raise FormatError(
            f"{raw.get('__key__')}.{name} came as {type(raw[name]).__name__}; set `decoder: null` in dataset.yaml"
        )
    return bytes(raw[name])


def names_by_sample(raw: RawPack, listed: Any, turns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the image names of each sample.

    Args:
        raw: the pack, for its key.
        listed: `images` of the json: a list for each sample, or one list for the pack.
        turns: turns of each sample; their placeholders assign the images of one list to samples.

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
