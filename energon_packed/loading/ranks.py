"""Ranks: torch.distributed and its environment in, (rank, world size) and the worker shard of an epoch out.

| part | purpose |
|---|---|
| `has_group`, `group_place` | the process group |
| `launched_processes`, `is_distributed` | the processes that a launcher started, also without a process group |
| `all_gather_object`, `broadcast_object`, `all_reduce_mean` | collective operations, also without a process group |
| `ShardSpec` | the items of an epoch that a worker of a rank reads |
| `resolve_rank`, `check_rank` | rank and world size of a loader |
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from energon_packed.errors import ConfigError


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
