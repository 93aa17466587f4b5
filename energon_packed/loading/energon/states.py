"""States of Energon's datasets: Energon's dataclasses, tuples and arrays to plain values, and back.

| function | input and output |
|---|---|
| to_plain, from_plain | values of Energon to JSON-like dicts, lists, numbers, strings, and back |
| dataset_fingerprint | `config()` of an Energon dataset to a digest of its data |
"""

import base64
import hashlib
import json
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.state import FlexState

from energon_packed.errors import BatchError
from energon_packed.libraries import ENERGON, changed
from energon_packed.shards import PackingManifest
from energon_packed.storage import as_path

_TYPE = "type"
_PACKING = "packing"  # key of the shard hashes that are added to a folder in Energon's `config()`
_DATACLASSES: dict[str, Any] = {kind.__name__: kind for kind in (SliceState, SystemRngState)}
# Entries of Energon's `config()` that differ between ranks, or name functions.
_NOT_DATA = (
    "worker_config",
    "slice_offsets",
    "len",
    "batcher",
    "map_fn",
    "pre_packer",
    "final_packer",
    "sample_loader",
)


def dataset_fingerprint(config: dict[str, Any]) -> str:
    """Return the digest of an Energon dataset's `config()`, without functions, ranks and paths.

    A folder with a packing.json counts by its content, so a copy in another folder is the same data.

    Raises:
        ConfigError: this release of Energon describes no folder in `config()`.
    """
    described = json.dumps(_data_only(config), sort_keys=True, default=str)
    if f'"{_PACKING}":' not in described:
        raise changed(ENERGON, "in which config() of a dataset has no `shards` and `_path`")
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _data_only(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _data_only(v) for k, v in value.items() if not k.startswith("_") and k not in _NOT_DATA}
        if "shards" in value and "_path" in value:
            kept[_PACKING] = _packing(value["_path"])
        return kept
    return [_data_only(item) for item in value] if isinstance(value, list | tuple) else value


def _packing(path: str) -> list[str] | None:
    """Return the hashes of all shards: input and options alone do not show which images existed."""
    manifest = PackingManifest.load_if_there(as_path(path))
    return None if manifest is None else [shard.sha256 for shard in manifest.shards]


def to_plain(value: Any) -> Any:
    """Convert a state to plain values; types that JSON does not have become `{"type": name, ...}`.

    Raises:
        BatchError: the state has an unknown type.
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
    raise BatchError(f"the state of Energon's loader has a {name}, which this release cannot save. Report it.")


def from_plain(value: Any) -> Any:
    """Convert the result of `to_plain` back."""
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
    raise BatchError(f"the saved state has the unknown type {kind!r}. Load it with the release that saved it.")
