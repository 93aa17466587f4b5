"""Exact steps per epoch from the number of packs, following Energon's sharding over ranks and workers.

Energon assigns each worker of each rank one contiguous slice of the samples. Slice sizes differ by at most one; the
larger slices are distributed in bit-reversal order. Each worker batches its own slice, so its last batch can be short.
Source: `Sharder.split_samples_to_workers` of megatron-energon 7; tests compare with it.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.shards.counted import count_packs
from energon_packed.shards.manifest import PackingManifest
from energon_packed.shards.split import dataset_folder


def steps_per_epoch(
    path: str | Path | PackingManifest,
    *,
    world_size: int = 1,
    micro_batch_size: int = 1,
    num_workers: int = 0,
    split: str = "train",
    drop_last: bool = False,
) -> list[int]:
    """Micro batches per rank in one epoch.

    Args:
        path: packed dataset, or its manifest. Without packing.json, packs are counted in the indexes.
        world_size: data-parallel ranks.
        micro_batch_size: packs per micro batch.
        num_workers: loader workers per rank.
        split: split to read.
        drop_last: drop the short batch at the end of each worker's slice.

    Returns:
        One number per rank. If they differ, train for the minimum or repeat the data.

    Raises:
        ConfigError: an argument is below its minimum.
        FormatError: there is no dataset.
    """
    for name, value, least in (
        ("world_size", world_size, 1),
        ("micro_batch_size", micro_batch_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if value < least:
            raise ConfigError(f"`{name}` is {value}; it must be at least {least}")
    packs = packs_per_worker(_packs_in(path, split), world_size * max(1, num_workers))
    return steps_per_rank(packs, world_size, micro_batch_size, drop_last=drop_last)


def steps_per_rank(packs: Sequence[int], world_size: int, micro_batch_size: int, *, drop_last: bool) -> list[int]:
    """Micro batches of each rank, whose workers batch their own packs.

    Args:
        packs: packs of each worker, those of rank 0 first; as many for each rank.
        world_size, micro_batch_size, drop_last: as `steps_per_epoch`.
    """
    workers = len(packs) // world_size
    round_up = 0 if drop_last else micro_batch_size - 1
    return [
        sum((count + round_up) // micro_batch_size for count in packs[rank * workers : (rank + 1) * workers])
        for rank in range(world_size)
    ]


def _packs_in(path: str | Path | PackingManifest, split: str) -> int:
    manifest = path if isinstance(path, PackingManifest) else PackingManifest.load_if_there(path)
    return count_packs(dataset_folder(str(path)), split) if manifest is None else manifest.packs_in(split)


def packs_per_worker(packs: int, workers: int, before: int = 0) -> list[int]:
    """Packs read by each of `workers` workers, counted over all ranks.

    Args:
        packs: of the dataset.
        workers: of all ranks.
        before: packs of the datasets before it in a blend: it goes on with the worker behind the last one of them.
    """
    least, longer = divmod(packs, workers)
    counts = [least] * workers
    order = _bit_reversal(list(range(workers)))
    for place in range(before, before + longer):
        counts[order[place % workers]] += 1
    return counts


def _bit_reversal(indices: list[int]) -> list[int]:
    """Bit-reversal order for any length: recursively interleave the two halves."""
    if len(indices) <= 2:
        return indices
    middle = len(indices) // 2
    pairs = zip_longest(_bit_reversal(indices[:middle]), _bit_reversal(indices[middle:]))
    return [index for pair in pairs for index in pair if index is not None]
