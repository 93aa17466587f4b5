"""Packs of a dataset, as Energon reads them: their number in an epoch, and in each worker."""

from collections.abc import Sequence

from energon_packed.errors import ConfigError
from energon_packed.loading.datasets.manifests import LoadedSplit
from energon_packed.loading.options import PackedLoaderOptions


def check_every_worker_has_packs(splits: Sequence[LoadedSplit], world_size: int, num_workers: int) -> None:
    """Refuse a loader that repeats if a worker has no pack to repeat.

    Raises:
        ConfigError: there are fewer packs than loader workers; the message names both.
    """
    counts = [split.packs for split in splits if split.packs is not None]
    workers = world_size * max(1, num_workers)
    if len(counts) == len(splits) and sum(counts) < workers:
        others = f" and {len(splits) - 1} others have" if len(splits) > 1 else " has"
        raise ConfigError(
            f"{splits[0].path}{others} {sum(counts)} packs in split {splits[0].split!r}, fewer than the {workers} "
            f"loader workers (world_size {world_size}, num_workers {num_workers}). Use fewer workers or ranks, pack "
            "with a smaller `seq_len`, or set `epochs=1`."
        )


def packs_of_epoch(config: PackedLoaderOptions, splits: Sequence[LoadedSplit]) -> list[tuple[int, float]] | None:
    """Return (packs, repetitions) of each split in an epoch; None if packs are not counted, or rows are not packs."""
    packs = [(split.packs, split.repetitions or 1) for split in splits]
    # Without `shuffle`, Energon reads each input of a blend once.
    if config.on_the_fly or (len(splits) > 1 and not config.shuffle):
        return None
    counted = [(count, times) for count, times in packs if count is not None]
    return counted if len(counted) == len(packs) else None
