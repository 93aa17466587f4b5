"""Codec of PackedTokensSample: tokenized samples to the parts of a pack, and back.

{key}.input_ids.npy    int32 (T,), images as runs of the image token
{key}.cu_seqlens.npy   int32 (S+1,)
{key}.loss_spans.npy   int32 (K, 2): tokens [start, end) of the row that are supervised
{key}.labels.npy       int32 (T,), in place of loss_spans if a label differs from its token
{key}.weighted_spans.npy   (K,) of start int32, end int32, weight float32: supervised tokens [start, end) and their
                       loss weight, in place of loss_spans, or beside labels, if a weight is not 1
{key}.columns.NAME.npy  (T,) of float32, float16, int32 or int16: a column of the tokens; 0 for samples without it
{key}.columns.NAME.npy.zst   the same with k values per token, (T, k), compressed with Zstandard
{key}.json             sample_count, ids, images, and patch_positions, video_files (see videos.py) and image_settings
                       (of each image, or null) if present; `groups` (index of the group of each sample), `roles`
                       (a string or null each) and `labels` (a list of numbers or null each) if a sample has one
{key}.img{i}_{j}.{ext}, {key}.img{i}_{j}.npy, {key}.vid{i}_{j}.{ext}   as in PackedCaptioningSample
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import FormatError, RecordError
from energon_packed.formats.codec import Codec, Part, RawPack, StoredSample
from energon_packed.formats.parts import optional, read_json, read_media, write_json, write_media
from energon_packed.records import Conversation
from energon_packed.records.columns import Column, Columns, check_columns, cut_columns, join_columns
from energon_packed.records.conversation import is_loss_weight
from energon_packed.seqlens import cu_seqlens_from_lengths

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
# .npy 1.0 of int32: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
_OWN_HEADER = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i4', 'fortran_order': False, 'shape': ("
_HEADER_SIZE = 128  # 10 bytes of magic, version and length, then 0x76 = 118 bytes
_ARRAYS = ("input_ids.npy", "cu_seqlens.npy", "loss_spans.npy", "labels.npy", "weighted_spans.npy")
_COLUMN = "columns."  # start of the parts that are columns
_COMPRESSED = ".zst"  # end of the parts of columns with k values per token, in Zstandard (RFC 8878)
_MOST_DECOMPRESSED = 1 << 31  # bytes, so that a damaged part cannot take all memory
_WEIGHTED_SPAN = np.dtype([("start", "<i4"), ("end", "<i4"), ("weight", "<f4")])
# Key of the json -> attribute of TokenRow, and the types of its values.
_OF_SAMPLES: dict[str, tuple[str, tuple[type, ...]]] = {
    "groups": ("groups", (int,)),
    "roles": ("roles", (str, type(None))),
    "labels": ("sample_labels", (list, type(None))),
}
_IGNORE = -100  # label of a token that is not a target, as torch.nn.CrossEntropyLoss ignores it


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Row of S tokenized samples, as columns.

    Attributes:
        ids: ids of the samples.
        input_ids: int32 (T,), images as runs of the image token.
        labels: int32 (T,), unshifted, -100 for tokens that are not supervised.
        cu_seqlens: int32 (S+1,), boundaries of the samples.
        loss_weights: float32 (T,), loss weight of each target, else 0; None if all weights are 1.
        columns: columns of the tokens by name, (T,) or (T, k) each; None without columns.
        media: media of each sample, as arguments of Conversation.
        groups: index of the group of each sample in the pack; None without groups.
        roles: role of each sample in its group, or None; None without roles.
        sample_labels: label of each sample, or None; None without labels.
    """

    ids: Sequence[str | None]
    input_ids: Int32
    labels: Int32
    cu_seqlens: Int32
    loss_weights: Float32 | None
    columns: Columns | None
    media: Sequence[Mapping[str, Any]]
    groups: Sequence[int] | None = None
    roles: Sequence[str | None] | None = None
    sample_labels: Sequence[tuple[float, ...] | None] | None = None

    def samples(self) -> list[StoredSample]:
        """Return the samples."""
        samples = []
        bounds = pairwise(self.cu_seqlens.tolist())
        for place, (ident, (start, end), media) in enumerate(zip(self.ids, bounds, self.media, strict=True)):
            conversation = Conversation(
                id=ident,
                input_ids=self.input_ids[start:end].astype(np.int64),
                labels=self.labels[start:end].astype(np.int64),
                loss_weights=None if self.loss_weights is None else self.loss_weights[start:end],
                columns=cut_columns(self.columns, slice(start, end)),
                group=None if self.groups is None else str(self.groups[place]),
                role=None if self.roles is None else self.roles[place],
                label=None if self.sample_labels is None else self.sample_labels[place],
                **media,
            )
            samples.append(StoredSample(conversation, end - start))
        return samples


class TokensCodec(Codec):
    """Codec of the token ids, boundaries and labels of a row; conversations have `input_ids` and `labels`."""

    sample_class = "PackedTokensSample"
    flavor_class = "PackedTokensSample"
    flavor_module = "energon_packed.flavors.packed_tokens"
    stores_tokens = True
    lengths_part = "cu_seqlens.npy"

    def matches(self, raw: RawPack) -> bool:
        """Return whether the pack has input_ids.npy."""
        return "input_ids.npy" in raw

    def write(self, samples: Sequence[StoredSample]) -> list[Part]:
        """Convert the samples of one pack to its parts."""
        conversations = [sample.conversation for sample in samples]
        parts, media = write_media(conversations)
        rows = [_tokens(conversation) for conversation in conversations]
        input_ids = np.concatenate([ids for ids, _, _ in rows])
        labels = np.concatenate([labels for _, labels, _ in rows])
        spans = None
        if any([weights is not None for _, _, weights in rows]):
            filled = [np.ones(len(ids), np.float32) if weights is None else weights for ids, _, weights in rows]
            spans = weighted_spans(labels, np.concatenate(filled))
        own = [(c.columns, len(ids)) for c, (ids, _, _) in zip(conversations, rows, strict=True)]
        columns = (join_columns(own) or {}).items()
        value: dict[str, Any] = {
            "sample_count": len(samples),
            "ids": [c.id for c in conversations],
            "images": media["images"],
            **optional(media),
        }
        value |= _of_samples(conversations)
        # Labels repeat the ids, so a few spans replace 4 bytes per token. Records with custom labels need the array.
        supervised = labels != _IGNORE
        targets: list[Part] = []
        is_copy = bool((labels[supervised] == input_ids[supervised]).all())
        if not is_copy:
            targets.append(("labels.npy", _dump(labels)))
        if spans is not None:
            # In place of loss_spans, which would repeat its spans without their weights.
            targets.append(("weighted_spans.npy", _dump(spans, _WEIGHTED_SPAN)))
        elif is_copy:
            targets.append(("loss_spans.npy", _dump(spans_from_mask(supervised))))
        return [
            ("input_ids.npy", _dump(input_ids)),
            ("cu_seqlens.npy", _dump(cu_seqlens_from_lengths([len(ids) for ids, _, _ in rows]))),
            *targets,
            *[_column_part(name, column) for name, column in columns],
            ("json", write_json(value)),
            *parts,
        ]

    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples, which are tokenized."""
        return self.read_row(raw).samples()

    def read_row(self, raw: RawPack) -> TokenRow:
        """Read the columns of a pack.

        Raises:
            FormatError: a part is missing or damaged.
        """
        value = read_json(raw)
        input_ids = _load(raw, "input_ids.npy")
        weights = None
        if "weighted_spans.npy" in raw:
            weights = np.zeros(len(input_ids), dtype=np.float32)
            for start, end, weight in _load(raw, "weighted_spans.npy", _WEIGHTED_SPAN).tolist():
                if not (weight and is_loss_weight(weight)):
                    raise FormatError(f"{raw.get('__key__')}.weighted_spans.npy has the loss weight {weight:g}")
                weights[start:end] = weight
        if "labels.npy" in raw:
            labels = _load(raw, "labels.npy")
        elif weights is not None:
            labels = np.where(weights > 0, input_ids, np.int32(_IGNORE))
        else:
            labels = np.full_like(input_ids, _IGNORE)
            for start, end in _load(raw, "loss_spans.npy").tolist():
                labels[start:end] = input_ids[start:end]
        media = read_media(raw, value)
        of_samples = {}
        if not value.keys().isdisjoint(_OF_SAMPLES):
            of_samples = _read_of_samples(value, len(value["ids"]))
        columns = _columns(raw, len(input_ids))
        return TokenRow(
            value["ids"], input_ids, labels, _load(raw, "cu_seqlens.npy"), weights, columns, media, **of_samples
        )

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return the tokens of each sample, from the boundaries."""
        return [int(length) for length in np.diff(_load(raw, self.lengths_part))]

    def part_filter(self, part: str) -> bool:
        """Return whether a part is an array of the row, the json or a media file."""
        return part in _ARRAYS or part.startswith(_COLUMN) or super().part_filter(part)


def _of_samples(conversations: Sequence[Conversation]) -> dict[str, list[Any]]:
    """Groups, roles and labels of the samples of a pack, as in its json; only those that a sample has."""
    values: dict[str, list[Any]] = {}
    if any([conversation.group is not None for conversation in conversations]):
        # A sample without a group has an index that no other sample has.
        keys = [place if own.group is None else own.group for place, own in enumerate(conversations)]
        index = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        values["groups"] = [index[key] for key in keys]
    if any([conversation.role is not None for conversation in conversations]):
        values["roles"] = [conversation.role for conversation in conversations]
    if any([conversation.label is not None for conversation in conversations]):
        values["labels"] = [None if own.label is None else list(own.label) for own in conversations]
    return values


def _read_of_samples(value: dict[str, Any], count: int) -> dict[str, Any]:
    """Read groups, roles and labels of `count` samples, by the names in TokenRow.

    Raises:
        ValueError: a list has another length, or values of another type.
    """
    read: dict[str, Any] = {}
    for name, (attribute, types) in _OF_SAMPLES.items():
        values = value.get(name)
        if values is None:
            continue
        if len(values) != count or not all(isinstance(entry, types) for entry in values):
            raise ValueError(f"{name} of the json must be a list with a value for each of {count} samples")
        read[attribute] = values
    if "sample_labels" in read:
        read["sample_labels"] = [None if own is None else tuple(map(float, own)) for own in read["sample_labels"]]
    return read


def spans_from_mask(mask: npt.NDArray[np.bool_]) -> Int32:
    """Return the runs of True as [start, end): int32 (K, 2)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return edges.reshape(-1, 2).astype(np.int32)


def weighted_spans(labels: npt.NDArray[Any], weights: Float32) -> npt.NDArray[np.void] | None:
    """Return the runs of targets of equal loss weight, (K,) of (start, end, weight); None if all weights are 1.

    Args:
        labels: int64 (T,), -100 for tokens that are not supervised.
        weights: float32 (T,), loss weight of each token.
    """
    is_target = labels != _IGNORE
    if (weights[is_target] == 1).all():
        return None
    weights = np.where(is_target, weights, np.float32(0))
    edges = np.flatnonzero(np.diff(weights, prepend=np.nan, append=np.nan))
    spans = np.zeros(len(edges) - 1, dtype=_WEIGHTED_SPAN)
    spans["start"], spans["end"], spans["weight"] = edges[:-1], edges[1:], weights[edges[:-1]]
    return spans[spans["weight"] > 0]


def _tokens(conversation: Conversation) -> tuple[Any, Any, Float32 | None]:
    ids, labels, weights = conversation.input_ids, conversation.labels, conversation.loss_weights
    assert ids is not None, "PackedTokensSample is written from tokenized conversations"
    if conversation.weight != 1:
        weights = np.full(len(ids), conversation.weight, np.float32) * (1 if weights is None else weights)
    return ids, ids if labels is None else labels, weights


def _dump(array: npt.NDArray[Any], dtype: npt.DTypeLike = "<i4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(array, dtype=dtype), version=(1, 0), allow_pickle=False)
    return out.getvalue()


@lru_cache(maxsize=4096)
def _shape(header: bytes) -> tuple[int, ...]:
    """Parse the shape in a header that starts with `_OWN_HEADER`."""
    size = len(_OWN_HEADER)
    return tuple([int(number) for number in header[size : header.index(b")", size)].split(b",") if number.strip()])


def _column_part(name: str, column: Column) -> Part:
    """The part of a column; k values per token are compressed, as the ids of a teacher repeat."""
    content = _dump(column, column.dtype.newbyteorder("<"))
    if column.ndim == 1:
        return f"{_COLUMN}{name}.npy", content
    import pyarrow as pa

    return f"{_COLUMN}{name}.npy{_COMPRESSED}", pa.Codec("zstd", compression_level=3).compress(content, asbytes=True)


def _decompressed(value: Any) -> bytes:
    """Decompress a part.

    Raises:
        OSError, ValueError: it is damaged, or has more than 2 GiB.
    """
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(bytes(value)), "zstd") as stream:
        content: bytes = stream.read(_MOST_DECOMPRESSED + 1)
    if len(content) > _MOST_DECOMPRESSED:
        raise ValueError(f"a column must have at most {_MOST_DECOMPRESSED} bytes")
    return content


def _columns(raw: RawPack, tokens: int) -> dict[str, Column] | None:
    """Read the columns of a row of T tokens; None without columns."""
    columns = {}
    for part, value in raw.items():
        if not part.startswith(_COLUMN):
            continue
        if not isinstance(value, np.ndarray):
            try:
                value = _array(_decompressed(value) if part.endswith(_COMPRESSED) else bytes(value))
            except (ValueError, MemoryError, OverflowError, OSError) as error:
                raise FormatError(f"{raw.get('__key__')}.{part}: {error}") from error
        columns[part.removeprefix(_COLUMN).removesuffix(_COMPRESSED).removesuffix(".npy")] = value
    if not columns:
        return None
    try:
        check_columns(columns, tokens)
    except RecordError as error:
        raise FormatError(f"{raw.get('__key__')}: {error.reject.detail}") from error
    return dict(sorted(columns.items()))


def _array(value: bytes) -> Column:
    """Parse a .npy; its header is parsed once for all of the same dtype and shape."""
    if value[:10] != _OWN_HEADER[:10]:  # another version, or a longer header
        return np.asarray(np.lib.format.read_array(io.BytesIO(value), allow_pickle=False))
    shape, dtype = _parsed(value[:_HEADER_SIZE])
    return np.frombuffer(value, dtype=dtype, offset=_HEADER_SIZE, count=math.prod(shape)).reshape(shape)


@lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Parse the header of a .npy in C order."""
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(header[8:]))
    if is_fortran or dtype.hasobject:
        raise ValueError("a column must be an array of numbers in C order")
    return shape, dtype


def _load(raw: RawPack, name: str, dtype: npt.DTypeLike = np.int32) -> npt.NDArray[Any]:
    value = raw.get(name)
    if isinstance(value, np.ndarray):  # a decoder has parsed the part
        return value.astype(dtype)
    if value is None:
        raise FormatError(f"{raw.get('__key__')} has no {name}; is this a PackedTokensSample?")
    try:
        if value.startswith(_OWN_HEADER):
            # Ten times as fast as numpy, which parses the header as Python code; a pack has three arrays.
            shape = _shape(bytes(value[:_HEADER_SIZE]))
            if len(value) - _HEADER_SIZE == 4 * math.prod(shape):
                return np.frombuffer(value, dtype="<i4", offset=_HEADER_SIZE).reshape(shape)
        return np.asarray(np.lib.format.read_array(io.BytesIO(value), allow_pickle=False), dtype=dtype)
    except (ValueError, MemoryError, OverflowError) as error:
        raise FormatError(f"{raw.get('__key__')}.{name}: {error}") from error
