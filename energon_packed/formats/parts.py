"""What the built-in codecs share: JSON parts, media parts and their names.

Members that a pack's JSON means, where it gives them other names than the tar does.

LLaVA-OneVision-2's packer lists `img000_sub000.jpg` and stores `img0_0.jpg`; LLaVA-OneVision-1.5's lists paths and
stores `img0.jpg`. A name that no member has therefore stands for its position:

    img{i}_{j}.*   image j of sample i
    img0_{k}.*     image k of the pack, where the JSON lists the images of all samples in one list
    img{k}.*       image k of the pack

One of these holds for all absent names of a pack. Source: `s4_pack_samples.py` and `s5_convert_to_webdataset.py` of
LLaVA-OneVision-2, `4_convert_packedsample_to_wds.py` of its 1.5 examples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import orjson

from energon_packed.errors import FormatError
from energon_packed.formats.codec import Part, RawPack, StoredImage, StoredSample
from energon_packed.records import IMAGE_PLACEHOLDER


def write_media(samples: Sequence[StoredSample]) -> tuple[list[Part], list[list[str]], list[list[str]]]:
    """Media parts of a pack, the image names and the .npy names of each sample."""
    parts: list[Part] = []
    images: list[list[str]] = []
    positions: list[list[str]] = []
    for i, sample in enumerate(samples):
        if not sample.images and not sample.patch_positions:
            images.append([])
            positions.append([])
            continue
        images.append([f"img{i}_{j}.{image.extension}" for j, image in enumerate(sample.images)])
        positions.append([f"img{i}_{j}.npy" for j in range(len(sample.patch_positions))])
        parts += zip(images[-1], (image.data for image in sample.images), strict=True)
        parts += zip(positions[-1], sample.patch_positions, strict=True)
    return parts, images, positions


def read_images(raw: RawPack, names: Any) -> list[tuple[StoredImage, ...]]:
    """Images named for each sample.

    Raises:
        FormatError: a member is missing, or a decoder has turned it into something other than bytes.
    """
    return [
        tuple([StoredImage(name.rpartition(".")[2], _content(raw, name), name) for name in _names(listed)])
        if listed
        else ()
        for listed in names
    ]


def read_files(raw: RawPack, names: Any) -> list[tuple[bytes, ...]]:
    """Bytes of the members named for each sample. Raises as `read_images` does."""
    return [tuple([_content(raw, name) for name in _names(listed)]) for listed in names]


def write_json(value: Any) -> bytes:
    """Compact JSON, keys in the order given; a type that JSON does not have, such as a decimal, as text."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=str)


def read_json(raw: RawPack) -> dict[str, Any]:
    """The `json` part, as bytes or as some decoder left it.

    Raises:
        FormatError: there is none, or it is not an object.
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
    """As `read_json`; {} where there is none or it is damaged: for `Codec.matches`."""
    try:
        return read_json(raw)
    except FormatError:
        return {}


def any_given(values: Sequence[Any]) -> bool:
    """True when one value is neither None, False nor empty."""
    return any(value is not None and value is not False and value != () and value != [] for value in values)


def optional(values: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The columns in which any sample has a value."""
    return {name: column for name, column in values.items() if any_given(column)}


def image_count(names: Iterable[str]) -> int:
    """How many of these member names are images of a pack."""
    return sum(name.rpartition(".")[2].lower() not in ("json", "npy", "txt") for name in names)


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


Position = tuple[int, int, int]
"""(sample i, image j of it, image k of the pack)."""
_STEMS: tuple[Callable[[Position], str], ...] = (
    lambda at: f"img{at[0]}_{at[1]}",
    lambda at: f"img0_{at[2]}",
    lambda at: f"img{at[2]}",
)
_NO_IMAGES = ("npy", "json", "txt")


def names_by_sample(raw: RawPack, listed: Any, texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Image names of each sample.

    Args:
        raw: the pack, for its key.
        listed: `images` of the json: a list for each sample, or one list for all.
        texts: all turns of each sample; placeholders in them say whose the images of one list are.

    Raises:
        FormatError: neither their number nor the placeholders say which image belongs to which sample.
    """
    if not listed:
        return [[] for _ in texts]
    if not all(isinstance(one, str) for one in listed):
        if len(listed) != len(texts):
            raise FormatError(f"{raw.get('__key__')} lists the images of {len(listed)} samples, but has {len(texts)}")
        return [[one] if isinstance(one, str) else list(one or ()) for one in listed]
    counts = [sum(text.count(IMAGE_PLACEHOLDER) for text in turns) for turns in texts]
    if sum(counts) != len(listed):
        if len(listed) == len(texts):  # one each
            return [[one] for one in listed]
        raise FormatError(
            f"{raw.get('__key__')} lists {len(listed)} images in one list for {len(texts)} samples with {sum(counts)} "
            f"{IMAGE_PLACEHOLDER} placeholders, so whose they are is not known; list them per sample"
        )
    left = iter(listed)
    return [[next(left) for _ in range(number)] for number in counts]


def member_names(raw: RawPack, names: Sequence[Sequence[str]], *, extension: str = "") -> list[list[str]]:
    """The member of each name: itself where the tar has it, else the one at its position.

    Args:
        raw: the pack.
        names: of each sample; an empty name is none, and keeps its position.
        extension: of the members to find, such as `npy`; images without it.

    Returns:
        As `names`; a name without a member stays, so that reading it names it.
    """
    known = {"", *raw}
    if all(name in known for listed in names for name in listed):
        return [list(listed) for listed in names]
    running = count()
    add_location = [[(name, (i, j, next(running))) for j, name in enumerate(listed)] for i, listed in enumerate(names)]
    absent = [at for listed in add_location for name, at in listed if name not in known]
    stems = _members_by_stem(raw, extension)
    for stem in _STEMS:
        if all(stem(at) in stems for at in absent):
            return [[name if name in known else stems[stem(at)] for name, at in listed] for listed in add_location]
    return [list(listed) for listed in names]


def _members_by_stem(raw: Mapping[str, Any], extension: str) -> dict[str, str]:
    found = {}
    for part in raw:
        stem, _, end = part.rpartition(".")
        if stem and (end.lower() == extension if extension else end.lower() not in _NO_IMAGES):
            found[stem] = part
    return found
