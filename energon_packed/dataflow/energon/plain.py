"""Energon's loader states as nested dicts, lists, numbers and strings: what JSON holds.

The states are dataclasses, tuples, arrays and dicts of them; each that JSON has no form for becomes
`{"type": name, ...}`.
"""

import base64
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

from energon_packed.errors import BatchError

_TYPE = "type"
_DATACLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState, SliceState, SystemRngState)
}


def to_plain(value: Any) -> Any:
    """The plain form of a state.

    Raises:
        BatchError: it holds a type that is not known.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    if _DATACLASSES.get(name) is type(value):
        return {_TYPE: name, "fields": {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, dict):  # keys may be numbers
        kind = "FlexState" if isinstance(value, FlexState) else "dict"
        return {_TYPE: kind, "items": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if type(value) is list:
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TYPE: "tuple", "items": [to_plain(item) for item in value]}
    if isinstance(value, torch.Tensor):
        return {_TYPE: "tensor", "array": to_plain(value.numpy())}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TYPE: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return to_plain(value.item())
    raise BatchError(f"the state of Energon's loader holds a {name}, which this release cannot save; report it")


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_TYPE]
    if kind in _DATACLASSES:
        return _DATACLASSES[kind](**{name: from_plain(item) for name, item in value["fields"].items()})
    if kind in ("dict", "FlexState"):
        pairs = {from_plain(key): from_plain(item) for key, item in value["items"]}
        return FlexState(pairs) if kind == "FlexState" else pairs
    if kind == "tuple":
        return tuple(from_plain(item) for item in value["items"])
    if kind == "tensor":
        return torch.from_numpy(from_plain(value["array"]))
    if kind == "ndarray":
        data = base64.b64decode(value["data"])
        return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
    if kind == "bytes":
        return base64.b64decode(value["data"])
    raise BatchError(f"the saved state holds the unknown type {kind!r}; was it saved by a newer release?")
