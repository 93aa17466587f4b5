"""How ranks end an epoch together: a collective operation hangs when one rank has a batch more than another."""

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
    """Refuse an endless loader in which a worker has nothing to repeat.

    Raises:
        ConfigError: fewer packs than loader workers; the message names both.
    """
    counts = [one.packs for one in splits if one.packs is not None]
    world_size, num_workers = worker_config.world_size, worker_config.num_workers
    workers = world_size * max(1, num_workers)
    if len(counts) == len(splits) and sum(counts) < workers:
        others = f" and {len(splits) - 1} others have" if len(splits) > 1 else " has"
        raise ConfigError(
            f"{splits[0].path}{others} {sum(counts)} packs in split {splits[0].split!r}, fewer than the {workers} "
            f"loader workers that repeat them (world_size {world_size}, num_workers {num_workers}): use fewer, "
            "pack with a smaller `seq_len`, or set `epochs=1`"
        )


def epoch_steps(
    config: LoaderConfig,
    splits: Sequence[LoadedSplit],
    worker_config: WorkerConfig,
    dataset: Callable[[], Any],
) -> int | None:
    """Steps that this rank takes in one epoch, so that all ranks take the same; None to end when its data ends.

    Args:
        config: of the loader; `even_ranks` says what to do.
        splits: what is read.
        worker_config: place of this process among the ranks.
        dataset: makes this rank's Energon dataset, whose length is used where no manifest tells.

    Raises:
        ConfigError: a choice that needs counts which are not known, or a rank without any pack.
    """
    choice, world_size = config.even_ranks, worker_config.world_size
    if world_size == 1 or choice == "off":
        return None
    distributed = has_group()
    if choice == "auto" and not distributed and config.on_the_fly:
        return None
    if config.on_the_fly:
        raise ConfigError(
            f"`even_ranks` {choice!r} needs the batches of every rank, and packing on the fly decides them while it "
            "runs, so ranks would end apart and collective operations hang: set `epochs=None` and count steps, pack "
            "offline, or set `even_ranks='off'`"
        )
    steps = _steps_of_ranks(config, splits, worker_config)
    if steps is None and distributed:
        steps = _gathered(len(dataset()), worker_config.rank, world_size)
    if steps is None:
        if choice == "auto":
            return None
        raise ConfigError(
            f"`even_ranks` {choice!r} needs the batches of every rank, which only a folder with packing.json or a "
            "torch.distributed process group tells; set `even_ranks='off'`, or repeat indefinitely with `epochs=None`"
        )
    if min(steps) == max(steps):
        return None
    if choice == "auto" and not distributed:
        _log.warning(
            "ranks end unevenly, after %d to %d batches; before collective operations set even_ranks='repeat' or "
            "'drop', or epochs=None",
            min(steps),
            max(steps),
        )
        return None
    if min(steps) == 0:
        raise ConfigError(
            f"rank {steps.index(0)} of {world_size} has no batch while others have {max(steps)}: there are too few "
            "packs for so many ranks; use fewer ranks, pack with a smaller `seq_len`, or set `even_ranks='off'`"
        )
    return min(steps) if choice == "drop" else max(steps)


def _steps_of_ranks(
    config: LoaderConfig, splits: Sequence[LoadedSplit], worker_config: WorkerConfig
) -> list[int] | None:
    """Batches of every rank by packing.json or the indexes; None where packs are not known, or of several folders."""
    if len(splits) != 1 or splits[0].packs is None:
        return None
    return steps_of_ranks(
        [(splits[0].packs, 1)],
        world_size=worker_config.world_size,
        micro_batch_size=config.micro_batch_size,
        num_workers=config.num_workers,
        drop_last=config.drop_last,
    )


def _gathered(steps: int, rank: int, world_size: int) -> list[int]:
    """Steps of every data-parallel rank; several processes (tensor-parallel ones) may share one of these."""
    by_rank: dict[int, int] = dict(all_gather_object((rank, steps)))
    missing = [one for one in range(world_size) if one not in by_rank]
    if missing:
        raise ConfigError(
            f"no process of the group is rank {missing[0]} of world_size {world_size}; pass each its data-parallel "
            "rank, or set `even_ranks='off'`"
        )
    return [by_rank[one] for one in range(world_size)]
