"""Ranks: torch.distributed and its environment in, (rank, world size) and the worker shard of an epoch out.

| part | purpose |
|---|---|
| `has_group`, `group_place` | the process group |
| `launched_processes`, `is_distributed` | the processes that a launcher started, also without a process group |
| `all_gather_object`, `broadcast_object`, `all_reduce_mean` | collective operations, also without a process group |
| `ShardSpec`, `shuffled` | the items of an epoch that a worker of a rank reads |
| `resolve_rank`, `check_rank` | rank and world size of a loader |
| `check_not_resharded` | error for tools that would shard the data a second time |
| `refuse_dispatch`, `is_dispatched`, `dispatch_refusal` | errors for tools that read on process 0 for all processes |

Sharding twice loses rows without an error, and a dataset is not informed about it. So the tools are searched
among the callers, by the names of their classes:

    IterableDatasetShard    accelerate, Transformers: keeps every n-th item of a shard that belongs to one rank already
    DataLoaderDispatcher    reads on process 0; accelerate's version cuts every tensor in equal parts, the version of
                            ms-swift sends rows of process 0 to all processes
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.errors import ConfigError

_DISPATCHER = "DataLoaderDispatcher"
_SHARD = "IterableDatasetShard"
_ACCELERATE = "accelerate."
DISPATCHED = (
    "`dispatch_batches=True` splits tensors between processes, which breaks packed rows. Pass "
    "DataLoaderConfiguration(dispatch_batches=False), or accelerator_config={'dispatch_batches': False} in "
    "TrainingArguments."
)
_READING = ("__iter__", "_fetch_batches")  # methods that read data; others, such as __len__, are harmless


def has_group() -> bool:
    """Whether this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def group_place(group: Any = None) -> tuple[int, int]:
    """(rank, number of processes) of a process group, by default of all processes; (0, 1) without a process group."""
    return (torch.distributed.get_rank(group), torch.distributed.get_world_size(group)) if has_group() else (0, 1)


def launched_processes() -> int:
    """Number of processes that a launcher (torchrun, accelerate, Lightning) started: WORLD_SIZE, or 1."""
    launched = os.environ.get("WORLD_SIZE", "")
    return int(launched) if launched.isdecimal() else 1


def is_distributed() -> bool:
    """Whether several processes train."""
    return (group_place()[1] if has_group() else launched_processes()) > 1


def all_gather_object(value: Any, group: Any = None) -> list[Any]:
    """Collect `value` of every process, in the order of ranks; [value] without a process group."""
    if not has_group():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: Any = None, *, first: int = 0) -> Any:
    """Return the `value` of process `first` of the group on all processes.

    Ranks must not compute such a value each: a float of other hardware may differ in its last bit.
    """
    if not has_group():
        return value
    values = [value]
    source = first if group is None else torch.distributed.get_global_rank(group, first)
    torch.distributed.broadcast_object_list(values, src=source, group=group)
    return values[0]


def all_reduce_mean(value: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the mean of `value` over all processes; `value` without a process group."""
    if not has_group():
        return value
    # For instance "cpu:gloo,cuda:nccl". A batch may still be on the CPU, which NCCL cannot read.
    devices = [entry.partition(":")[0] for entry in torch.distributed.get_backend_config(group).split(",")]
    total = value.clone() if value.device.type in devices else value.to(devices[0])
    torch.distributed.all_reduce(total, group=group)  # gloo has no mean
    return total / torch.distributed.get_world_size(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The slice of an epoch that a single loader worker of a rank reads. Shards are disjoint and cover the epoch.

    Attributes:
        index: of the shard, from 0: worker w of rank r reads shard `r * num_workers + w`.
        num_shards: shards of the epoch: workers of all ranks.
        epoch: from 0.
        seed: of the loader.

    Examples:
        >>> list(ShardSpec(index=1, num_shards=3).shard_indices(7))
        [1, 4]
    """

    index: int = 0
    num_shards: int = 1
    epoch: int = 0
    seed: int = 0

    def shard_indices(self, items: int) -> range:
        """Return the indices of this shard among `items` items: every `num_shards`-th, from `index` on."""
        return range(self.index, items, self.num_shards)

    def rng(self, *salt: int) -> np.random.Generator:
        """Return random numbers of the epoch, the same in all shards unless `salt` distinguishes them."""
        return np.random.default_rng([self.seed, self.epoch, *salt])


def check_rank_arguments(rank: int | None, world_size: int | None) -> None:
    """Check arguments that are both None, or a rank below a world size. Raises ConfigError."""
    if (rank is None) != (world_size is None):
        raise ConfigError(f"`rank` and `world_size` must be passed together, got {rank} and {world_size}.")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ConfigError(f"`rank` must be from 0 to `world_size` - 1, got {rank} with `world_size` {world_size}.")


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Determine (rank, world_size): the arguments, else torch.distributed, else (0, 1).

    Raises:
        ConfigError: one of both is missing, the rank is not below the world size, or neither is known although a
            launcher started several processes.
    """
    check_rank_arguments(rank, world_size)
    if rank is not None and world_size is not None:
        return rank, world_size
    if not has_group() and (launched := launched_processes()) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {launched} but torch.distributed is not initialized, so every process would load all "
            "packs. Create the loader after init_process_group (or Accelerator(), Fabric.launch(), "
            "TrainingArguments), or pass `rank` and `world_size`."
        )
    return group_place()


def check_rank(made: tuple[int, int], rank: int | None, world_size: int | None) -> None:
    """Refuse to load if the process group changed since the loader was created.

    Args:
        made: rank and world size of the loader.
        rank, world_size: arguments of the loader; None if torch.distributed decides.

    Raises:
        ConfigError: rank or world size differ; the message names both.
    """
    now = resolve_rank(rank, world_size)
    if made != now:
        raise ConfigError(
            f"The loader was created as rank {made[0]} of {made[1]}, but torch.distributed now reports rank {now[0]} "
            f"of {now[1]}. Create it after init_process_group, or pass `rank` and `world_size`."
        )


def shuffled(items: Sequence[int] | int, shard: ShardSpec, *salt: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Numbers in the order of an epoch, int64 (n,): a seeded permutation, or as they are."""
    numbers = np.arange(items) if isinstance(items, int) else np.asarray(items, dtype=np.int64)
    return shard.rng(*salt).permutation(numbers) if shuffle else numbers


def check_not_resharded(world_size: int) -> None:
    """Raise if a class that shards data over processes reads a loader that is sharded already.

    Args:
        world_size: world size of the loader; with 1, every process has all data, and sharding it once is right.

    Raises:
        ConfigError: the data is sharded twice; the message names the remedies.
    """
    if world_size == 1:
        return
    for method, caller, kind in _callers(_SHARD, _DISPATCHER):
        if method in _READING and _processes(caller) > 1:
            raise ConfigError(
                f"This loader is already sharded over {world_size} ranks; {type(caller).__module__}.{kind.__name__} "
                "would shard it again and drop data. Iterate it directly, use PackedDataset instead, or create it "
                "with rank=0, world_size=1."
            )


def refuse_dispatch() -> None:
    """Raise if a dispatcher is calling, on every process, before anything is read.

    A batch of packs is one row, and its boundaries and pixels are longer or shorter than the row: it cannot be cut.

    Raises:
        ConfigError: the message names the remedies.
    """
    for _, _, kind in _callers(_DISPATCHER):
        if kind.__module__.startswith(_ACCELERATE):
            raise ConfigError(DISPATCHED)
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} reads on process 0 for all ranks, but this loader is sharded over "
            "ranks. Pass a PackedDataset, or a loader created with rank=0, world_size=1."
        )


class DispatchRefusal:
    """Stand-in for a batch that a dispatcher of accelerate reads: unpickling it raises the error of `refuse_dispatch`.

    Only process 0 calls a collator, perhaps in a worker process, and the other processes wait for its batch. So a
    worker returns this object to process 0, and process 0 sends it to the other processes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_dispatched, ()


def dispatch_refusal() -> DispatchRefusal | None:
    """Refuse a dispatcher of accelerate that reads the batch of this call; None without a dispatcher.

    Raises:
        ConfigError: on every process. A worker process returns the refusal instead, and its receiver raises.
    """
    if not is_dispatched():
        return None
    return _raise_dispatched() if torch.utils.data.get_worker_info() is None else DispatchRefusal()


def is_dispatched() -> bool:
    """Return whether a dispatcher of accelerate is among the callers, also if this is a forked worker process."""
    return any(kind.__module__.startswith(_ACCELERATE) for _, _, kind in _callers(_DISPATCHER))


def _raise_dispatched() -> NoReturn:
    rank, world_size = group_place()
    if world_size > 1 and rank == 0:
        torch.distributed.broadcast_object_list([DispatchRefusal(), True])  # the structure of a batch, and the end
    raise ConfigError(DISPATCHED)


def _callers(*names: str) -> Iterator[tuple[str, Any, type]]:
    """(method, object, matching class) of every running method of these classes, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        # By name along the MRO, as importing accelerate or ms-swift to compare classes would cost seconds.
        kind = next((base for base in type(caller).__mro__ if base.__name__ in names), None)
        if kind is not None:
            yield frame.f_code.co_name, caller, kind
        frame = frame.f_back


def _processes(caller: Any) -> int:
    """Number of processes that a tool shards over."""
    state = getattr(caller, "state", caller)
    count: Any = getattr(state, "num_processes", None) or getattr(caller, "world_size", 1)  # ms-swift has the latter
    return int(count)
