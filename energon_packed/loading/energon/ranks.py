"""Packs of a dataset to the number of steps of an epoch, equal on all ranks.

A collective operation hangs if a rank has more batches than other ranks.
"""

from collections.abc import Sequence

from megatron.energon import WorkerConfig

from energon_packed.errors import ConfigError
from energon_packed.loading.energon.config import LoaderConfig
from energon_packed.loading.epoch_end import steps_of_epoch
from energon_packed.loading.manifests import LoadedSplit


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


def epoch_steps(config: LoaderConfig, splits: Sequence[LoadedSplit], worker_config: WorkerConfig) -> int | None:
    """Return the steps of one epoch, the same on all ranks; None for a single rank, or if packs are not counted.

    Args:
        config: of the loader, with `epoch_end`.
        splits: the splits that are read.
        worker_config: rank and world size.

    Raises:
        ConfigError: as `steps_of_epoch`.
    """
    packs = [(split.packs, split.repetitions or 1) for split in splits]
    # Without `shuffle`, Energon reads each input of a blend once.
    if config.on_the_fly or None in [count for count, _ in packs] or (len(splits) > 1 and not config.shuffle):
        return None
    steps = steps_of_epoch(
        [(count or 0, times) for count, times in packs],
        world_size=worker_config.world_size,
        micro_batch_size=config.micro_batch_size,
        num_workers=config.num_workers,
        epoch_end=config.epoch_end,
        warns=not worker_config.rank,
    )
    # A single rank waits for no other rank, so packs that fail need no row in their place.
    return steps if worker_config.world_size > 1 else None
