"""`plan_counts`: how many samples have each length -> CountPlan, the patterns of packs and how often each is used."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.options import as_integer, optional_integer
from energon_packed.packing.placing import Content, best_fit
from energon_packed.seqlens import round_up

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountPlan:
    """Packs of samples of which only the lengths are known.

    Iterating yields each pattern and how often it is used:

        for lengths, times in plan:       # int64 (samples of such a pack,), from the longest; int
            assert lengths.sum() <= plan.capacity

    Attributes:
        lengths: int64 (m,), lengths of the samples of each pattern, pattern after pattern, rounded up to `multiple`.
        offsets: int64 (K+1,), pattern k is `lengths[offsets[k]:offsets[k + 1]]`.
        times: int64 (K,), packs with each pattern.
        tokens: real tokens in all packs, without padding from `multiple`.
        overlong: samples that no pack has room for.
        capacity: tokens that fit in one row.

    Examples:
        >>> plan = plan_counts(np.bincount([5, 3, 3, 2, 5, 3, 3, 2], minlength=9), 8)
        >>> [(lengths.tolist(), times) for lengths, times in plan], plan.num_packs, plan.utilization
        ([([5, 3], 2), ([3, 3, 2], 1), ([2], 1)], 4, 0.8125)
    """

    lengths: Int64
    offsets: Int64
    times: Int64
    tokens: int
    overlong: int
    capacity: int

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return int(self.times.sum())

    @property
    def utilization(self) -> float:
        """Real tokens divided by the capacity of all rows, 0 to 1; 1.0 for an empty plan."""
        room = self.num_packs * self.capacity
        return self.tokens / room if room else 1.0

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[tuple[Int64, int]]:
        for pattern, times in enumerate(self.times.tolist()):
            yield self.lengths[self.offsets[pattern] : self.offsets[pattern + 1]], times


def plan_counts(
    counts: npt.ArrayLike, capacity: int, *, max_samples: int | None = None, multiple: int = 1
) -> CountPlan:
    """Plan packs by best fit decreasing from the number of samples of each length.

    `pack_lengths(lengths, capacity, algorithm="bfd")` has the same packs for samples of these lengths. Time and memory
    depend on the number of different lengths, and not on the number of samples.

    Args:
        counts: integers >= 0 of shape (capacity + 1,) or shorter, samples of each length; no sample has length 0.
        capacity: tokens that fit in one row.
        max_samples: maximum number of samples per pack; None for no limit.
        multiple: sample lengths are rounded up to a multiple of this many tokens to compute free space.

    Raises:
        ConfigError: an argument is out of range.
        ValueError: `counts` is not an array of such integers.
    """
    capacity, multiple = as_integer(capacity, "capacity"), as_integer(multiple, "multiple")
    max_samples = optional_integer(max_samples, "max_samples")
    array = _checked_counts(counts, capacity)
    lengths = np.flatnonzero(array)
    cost = round_up(lengths, multiple)
    usable = capacity // multiple * multiple
    fits = cost <= usable
    costs, place = np.unique(cost[fits], return_inverse=True)
    samples = np.zeros(len(costs), dtype=np.int64)
    np.add.at(samples, place, array[lengths[fits]])
    limit = int(max_samples or max(int(samples.sum()), 1))
    placed = best_fit(zip(costs[::-1].tolist(), samples[::-1].tolist(), strict=True), usable, limit)
    # No two runs have equal content. From the longest sample, as packs are opened.
    patterns = sorted([(_pattern(content), packs) for *_, packs, _, _, content in placed.runs], reverse=True)
    return CountPlan(
        lengths=np.array([length for pattern, _ in patterns for length in pattern], dtype=np.int64),
        offsets=np.cumsum([0, *[len(pattern) for pattern, _ in patterns]]),
        times=np.array([times for _, times in patterns], dtype=np.int64),
        tokens=int((lengths * array[lengths])[fits].sum()),
        overlong=int(array[lengths[~fits]].sum()),
        capacity=capacity,
    )


def _pattern(content: Content | None) -> list[int]:
    """Lengths of the samples of a pack, from the longest."""
    parts = []
    while content is not None:
        content, length, samples = content
        parts.append([length] * samples)
    return [length for part in reversed(parts) for length in part]


def _checked_counts(counts: npt.ArrayLike, capacity: int) -> Int64:
    array = np.asarray(counts)
    if array.ndim != 1 or len(array) > capacity + 1:
        raise ValueError(f"`counts` must have at most {capacity + 1} entries (capacity + 1), got shape {array.shape}.")
    if array.size == 0:
        return np.zeros(1, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"`counts` must be integers, got {array.dtype}.")
    if (least := int(array.min())) < 0:
        raise ValueError(f"`counts[{int(np.argmin(array))}]` must be at least 0, got {least}.")
    if array[0]:
        raise ValueError(f"`counts[0]` must be 0, as no sample has 0 tokens, got {array[0]}.")
    return array.astype(np.int64)
