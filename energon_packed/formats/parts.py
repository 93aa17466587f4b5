"""What the built-in codecs share: JSON parts, media parts and their names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from energon_packed.errors import FormatError
from energon_packed.formats.codec import Part, RawPack
from energon_packed.formats.sample import StoredImage, StoredSample


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
