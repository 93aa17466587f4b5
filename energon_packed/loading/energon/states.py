"""States of Energon's datasets to plain values; loader states to files, and to another number of ranks.

| function | input and output |
|---|---|
| to_plain, from_plain | Energon's dataclasses, tuples, arrays to JSON-like dicts, lists, numbers, strings, and back |
| dataset_fingerprint | `config()` of an Energon dataset to a digest of its data |
| read_state, write_state | a file with a state, alone or in Megatron's dict; reading executes no code |
| redistribute | states of all ranks to states of another number of ranks |

A stream has a shard for each worker of each rank, numbered rank by rank. As long as the number of all workers stays
the same, each shard moves to the worker of its index:

    4 ranks, 1 worker each   0 | 1 | 2 | 3
    2 ranks, 2 workers each  0   1 | 2   3
"""

import base64
import hashlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.state import FlexState

from energon_packed.errors import BatchError
from energon_packed.libraries import ENERGON, changed
from energon_packed.loading.dataflow.steps import in_one_epoch, regrouped
from energon_packed.loading.monitoring.order_log import merged
from energon_packed.loading.state import check_identity, check_state
from energon_packed.shards import PackingManifest
from energon_packed.storage import as_path

MEGATRON_KEY = "dataloader_state_dict"
"""Key of the state in `train_dataloader_dprank000.pt` of Megatron-LM and Megatron-Bridge."""
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


class StateFile(NamedTuple):
    """Content of a state file.

    Attributes:
        state: state of a loader of a rank.
        megatron: whether the state is in Megatron's dict.
    """

    state: dict[str, Any]
    megatron: bool


def read_state(file: Path) -> StateFile:
    """Read a state file.

    Raises:
        BatchError: the file is damaged, or has no state of this package; the message starts with its path.
    """
    try:
        # `weights_only`: checkpoints are untrusted files, and unpickling would execute code.
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BatchError(
            f"{file} contains Python objects, as Energon's own loader saves them, and not the plain dict that a "
            "loader of energon-packed saves. Continue with the loader that saved it, or start without the state."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BatchError(f"{file} is damaged ({reason}). Use an earlier checkpoint.") from error
    megatron = isinstance(content, dict) and MEGATRON_KEY in content
    state = content[MEGATRON_KEY] if megatron else content
    if not isinstance(state, dict) or "version" not in state:
        raise BatchError(f"{file} has no state of a loader of energon-packed. Pass the file that Megatron saved.")
    return StateFile(state, megatron)


def write_state(file: Path, content: StateFile) -> None:
    """Write a state file; the file appears under its name when it is complete."""
    partial = file.with_name(file.name + ".partial")
    torch.save({MEGATRON_KEY: content.state} if content.megatron else content.state, partial)
    partial.replace(file)


def redistribute(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return states of `world_size` ranks that resume after the batches of `states`.

    Args:
        states: states of all ranks of a DataflowLoader over a stream, at the same step, in any order.
        world_size: number of data-parallel ranks to continue with.

    Returns:
        one state for each rank; each rank must run with its `num_workers`.

    Raises:
        BatchError: the states are of different runs or epochs, a rank is missing, or the workers cannot be divided by
            `world_size`.
    """
    if world_size < 1:
        raise BatchError(f"`world_size` must be at least 1, got {world_size}.")
    ordered = in_one_epoch(_of_one_run(states))
    workers = int(ordered[0]["num_workers"])
    total = workers * len(ordered)
    if total % world_size:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        raise BatchError(
            f"`world_size` must divide the {total} workers of {len(ordered)} ranks x {workers} workers, got "
            f"{world_size}. Use one of {', '.join(map(str, fitting))} ranks."
        )
    of_rank = total // world_size
    return [
        regrouped(ordered, range(rank * of_rank, (rank + 1) * of_rank), total)
        | {"world_size": world_size, "rank": rank}
        | merged(ordered)
        for rank in range(world_size)
    ]


def _of_one_run(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states in the order of ranks.

    Raises:
        BatchError: a state is of another release or run, or a rank is missing or repeated.
    """
    if not states:
        raise BatchError("`states` must have at least one state, got an empty list.")
    for state in states:
        check_state(state, "DataflowLoader")
        if "rank" not in state:
            raise BatchError("The state is the same on all ranks, and continues with any number of ranks. Copy it.")
        shared = ("world_size", "num_workers")
        now, saved = ({name: each[name] for name in shared} | each["identity"] for each in (states[0], state))
        check_identity(saved, now)
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(states[0]["world_size"])):
        raise BatchError(
            f"the states must be of {states[0]['world_size']} ranks, one of each, got ranks "
            f"{', '.join(map(str, ranks))}. Pass the states of all ranks."
        )
    return sorted(states, key=lambda state: int(state["rank"]))
