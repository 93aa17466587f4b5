"""Codec of PackedTokensSample: tokenized samples to the parts of a pack, and back.

{key}.input_ids.npy    int32 (T,), images as runs of the image token
{key}.cu_seqlens.npy   int32 (S+1,)
{key}.loss_spans.npy   int32 (K, 2): tokens [start, end) of the row that are supervised
{key}.labels.npy       int32 (T,), in place of loss_spans if a label differs from its token
{key}.json             sample_count, ids, images, and patch_positions if present
{key}.img{i}_{j}.{ext}, {key}.img{i}_{j}.npy   as in PackedCaptioningSample
"""

import io
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import FormatError
from energon_packed.formats.codec import Codec, Part, RawPack, StoredSample, byte_references, media_references
from energon_packed.formats.parts import has_value, read_files, read_images, read_json, write_json, write_media
from energon_packed.records import Conversation
from energon_packed.seqlens import cu_seqlens_from_lengths

Int32 = npt.NDArray[np.int32]
# .npy 1.0 of int32: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
_OWN_HEADER = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i4', 'fortran_order': False, 'shape': ("
_HEADER_SIZE = 128  # 10 bytes of magic, version and length, then 0x76 = 118 bytes
_ARRAYS = ("input_ids.npy", "cu_seqlens.npy", "loss_spans.npy", "labels.npy")
_IGNORE = -100  # label of a token that is not a target, as torch.nn.CrossEntropyLoss ignores it


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
        media, images, positions = write_media(samples)
        rows = [_tokens(sample.conversation) for sample in samples]
        input_ids = np.concatenate([ids for ids, _ in rows])
        labels = np.concatenate([labels for _, labels in rows])
        value: dict[str, Any] = {
            "sample_count": len(samples),
            "ids": [sample.conversation.id for sample in samples],
            "images": images,
        }
        if has_value(positions):
            value["patch_positions"] = positions
        # Labels repeat the ids, so a few spans replace 4 bytes per token. Records with custom labels need the array.
        supervised = labels != _IGNORE
        if (labels[supervised] == input_ids[supervised]).all():
            target: Part = ("loss_spans.npy", _dump(spans_from_mask(supervised)))
        else:
            target = ("labels.npy", _dump(labels))
        return [
            ("input_ids.npy", _dump(input_ids)),
            ("cu_seqlens.npy", _dump(cu_seqlens_from_lengths([len(ids) for ids, _ in rows]))),
            target,
            ("json", write_json(value)),
            *media,
        ]

    def read(self, raw: RawPack) -> list[StoredSample]:
        """Convert the parts of one pack to its samples, which are tokenized."""
        return self.samples(self.fields(raw))

    def samples(self, fields: Mapping[str, Any]) -> list[StoredSample]:
        """Return the samples of a row as `fields` returns it."""
        samples = []
        for i, (start, end) in enumerate(pairwise(fields["cu_seqlens"].tolist())):
            images = fields["images"][i]
            positions = fields["patch_positions"][i] if fields["patch_positions"] else ()
            conversation = Conversation(
                id=fields["ids"][i],
                input_ids=fields["input_ids"][start:end].astype(np.int64),
                labels=fields["labels"][start:end].astype(np.int64),
                images=media_references(images),
                patch_positions=byte_references(positions),
            )
            samples.append(
                StoredSample(conversation=conversation, length=end - start, images=images, patch_positions=positions)
            )
        return samples

    def fields(self, raw: RawPack) -> dict[str, Any]:
        """Return the int32 arrays of the row, `images` as StoredImage, bytes of .npy files, and ids."""
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
            "images": read_images(raw, value["images"]),
            "patch_positions": read_files(raw, value["patch_positions"]) if value.get("patch_positions") else None,
            "ids": value["ids"],
        }

    def lengths(self, raw: RawPack) -> list[int | None]:
        """Return the tokens of each sample, from the boundaries."""
        return [int(length) for length in np.diff(_load(raw, self.lengths_part))]

    def part_filter(self, part: str) -> bool:
        """Return whether a part is an array of the row, the json or a media file."""
        return part in _ARRAYS or super().part_filter(part)


def spans_from_mask(mask: npt.NDArray[np.bool_]) -> Int32:
    """Return the runs of True as [start, end): int32 (K, 2)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return edges.reshape(-1, 2).astype(np.int32)


def _tokens(conversation: Conversation) -> tuple[Any, Any]:
    ids, labels = conversation.input_ids, conversation.labels
    assert ids is not None, "PackedTokensSample is written from tokenized conversations"
    return ids, ids if labels is None else labels


def _dump(array: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(array, dtype="<i4"), version=(1, 0), allow_pickle=False)
    return out.getvalue()


@lru_cache(maxsize=4096)
def _shape(header: bytes) -> tuple[int, ...]:
    """Parse the shape in a header that starts with `_OWN_HEADER`."""
    size = len(_OWN_HEADER)
    return tuple([int(number) for number in header[size : header.index(b")", size)].split(b",") if number.strip()])


def _load(raw: RawPack, name: str) -> Int32:
    value = raw.get(name)
    if isinstance(value, np.ndarray):  # a decoder has parsed the part
        return value.astype(np.int32)
    if value is None:
        raise FormatError(f"{raw.get('__key__')} has no {name}; is this a PackedTokensSample?")
    try:
        if value.startswith(_OWN_HEADER):
            # Ten times as fast as numpy, which parses the header as Python code; a pack has three arrays.
            shape = _shape(bytes(value[:_HEADER_SIZE]))
            if len(value) - _HEADER_SIZE == 4 * math.prod(shape):
                return np.frombuffer(value, dtype="<i4", offset=_HEADER_SIZE).reshape(shape)
        return np.asarray(np.lib.format.read_array(io.BytesIO(value), allow_pickle=False), dtype=np.int32)
    except (ValueError, MemoryError, OverflowError) as error:
        raise FormatError(f"{raw.get('__key__')}.{name}: {error}") from error
