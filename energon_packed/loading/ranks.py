"""The process group of torch.distributed, where there is one, and what its launchers say before there is.

Share: the part of an epoch of a stream that one loader worker reads. Ranks: data-parallel place of this process.

What another tool would read for all ranks, or split over them again: rows and data are lost without an error.

Nothing is passed to a dataset that tells. The tools are found among the callers, by the names of their classes:

    IterableDatasetShard    accelerate, Transformers: keeps every n-th item of the part that a rank has already
    DataLoaderDispatcher    reads on process 0; accelerate's cuts every tensor in equal parts, ms-swift's gives all of
                            them rows of process 0
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.errors import ConfigError


def has_group() -> bool:
    """Whether this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def group_place() -> tuple[int, int]:
    """Rank and number of processes of the group; 0 and 1 without one."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if has_group() else (0, 1)


def launched_processes() -> int:
    """Processes that a launcher (torchrun, accelerate, Lightning) has started, by WORLD_SIZE; 1 without one."""
    launched = os.environ.get("WORLD_SIZE", "")
    return int(launched) if launched.isdecimal() else 1


def all_gather_object(value: Any, group: Any = None) -> list[Any]:
    """`value` of every process, in the order of ranks: a collective operation. Without a group, this one's alone."""
    if not has_group():
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def broadcast_object(value: Any, group: Any = None) -> Any:
    """`value` of the first process of the group: a float computed on other hardware may differ in its last bit."""
    if not has_group():
        return value
    found = [value]
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast_object_list(found, src=first, group=group)
    return found[0]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The slice of one epoch that a single loader worker of one rank reads. Shards are disjoint and cover the epoch.

    Attributes:
        index: of the shard, from 0: worker w of rank r reads shard `r * num_workers + w`.
        num_shards: shards of the epoch: workers of all ranks.
        epoch: from 0.
        seed: of the loader.
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


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size): as given, else from torch.distributed, else (0, 1).

    Raises:
        ConfigError: only one is given, the rank is not below the world size, or neither is known and the environment
            says that there are several processes.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("pass both `rank` and `world_size`, or neither")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"`rank` {rank} is not below `world_size` {world_size}")
        return rank, world_size
    if not has_group() and (launched := launched_processes()) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {launched} and there is no process group, so each process would load all packs: make the "
            "loader after torch.distributed.init_process_group (accelerate.Accelerator(), Fabric.launch() and "
            "TrainingArguments call it), or pass `rank` and `world_size`"
        )
    return group_place()


def check_rank(made: tuple[int, int], rank: int | None, world_size: int | None) -> None:
    """Refuse to load where the process group is no longer that in which the loader was made.

    Args:
        made: rank and world size of the loader.
        rank, world_size: as they were given to it; None where torch.distributed decides.

    Raises:
        ConfigError: rank or world size differ; the message names both.
    """
    now = resolve_rank(rank, world_size)
    if made != now:
        raise ConfigError(
            f"the loader was made as rank {made[0]} of {made[1]}, and torch.distributed now says rank {now[0]} of "
            f"{now[1]}: make it after torch.distributed.init_process_group, or pass `rank` and `world_size`"
        )


def shuffled(items: Sequence[int] | int, shard: ShardSpec, *salt: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Numbers in the order of an epoch, int64 (n,): a seeded permutation, or as they are."""
    numbers = np.arange(items) if isinstance(items, int) else np.asarray(items, dtype=np.int64)
    return shard.rng(*salt).permutation(numbers) if shuffle else numbers


def warn_uneven(rank: int, world_size: int, length: Callable[[int], int]) -> None:
    """Warn once for all ranks of a process group if their epochs differ in length.

    Args:
        rank, world_size: data-parallel place of this process.
        length: batches of a rank in one epoch; raises TypeError if that is not known.
    """
    if rank > 0 or world_size == 1 or not has_group():
        return
    try:
        most, least = length(0), length(world_size - 1)  # what is left over goes to the first ranks
    except TypeError:
        return
    if least < most:
        _log.warning(
            "ranks have %d to %d batches in an epoch, and collective operations of the longer ones wait for the "
            "others: end each epoch after %d batches, repeat without end with MapDistributor(dataset, repeat=True), "
            "or use get_packed_loader, which evens them",
            least, most, least,
        )  # fmt: skip


_DISPATCHER = "DataLoaderDispatcher"
_SHARD = "IterableDatasetShard"
_READING = ("__iter__", "_fetch_batches")


def check_not_resharded(world_size: int) -> None:
    """Raise where a class that splits data over processes reads a loader that gives each rank its own.

    Args:
        world_size: of the loader; 1 gives everything to every process, and splitting it once is right.

    Raises:
        ConfigError: the data is split twice; the message says what to write.
    """
    if world_size == 1:
        return
    for method, caller, kind in _callers(_SHARD, _DISPATCHER):
        if method in _READING and _processes(caller) > 1:
            raise ConfigError(
                f"the loader gives each of {world_size} ranks its own packs, and {type(caller).__module__}."
                f"{kind.__name__} splits them over ranks again, which loses the rest: do not pass the loader to "
                "accelerator.prepare or Trainer (iterate it directly, and move each batch to the device), use "
                "PackedDataset there, or make the loader with rank=0, world_size=1"
            )


def refuse_dispatch() -> None:
    """Raise where a dispatcher is calling, on every process, before anything is read.

    A batch of packs is one row, with boundaries and pixels of other lengths than the row: it cannot be cut.

    Raises:
        ConfigError: the message says what to write.
    """
    for _, _, kind in _callers(_DISPATCHER):
        if kind.__module__.startswith("accelerate."):
            raise ConfigError(
                "`dispatch_batches` is True: it reads on process 0 and cuts every tensor of a batch in equal parts; "
                "a packed row cannot be cut: set Accelerator(dataloader_config=DataLoaderConfiguration("
                "dispatch_batches=False)), or accelerator_config={'dispatch_batches': False} in TrainingArguments"
            )
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} reads on process 0 for all, and this data gives each process its own "
            "rows: pass a PackedDataset, or a loader made with rank=0, world_size=1"
        )


def _callers(*names: str) -> Iterator[tuple[str, Any, type]]:
    """(method, object, its class of one of these names) of every method that is running, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        kind = next((one for one in type(caller).__mro__ if one.__name__ in names), None)
        if kind is not None:
            yield frame.f_code.co_name, caller, kind
        frame = frame.f_back


def _processes(caller: Any) -> int:
    state = getattr(caller, "state", caller)
    found: Any = getattr(state, "num_processes", None) or getattr(caller, "world_size", 1)  # ms-swift has the latter
    return int(found)
