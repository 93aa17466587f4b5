"""Energon's loader states in plain types, so that `torch.load` reads them as it reads weights: no class is pickled.

The states are dataclasses and dictionaries of them; each becomes `{"energon": name, ...fields}`.
"""

from dataclasses import fields
from typing import Any

import numpy as np
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

_TAG = "energon"
_DATACLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState, SliceState, SystemRngState)
}


def to_plain(value: Any) -> Any:
    """Dictionaries, lists, tuples, numbers, texts, bytes and tensors; what else there may be stays as it is."""
    name = type(value).__name__
    if _DATACLASSES.get(name) is type(value):
        return {_TAG: name, **{field.name: to_plain(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, FlexState):
        return {_TAG: "FlexState", **{key: to_plain(item) for key, item in value.items()}}
    if isinstance(value, np.ndarray):
        return {_TAG: "ndarray", "dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if type(value) is dict:
        return {key: to_plain(item) for key, item in value.items()}
    return type(value)(map(to_plain, value)) if type(value) in (list, tuple) else value


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if type(value) in (list, tuple):
        return type(value)(map(from_plain, value))
    if type(value) is not dict:
        return value
    if value.get(_TAG) == "ndarray":
        return np.frombuffer(value["data"], dtype=value["dtype"]).reshape(value["shape"]).copy()
    inside = {key: from_plain(item) for key, item in value.items() if key != _TAG}
    if _TAG not in value:
        return inside
    return FlexState(inside) if value[_TAG] == "FlexState" else _DATACLASSES[value[_TAG]](**inside)
