"""Packs of a dataset to the number of steps of an epoch, equal on all ranks.

A collective operation hangs if a rank has more batches than other ranks.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron.energon import WorkerConfig

from energon_packed.errors import ConfigError
from energon_packed.loading.energon.config import LoaderConfig
from energon_packed.loading.manifests import LoadedSplit
from energon_packed.loading.ranks import all_gather_object, has_group
from energon_packed.shards.steps import steps_of_ranks

_log = logging.getLogger(__name__)


def check_every_worker_has_packs(splits: Sequence[LoadedSplit], worker_config: WorkerConfig) -> None:
    """Refuse a loader that repeats if a worker has no pack to repeat.

    Raises:
        ConfigError: there are fewer packs than loader workers; the message names both.
    """
    counts = [split.packs for split in splits if split.packs is not None]
    world_size, num_workers = worker_config.world_size, worker_config.num_workers
    workers = world_size * max(1, num_workers)
    if len(counts) == len(splits) and sum(counts) < workers:
        others = f" and {len(splits) - 1} others have" if len(splits) > 1 else " has"
        raise ConfigError(
            f"{splits[0].path}{others} {sum(counts)} packs in split {splits[0].split!r}, fewer than the {workers} "
            f"loader workers (world_size {world_size}, num_workers {num_workers}). Use fewer workers or ranks, pack "
            "with a smaller `seq_len`, or set `epochs=1`."
        )


def epoch_steps(
    config: LoaderConfig,
    splits: Sequence[LoadedSplit],
    worker_config: WorkerConfig,
    dataset: Callable[[], Any],
) -> int | None:
    """Return the steps of this rank in one epoch, equal on all ranks; None to end when its data ends.

    Args:
        config: of the loader, with `even_ranks`.
        splits: the splits that are read.
        worker_config: rank and world size.
        dataset: creates the Energon dataset of this rank; its length is used if no manifest has the number of packs.

    Raises:
        ConfigError: `even_ranks` needs counts that are not known, or a rank has no pack.
    """
    choice, world_size = config.even_ranks, worker_config.world_size
    if world_size == 1 or choice == "off":
        return None
    distributed = has_group()
    if config.on_the_fly:
        if choice == "auto" and not distributed:
            return None
        raise ConfigError(
            f"`even_ranks={choice!r}` needs a known number of batches, which on-the-fly packing does not have (ranks "
            "would end at different steps and hang). Set `epochs=None` and count steps, pack offline, or set "
            "`even_ranks='off'`."
        )
    packs = splits[0].packs if len(splits) == 1 else None
    if packs is not None:
        steps = steps_of_ranks(
            [(packs, 1)],
            world_size=world_size,
            micro_batch_size=config.micro_batch_size,
            num_workers=config.num_workers,
            drop_last=config.drop_last,
        )
    elif distributed:
        steps = _gathered(len(dataset()), worker_config.rank, world_size)
    elif choice == "auto":
        return None
    else:
        raise ConfigError(
            f"`even_ranks={choice!r}` needs a known number of batches, from a folder with packing.json or from a "
            "torch.distributed process group. Set `even_ranks='off'`, or repeat indefinitely with `epochs=None`."
        )
    if min(steps) == max(steps):
        return None
    if choice == "auto" and not distributed:
        _log.warning(
            "ranks end unevenly, after %d to %d batches; before collective operations set even_ranks='mask' or "
            "'repeat', or epochs=None",
            min(steps),
            max(steps),
        )
        return None
    if min(steps) == 0:
        raise ConfigError(
            f"rank {steps.index(0)} of {world_size} has no batch, and other ranks have {max(steps)}: there are too "
            "few packs. Use fewer ranks, pack with a smaller `seq_len`, or set `even_ranks='off'`."
        )
    if choice == "drop" and not worker_config.rank:
        _log.warning(
            "`even_ranks='drop'` leaves out %d of %d batches in each epoch. Set 'mask' to train on all.",
            sum(steps) - min(steps) * world_size,
            sum(steps),
        )
    return min(steps) if choice == "drop" else max(steps)


def _gathered(steps: int, rank: int, world_size: int) -> list[int]:
    """Return the steps of every data-parallel rank; several (tensor-parallel) processes may share a rank."""
    by_rank: dict[int, int] = dict(all_gather_object((rank, steps)))
    missing = [index for index in range(world_size) if index not in by_rank]
    if missing:
        raise ConfigError(
            f"no process of the group is rank {missing[0]} of world_size {world_size}. Pass its data-parallel rank to "
            "each process, or set `even_ranks='off'`."
        )
    return [by_rank[index] for index in range(world_size)]
