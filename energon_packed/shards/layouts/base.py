"""What all layouts share: the sample that is stored, names of media members, and reading parts back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.conversation import Conversation
from energon_packed.errors import FormatError
from energon_packed.shards.tar import Part

Int64 = npt.NDArray[np.int64]


class Tokens(Protocol):
    """The encoded form of a sample, as `PackedTokensSample` stores it."""

    @property
    def input_ids(self) -> Int64:
        """int64 (L,)."""

    @property
    def labels(self) -> Int64:
        """int64 (L,), -100 where not supervised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """One sample on its way into a pack.

    Attributes:
        conversation: what the record said.
        length: tokens, after truncation.
        is_cut: it had more.
        images: (extension, bytes) of each image.
        patch_positions: bytes of each .npy file.
        tokens: encoded form, for layouts that store tokens.
    """

    conversation: Conversation
    length: int
    is_cut: bool = False
    images: tuple[tuple[str, bytes], ...] = ()
    patch_positions: tuple[bytes, ...] = ()
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How packs of one flavor lie in a tar.

    Attributes:
        sample_class: class in `energon_packed.flavors`.
        loader_module: module of its `sample_loader` and `part_filter`.
        check: raises RecordError for a conversation that this layout cannot hold; called while measuring.
        write: parts of one pack; `truncate` is the row length when samples were cut to it.
        read: fields of the flavor from the parts of a pack; raises FormatError.
        packed: a member holds a pack; False for one sample per member.
        stores_tokens: `StoredSample.tokens` is needed.
    """

    sample_class: str
    loader_module: str
    check: Callable[[Conversation], None]
    write: Callable[[Sequence[StoredSample], int | None], list[Part]]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    packed: bool = True
    stores_tokens: bool = False


def media_parts(samples: Sequence[StoredSample]) -> tuple[list[Part], list[list[str]], list[list[str]]]:
    """Media members of a pack, the image names and the .npy names of each sample."""
    parts: list[Part] = []
    images: list[list[str]] = []
    positions: list[list[str]] = []
    for i, sample in enumerate(samples):
        images.append([f"img{i}_{j}.{extension}" for j, (extension, _) in enumerate(sample.images)])
        positions.append([f"img{i}_{j}.npy" for j in range(len(sample.patch_positions))])
        parts += zip(images[-1], (data for _, data in sample.images), strict=True)
        parts += zip(positions[-1], sample.patch_positions, strict=True)
    return parts, images, positions


def dump_json(value: Any) -> bytes:
    """Compact JSON, keys in the order given; what JSON has no type for, such as a decimal, as text."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=str)


def read_json(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The `json` part, as bytes or as some decoder left it.

    Raises:
        FormatError: there is none, or it is not an object.
    """
    value = raw.get("json")
    if isinstance(value, bytes | bytearray | memoryview | str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{raw.get('__key__')}: the json part is broken: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"{raw.get('__key__')}: the json part is a {type(value).__name__}, not an object")
    if not isinstance(value, dict):
        raise FormatError(f"{raw.get('__key__')} has no json part; is this a packed data set?")
    return value


def read_media(raw: Mapping[str, Any], names: Any) -> list[list[bytes]]:
    """Bytes of the media named for each sample.

    Raises:
        FormatError: a member is missing, or a decoder has turned it into something else than bytes.
    """
    out = []
    for listed in names:
        for name in (listed := [listed] if isinstance(listed, str) else list(listed)):
            if name not in raw:
                raise FormatError(f"{raw.get('__key__')} names {name}, which is not in the tar")
            if not isinstance(raw[name], bytes | bytearray | memoryview):
                raise FormatError(
                    f"{raw.get('__key__')}.{name} came as {type(raw[name]).__name__}; "
                    "set `decoder: null` in dataset.yaml"
                )
        out.append([bytes(raw[name]) for name in listed])
    return out


def any_given(values: Sequence[Any]) -> bool:
    """True when one value is neither None, False nor empty."""
    return any(value is not None and value is not False and value != () and value != [] for value in values)
