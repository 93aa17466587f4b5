"""Steps per epoch, exactly, from the number of packs: how Energon deals samples to ranks and workers.

Energon gives each worker of each rank one contiguous slice of all samples, slices differ by at most one, and the
longer ones are spread in bit-reversal order. Each worker makes batches of its own slice, so its last one can be short.
Source: `Sharder.split_samples_to_workers` of megatron-energon 7; the tests compare with it.
"""

from itertools import zip_longest
from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.shards.manifest import PackingManifest


def steps_per_epoch(
    path: str | Path | PackingManifest,
    *,
    world_size: int = 1,
    micro_batch_size: int = 1,
    num_workers: int = 0,
    split: str = "train",
    drop_last: bool = False,
) -> list[int]:
    """Micro batches that each rank sees in one epoch.

    Args:
        path: a packed data set, or its manifest.
        world_size: data-parallel ranks.
        micro_batch_size: packs in one batch.
        num_workers: loader workers of each rank.
        split: which split is read.
        drop_last: short batches at the end of a worker's slice are left out.

    Returns:
        One number per rank; where they differ, train to the least, or repeat the data.

    Raises:
        ConfigError: a number below its least value.
    """
    for name, value, least in (
        ("world_size", world_size, 1),
        ("micro_batch_size", micro_batch_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    manifest = path if isinstance(path, PackingManifest) else PackingManifest.load(path)
    workers = max(1, num_workers)
    packs = packs_per_worker(manifest.packs_in(split), world_size * workers)
    round_up = 0 if drop_last else micro_batch_size - 1
    return [
        sum((count + round_up) // micro_batch_size for count in packs[rank * workers : (rank + 1) * workers])
        for rank in range(world_size)
    ]


def packs_per_worker(packs: int, workers: int) -> list[int]:
    """Packs that each of `workers` workers over all ranks reads."""
    least, longer = divmod(packs, workers)
    counts = [least] * workers
    for worker in _bit_reversal(list(range(workers)))[:longer]:
        counts[worker] += 1
    return counts


def _bit_reversal(indices: list[int]) -> list[int]:
    """Halves dealt like two hands of cards, recursively: a bit reversal for any length."""
    if len(indices) <= 2:
        return indices
    middle = len(indices) // 2
    pairs = zip_longest(_bit_reversal(indices[:middle]), _bit_reversal(indices[middle:]))
    return [index for pair in pairs for index in pair if index is not None]
