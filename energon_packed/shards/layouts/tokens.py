"""PackedTokensSample: a pack that was tokenized offline.

{key}.input_ids.npy    int32 (T,), images as runs of the image token
{key}.cu_seqlens.npy   int32 (S+1,)
{key}.loss_spans.npy   int32 (K, 2): tokens [start, end) of the row that are supervised
{key}.labels.npy       int32 (T,), instead of loss_spans, where a label differs from its token
{key}.json             sample_count, ids, images, and patch_positions when given
{key}.img{i}_{j}.{ext}, {key}.img{i}_{j}.npy   as in PackedCaptioningSample
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.conversation import Conversation
from energon_packed.errors import FormatError
from energon_packed.seqlens import cu_seqlens_from_lengths
from energon_packed.shards.layouts.base import (
    Layout,
    StoredSample,
    any_given,
    dump_json,
    media_parts,
    read_json,
    read_media,
)
from energon_packed.shards.tar import Part

Int32 = npt.NDArray[np.int32]
_IGNORE = -100
_HEADER_SIZE = 128
# .npy 1.0 of int32 with its header padded to 128 bytes: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
_OUR_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00\x76\x00\{'descr': '<i4', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n"
)


def check(conversation: Conversation) -> None:
    """Every conversation fits."""


def write(samples: Sequence[StoredSample], truncate: int | None) -> list[Part]:
    """Parts of one pack; samples carry their tokens."""
    media, images, positions = media_parts(samples)
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    assert len(tokens) == len(samples), "PackedTokensSample needs encoded samples"
    input_ids = np.concatenate([t.input_ids for t in tokens])
    labels = np.concatenate([t.labels for t in tokens])
    value: dict[str, Any] = {
        "sample_count": len(samples),
        "ids": [sample.conversation.id for sample in samples],
        "images": images,
    }
    if any_given(positions):
        value["patch_positions"] = positions
    supervised = labels != _IGNORE
    if (labels[supervised] == input_ids[supervised]).all():
        target: Part = ("loss_spans.npy", _dump(spans_from_mask(supervised)))
    else:
        target = ("labels.npy", _dump(labels))
    return [
        ("input_ids.npy", _dump(input_ids)),
        ("cu_seqlens.npy", _dump(cu_seqlens_from_lengths([len(t.input_ids) for t in tokens]))),
        target,
        ("json", dump_json(value)),
        *media,
    ]


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a PackedTokensSample."""
    value = read_json(raw)
    input_ids = _load(raw, "input_ids.npy")
    if "labels.npy" in raw:
        labels = _load(raw, "labels.npy")
    else:
        labels = np.full_like(input_ids, _IGNORE)
        for start, end in _load(raw, "loss_spans.npy").tolist():
            labels[start:end] = input_ids[start:end]
    return {
        "input_ids": input_ids,
        "labels": labels,
        "cu_seqlens": _load(raw, "cu_seqlens.npy"),
        "images": read_media(raw, value["images"]),
        "patch_positions": read_media(raw, value["patch_positions"]) if value.get("patch_positions") else None,
        "ids": value["ids"],
    }


def spans_from_mask(mask: npt.NDArray[np.bool_]) -> Int32:
    """Runs of True as [start, end): int32 (K, 2)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return edges.reshape(-1, 2).astype(np.int32)


def _dump(array: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(array, dtype="<i4"), version=(1, 0), allow_pickle=False)
    return out.getvalue()


def _load(raw: Mapping[str, Any], name: str) -> Int32:
    value = raw.get(name)
    if isinstance(value, np.ndarray):  # a decoder was there first
        return value.astype(np.int32)
    if value is None:
        raise FormatError(f"{raw.get('__key__')} has no {name}; is this a PackedTokensSample?")
    try:
        header = _OUR_HEADER.match(value)
        if header and header.end() == _HEADER_SIZE:  # ten times as fast as numpy, which parses it as Python
            shape = [int(size) for size in header[1].split(b",") if size.strip()]
            return np.frombuffer(value, dtype="<i4", count=math.prod(shape), offset=_HEADER_SIZE).reshape(shape)
        array = np.lib.format.read_array(io.BytesIO(value), allow_pickle=False)
    except ValueError as error:
        raise FormatError(f"{raw.get('__key__')}.{name}: {error}") from error
    return np.asarray(array, dtype=np.int32)


PACKED = Layout(
    sample_class="PackedTokensSample",
    loader_module="energon_packed.flavors.packed_tokens",
    check=check,
    write=write,
    read=read,
    stores_tokens=True,
)
