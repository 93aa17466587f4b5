"""The compact form in which a PackedBatch travels between processes (transport.py): a tenth of its bytes, lossless.

    input_ids     int64 (1, T)    uint16 or int32, where they hold it; other large int64 tensors likewise
    labels        int64 (1, T)    bits of the targets, where each target is the id
    loss_mask     float32 (1, T)  nothing, where it is 1 at the targets
    position_ids  int64 (1, T)    nothing, where they restart at the boundaries
    other tensors of up to 1 MiB  bytes, with shape and type

Where a tensor does not follow, byte for byte, it is sent like any other.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.encoding import IGNORE_INDEX
from energon_packed.seqlens import position_ids_from_cu_seqlens

_LARGE = 1 << 20  # bytes of a tensor from which on shared memory is cheaper
_WORTH = 1 << 10  # integers from which on a narrower form is
_FIELDS = tuple(one.name for one in fields(PackedBatch))
Array = npt.NDArray[Any]


def encode_batch(batch: Any, objects: list[Any], alone: int = 0) -> tuple[Any, int]:
    """(compact form, bytes) of a batch.

    Args:
        batch: a PackedBatch, None, or what a collator of its user made, of which nothing is known.
        objects: large tensors and unknown batches are added to it; the form has their numbers.
        alone: bytes that an unknown batch counts for.
    """
    if batch is None:
        return None, 0
    if type(batch) is not PackedBatch or batch.__dict__:
        objects.append(batch)
        return len(objects) - 1, alone
    plain: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    first = len(objects)
    for name in _FIELDS:
        value = getattr(batch, name)
        if not isinstance(value, torch.Tensor):
            plain[name] = value
        elif (array := _array(value)) is not None:
            arrays[name] = array
        else:
            forms[name] = _object(value, objects)
    forms |= _row_forms(arrays)
    for name, array in arrays.items():
        if name not in forms:
            forms[name] = _form(array)
    parts = list(forms.values())
    if (inputs := plain["vision_inputs"]) is not None:
        plain["vision_inputs"] = {name: _sent(one, objects) for name, one in inputs.items()}
        parts += plain["vision_inputs"].values()
    size = sum([len(one[-1]) for one in parts if type(one) is tuple]) + sum([one.nbytes for one in objects[first:]])
    return (plain, forms), size


def decode_batch(sent: Any, objects: list[Any]) -> Any:
    """The inverse of `encode_batch`."""
    if sent is None:
        return None
    if isinstance(sent, int):
        return objects[sent]
    plain, forms = sent
    batch = object.__new__(PackedBatch)
    for name, value in plain.items():
        setattr(batch, name, value)
    if batch.vision_inputs is not None:
        batch.vision_inputs = {name: _tensor(form, objects) for name, form in batch.vision_inputs.items()}
    for name, form in forms.items():
        if type(form) is tuple or type(form) is int:
            setattr(batch, name, _tensor(form, objects))
    _follow(batch, forms)
    return batch


def _row_forms(arrays: dict[str, Array]) -> dict[str, Any]:
    """Targets as bits in place of labels, where these are ids; True for weights and positions that follow."""
    ids, labels = arrays.get("input_ids"), arrays.get("labels")
    if ids is None or labels is None or not (_is_row(ids, labels.shape) and labels.dtype == np.int64):
        return {}
    targets = labels != IGNORE_INDEX
    if not ((labels == ids) | ~targets).all():
        return {}
    forms: dict[str, Any] = {"labels": np.packbits(targets).tobytes()}
    weights, positions = arrays.get("loss_mask"), arrays.get("position_ids")
    is_mask = weights is not None and weights.dtype == np.float32 and weights.shape == ids.shape
    if weights is not None and is_mask and weights.tobytes() == targets.astype(np.float32).tobytes():
        forms["loss_mask"] = True
    if positions is not None and _is_row(positions, ids.shape):
        bounds = arrays.get("cu_seqlens_padded", arrays.get("cu_seqlens"))
        forms["position_ids"] = _are_of(positions, bounds) or _form(positions)
    return forms


def _follow(batch: PackedBatch, forms: dict[str, Any]) -> None:
    """Set what `_row_forms` found to follow from the tensors that `batch` has."""
    bits = forms["labels"]
    if type(bits) is not bytes:
        return
    ids = batch.input_ids.numpy()
    targets = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=ids.size).view(np.bool_)[None]
    batch.labels = torch.from_numpy(np.where(targets, ids, IGNORE_INDEX))
    if forms["loss_mask"] is True:
        batch.loss_mask = torch.from_numpy(targets.astype(np.float32))
    if forms["position_ids"] is True:
        bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
        batch.position_ids = torch.from_numpy(position_ids_from_cu_seqlens(bounds.numpy())[None])


def _is_row(array: Array, shape: tuple[int, ...]) -> bool:
    return array.dtype == np.int64 and array.shape == shape and len(shape) == 2 and shape[0] == 1 and shape[1] > 0


def _are_of(positions: Array, bounds: Array | None) -> bool:
    """Whether positions (1, T) follow from boundaries."""
    if bounds is None or bounds.ndim != 1 or not bounds.size or bounds[-1] != positions.size:
        return False
    if not (bounds[1:] >= bounds[:-1]).all():
        return False
    return positions.tobytes() == position_ids_from_cu_seqlens(bounds).tobytes()


def _array(tensor: torch.Tensor) -> Array | None:
    """The array of a small tensor; None for one that torch sends itself."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # on a device, with a gradient, or bfloat16
        return None
    return array if array.nbytes <= _LARGE else None


def _form(array: Array) -> tuple[Any, ...]:
    """(shape, type, type to send it in, bytes): int64 in the narrowest of uint16, int32 and int64 that holds it."""
    sent = array
    if array.dtype == np.int64 and array.size >= _WORTH:
        highest = array.view(np.uint64).max()  # a negative number is a high one
        if highest < 1 << 31:
            sent = array.astype(np.uint16 if highest < 1 << 16 else np.int32)
    return array.shape, array.dtype.char, sent.dtype.char, sent.tobytes()


def _object(tensor: torch.Tensor, objects: list[Any]) -> int:
    objects.append(tensor)
    return len(objects) - 1


def _sent(tensor: torch.Tensor, objects: list[Any]) -> Any:
    """A form, or a number in `objects`."""
    array = _array(tensor)
    return _object(tensor, objects) if array is None else _form(array)


def _tensor(form: Any, objects: list[Any]) -> torch.Tensor:
    """The inverse of `_sent`."""
    if type(form) is int:
        tensor: torch.Tensor = objects[form]
        return tensor
    shape, kind, sent, raw = form
    return torch.from_numpy(np.ndarray(shape, dtype=sent, buffer=raw).astype(kind))
