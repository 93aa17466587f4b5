"""Share: the part of an epoch of a stream that one loader worker reads. Ranks: data-parallel place of this process."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.process_group import group_place, has_group, launched_processes
from energon_packed.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part `index` of the `count` parts of one epoch. Parts are disjoint, and together they are the epoch.

    Attributes:
        index: number of the part, from 0: worker w of rank r reads part `r * num_workers + w`.
        count: parts of the epoch: workers of all ranks.
        epoch: from 0.
        seed: of the loader.
    """

    index: int = 0
    count: int = 1
    epoch: int = 0
    seed: int = 0

    def part(self, items: int) -> range:
        """The numbers that this share has of `items`: every `count`-th, from `index` on."""
        return range(self.index, items, self.count)

    def rng(self, *salt: int) -> np.random.Generator:
        """Random numbers of the epoch, the same in all shares unless `salt` distinguishes them."""
        return np.random.default_rng([self.seed, self.epoch, *salt])


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
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


def check_place(made: tuple[int, int], rank: int | None, world_size: int | None) -> None:
    """Refuse to load where the process group is no longer that in which the loader was made.

    Args:
        made: rank and world size of the loader.
        rank, world_size: as they were given to it; None where torch.distributed decides.

    Raises:
        ConfigError: rank or world size differ; the message names both.
    """
    now = place_of(rank, world_size)
    if made != now:
        raise ConfigError(
            f"the loader was made as rank {made[0]} of {made[1]}, and torch.distributed now says rank {now[0]} of "
            f"{now[1]}: make it after torch.distributed.init_process_group, or pass `rank` and `world_size`"
        )


def shuffled(items: Sequence[int] | int, share: Share, *salt: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Numbers in the order of an epoch, int64 (n,): a seeded permutation, or as they are."""
    numbers = np.arange(items) if isinstance(items, int) else np.asarray(items, dtype=np.int64)
    return share.rng(*salt).permutation(numbers) if shuffle else numbers


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
