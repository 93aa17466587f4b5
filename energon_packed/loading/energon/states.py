"""The fingerprint of what an Energon loader reads, for its states.

Energon's loader states as nested dicts, lists, numbers and strings: what JSON holds.

The states are dataclasses, tuples, arrays and dicts of them; each that JSON has no form for becomes
`{"type": name, ...}`.

Files with a loader state: the state, or Megatron's dict around it, by `torch.save`. Nothing in one is executed.

States of a loader for another number of ranks.

Energon deals shards to `world_size * num_workers` workers, numbered rank by rank. As long as that product stays the
same, each worker reads the same packs, so its state is simply handed to the rank that it now belongs to:

    4 ranks, 1 worker each   0 | 1 | 2 | 3
    2 ranks, 2 workers each  0   1 | 2   3

Every worker resumes where it stopped. Each new rank takes its next batch from its first worker, as after
`energon checkpoint redist`, so batches of different workers may come in another order than without the change.
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
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

from energon_packed.errors import BatchError
from energon_packed.loading.state import check_identity, check_state
from energon_packed.shards import PackingManifest

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
    """Digest of an Energon dataset's `config()` without the names of functions, ranks and places.

    A folder counts by its content where it has a packing.json, so a copy elsewhere is the same data.
    """
    return hashlib.sha256(json.dumps(_data_only(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _data_only(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _data_only(v) for k, v in value.items() if not k.startswith("_") and k not in _NOT_DATA}
        if "shards" in value and "_path" in value:
            kept["packing"] = _packing(value["_path"])
        return kept
    return [_data_only(item) for item in value] if isinstance(value, list | tuple) else value


def _packing(path: str) -> list[str] | None:
    """The hashes of all shards: input and options alone do not tell which images existed."""
    manifest = PackingManifest.load_if_there(Path(path))
    return None if manifest is None else [shard.sha256 for shard in manifest.shards]


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


MEGATRON_KEY = "dataloader_state_dict"
"""Where Megatron-LM and Megatron-Bridge put the state in `train_dataloader_dprank000.pt`."""


class StateFile(NamedTuple):
    """What a file holds.

    Attributes:
        state: of a loader of one rank.
        megatron: it lies in Megatron's dict.
    """

    state: dict[str, Any]
    megatron: bool


def read_state(file: Path) -> StateFile:
    """The state in a file.

    Raises:
        BatchError: the file is damaged, or does not hold a state of this package; the message begins with its path.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BatchError(
            f"{file} holds objects, as Energon's own loader saves them, and not the plain dict that a loader of "
            "energon-packed saves; continue with the loader that saved it, or start without the state"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BatchError(f"{file} is damaged ({reason}); use an earlier checkpoint") from error
    megatron = isinstance(content, dict) and MEGATRON_KEY in content
    state = content[MEGATRON_KEY] if megatron else content
    if not isinstance(state, dict) or "version" not in state:
        raise BatchError(f"{file} holds no state of a loader of energon-packed; pass the file that Megatron saved")
    return StateFile(state, megatron)


def write_state(file: Path, content: StateFile) -> None:
    """Write a state; the file appears under its name when it is complete."""
    partial = file.with_name(file.name + ".partial")
    torch.save({MEGATRON_KEY: content.state} if content.megatron else content.state, partial)
    partial.replace(file)


_LOADER = "PackedLoader"


def redistribute(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """States of `world_size` ranks that resume where the ranks of `states` stopped.

    Args:
        states: of all ranks of one run at one step, in any order.
        world_size: number of data-parallel ranks to continue with.

    Returns:
        one state for each rank; `num_workers` in its identity is what each rank needs to be run with.

    Raises:
        BatchError: states of another release or of different runs, a missing rank, a loader of one exact epoch, one
            without worker processes, or workers that cannot be divided by `world_size`.
    """
    if world_size < 1:
        raise BatchError(f"`world_size` is {world_size}; it must be at least 1")
    ordered = _of_one_run(states)
    first = ordered[0]
    identity = first["identity"]
    workers = int(identity["num_workers"])
    if identity["epochs"] is not None or identity.get("complete_epochs"):
        raise BatchError(
            "the states are of one exact epoch after another (epochs=1 or complete_epochs), whose number of steps "
            "belongs to its number of ranks; finish the epoch with the same ranks"
        )
    if workers == 0:
        raise BatchError(
            "the states are of a loader without worker processes (num_workers=0); save with num_workers=1"
        )
    total = workers * len(ordered)
    if total % world_size:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        raise BatchError(
            f"{len(ordered)} ranks of {workers} workers are {total} workers, which {world_size} ranks cannot share "
            f"evenly; use one of {', '.join(map(str, fitting))} ranks"
        )
    loaders = [from_plain(state["energon"]) for state in ordered]
    started = [loader is not None for loader in loaders]
    if any(started) and not all(started):
        raise BatchError(
            f"rank {started.index(False)} had not started to load and others had; save all ranks at one step"
        )
    states_of_workers = [state for loader in loaders if loader is not None for state in loader.worker_states]
    share = total // world_size
    return [
        first
        | {
            "world_size": world_size,
            "rank": rank,
            "identity": identity | {"num_workers": share},
            "step": sum(ours.offset + (ours.state.sample_index if ours.state else 0) for ours in part),
            "last_restore_key": None,
            "energon": to_plain(_loader_state(part, loaders[0].micro_batch_size)) if part else None,
        }
        for rank in range(world_size)
        for part in [states_of_workers[rank * share : (rank + 1) * share]]
    ]


def _loader_state(worker_states: list[Any], micro_batch_size: int | None) -> Any:
    return SavableDataLoaderState(worker_states=worker_states, next_worker_id=0, micro_batch_size=micro_batch_size)


def _of_one_run(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states in the order of ranks.

    Raises:
        BatchError: one is of another release or run, or a rank is missing or there twice.
    """
    if not states:
        raise BatchError("no state to redistribute")
    for state in states:
        check_state(state, _LOADER)
        shared = ("epoch", "world_size")
        now, saved = ({name: one[name] for name in shared} | one["identity"] for one in (states[0], state))
        check_identity(saved, now)
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(states[0]["world_size"])):
        raise BatchError(
            f"the states are of ranks {', '.join(map(str, ranks))}, and the run had {states[0]['world_size']} ranks; "
            "pass one state of each"
        )
    return sorted(states, key=lambda state: int(state["rank"]))
