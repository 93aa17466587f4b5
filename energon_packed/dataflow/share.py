"""Share: which part of an epoch one worker of one rank reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One of `count` shares of an epoch. Shares are disjoint, and together they are the epoch.

    Attributes:
        rank, world_size: data-parallel place.
        worker, num_workers: place among the loader workers of that rank; 0 and 1 without worker processes.
        epoch: from 0.
        seed: of the loader.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    epoch: int = 0
    seed: int = 0

    @property
    def index(self) -> int:
        """Number of this share, counted rank by rank."""
        return self.rank * self.num_workers + self.worker

    @property
    def count(self) -> int:
        """Shares of one epoch: workers of all ranks."""
        return self.world_size * self.num_workers

    def part(self, items: int) -> range:
        """The numbers that this share has of `items`: every `count`-th, from `index` on."""
        return range(self.index, items, self.count)

    def rng(self, *salt: int) -> np.random.Generator:
        """Random numbers of the epoch, the same in all shares unless `salt` tells them apart."""
        return np.random.default_rng([self.seed, self.epoch, *salt])


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size): as given, else from torch.distributed, else (0, 1).

    Raises:
        ConfigError: only one is given, or the rank is not below the world size.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("pass both `rank` and `world_size`, or neither")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    if not 0 <= rank < world_size:
        raise ConfigError(f"`rank` {rank} is not below `world_size` {world_size}")
    return rank, world_size


def shuffled(items: Sequence[int] | int, share: Share, *salt: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Numbers in the order of an epoch, int64 (n,): a seeded permutation, or as they are."""
    numbers = np.arange(items) if isinstance(items, int) else np.asarray(items, dtype=np.int64)
    return share.rng(*salt).permutation(numbers) if shuffle else numbers
