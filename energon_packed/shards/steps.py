"""Exact steps per epoch. Input: pack counts, ranks and workers. Output: micro batches of each rank.

Energon assigns each worker of each rank one contiguous slice of the samples. Slice sizes differ by at most one; the
larger slices are distributed in bit-reversal order. Each worker batches its own slice, so its last batch can be short.
Source: `Sharder.split_samples_to_workers` of megatron-energon 7; tests compare with it.
"""

from collections.abc import Sequence
from itertools import zip_longest

from energon_packed.options import as_integer


def steps_of_ranks(
    packs: Sequence[tuple[int, float]],
    *,
    world_size: int = 1,
    micro_batch_size: int = 1,
    num_workers: int = 0,
    drop_last: bool = False,
) -> list[int]:
    """Return the micro batches of each rank in one epoch; each worker of a rank makes batches of its packs.

    Args:
        packs: (number of packs, repetitions per epoch) of each dataset.
        world_size: data-parallel ranks.
        micro_batch_size: packs per micro batch.
        num_workers: loader workers per rank.
        drop_last: drop the last batch of each worker if it is short.

    Raises:
        ConfigError: an argument is below its minimum.
    """
    world_size = as_integer(world_size, "world_size")
    micro_batch_size = as_integer(micro_batch_size, "micro_batch_size")
    # Without worker processes, the main process is the only worker of its rank.
    workers = max(1, as_integer(num_workers, "num_workers", 0))
    totals = [0] * (world_size * workers)
    before = 0
    for count, times in packs:
        for worker, share in enumerate(packs_per_worker(count, len(totals), before)):
            # Energon repeats the slice of each worker, and rounds the repetitions of a slice down.
            totals[worker] += int(share * times)
        before += count
    # Each worker makes batches of its own packs, so counts are rounded per worker, not per rank.
    round_up = 0 if drop_last else micro_batch_size - 1
    return [
        sum((count + round_up) // micro_batch_size for count in totals[rank * workers : (rank + 1) * workers])
        for rank in range(world_size)
    ]


def packs_per_worker(packs: int, workers: int, before: int = 0) -> list[int]:
    """Return the packs read by each worker of all ranks.

    Args:
        packs: packs of the dataset.
        workers: number of workers of all ranks.
        before: packs of the preceding datasets of a blend: the larger slices continue after the last worker that got
            a larger slice.
    """
    least, longer = divmod(packs, workers)
    counts = [least] * workers
    order = _bit_reversal(list(range(workers)))
    for position in range(before, before + longer):
        counts[order[position % workers]] += 1
    return counts


def _bit_reversal(indices: list[int]) -> list[int]:
    """Return the bit-reversal order for any length: recursively interleave the two halves."""
    if len(indices) <= 2:
        return indices
    middle = len(indices) // 2
    # For a power of two this is the usual bit reversal: 0 4 2 6 1 5 3 7.
    pairs = zip_longest(_bit_reversal(indices[:middle]), _bit_reversal(indices[middle:]))
    return [index for pair in pairs for index in pair if index is not None]
