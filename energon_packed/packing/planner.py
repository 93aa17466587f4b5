"""`pack_lengths`: sample lengths, row capacity and the name of an algorithm -> PackPlan.

The algorithms work on counts of lengths (placing.py). Here the samples of each length, in input order, get the places:
`assign` reads the lengths in blocks, once to count them and once to number the samples of each length, so that nothing
is sorted as a whole, and its arrays may be files.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.packing.placing import Step, best_fit, first_fit, next_fit
from energon_packed.seqlens import round_up

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
_MOST_TOKENS = 2**31 - 1  # int32, dtype of lengths
_ALGORITHMS = ("bfd", "ffd", "sequential")
_BLOCK = 1 << 18  # samples that are handled at a time, so that temporary arrays are small
Allocate = Callable[[int, Any], npt.NDArray[Any]]
"""Makes an array of zeros of a size and dtype, in memory or in a file."""
_PACKS = 1 << 12  # packs that are copied at a time
_WINDOW = re.compile(r"window_([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """Assignment of samples to packs.

    Iterating yields an index array per pack:

        for rows in plan:              # int64 (samples in this pack,)
            assert lengths[rows].sum() <= plan.capacity

    Attributes:
        indices: int64 (n,), sample indices grouped by pack.
        offsets: int64 (P+1,), pack p is `indices[offsets[p]:offsets[p + 1]]`.
        overlong: int64 (k,), samples longer than `capacity`, in ascending order; not in any pack.
        tokens: real tokens in all packs, without padding from `multiple`.
        capacity: tokens that fit in one row.

    Examples:
        >>> plan = pack_lengths([5, 3, 3, 2], 8)
        >>> plan.num_packs, plan.offsets.tolist(), plan.utilization
        (2, [0, 2, 4], 0.8125)
    """

    indices: Int64
    offsets: Int64
    overlong: Int64
    tokens: int
    capacity: int

    @property
    def num_packs(self) -> int:
        """Number of packs P."""
        return len(self.offsets) - 1

    @property
    def utilization(self) -> float:
        """Real tokens divided by the capacity of all rows, 0 to 1; 1.0 for an empty plan."""
        room = self.num_packs * self.capacity
        return self.tokens / room if room else 1.0

    def __len__(self) -> int:
        return self.num_packs

    def __getitem__(self, pack: int) -> Int64:
        """Sample indices of a pack, int64 (samples,). Negative pack indices count from the end."""
        count = self.num_packs
        if not -count <= pack < count:
            raise IndexError(f"pack {pack} is out of range for a plan of {count} packs")
        pack %= count
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]

    def __iter__(self) -> Iterator[Int64]:
        for pack in range(self.num_packs):
            yield self[pack]

    def reordered(self, order: Int64) -> "PackPlan":
        """Return the same packs in another order.

        Args:
            order: int64 (P,), a permutation; new pack p is old pack `order[p]`.
        """
        counts = np.diff(self.offsets)[order]
        offsets = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        indices = np.empty_like(self.indices)
        for first in range(0, len(order), _PACKS):
            last = min(first + _PACKS, len(order))
            # Source position in the old `indices` for each entry of the new array.
            shift = self.offsets[:-1][order[first:last]] - offsets[first:last]
            source = np.arange(offsets[first], offsets[last]) + np.repeat(shift, counts[first:last])
            indices[offsets[first] : offsets[last]] = self.indices[source]
        return PackPlan(
            indices=indices,
            offsets=offsets,
            overlong=self.overlong,
            tokens=self.tokens,
            capacity=self.capacity,
        )


def pack_lengths(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    algorithm: str = "bfd",
    max_samples: int | None = None,
    multiple: int = 1,
    seed: int | None = None,
    groups: npt.ArrayLike | None = None,
) -> PackPlan:
    """Plan which samples share a row of `capacity` tokens.

        >>> plan = pack_lengths([5, 3, 3, 2, 9], 8)
        >>> [pack.tolist() for pack in plan], plan.overlong.tolist()
        ([[0, 1], [2, 3]], [4])

    Args:
        lengths: tokens of each sample, integers >= 1, shape (n,).
        capacity: tokens that fit in one row.
        algorithm: `bfd` (best fit decreasing), `ffd` (first fit decreasing), `sequential` (keeps the order)
            or `window_N` (best fit decreasing within consecutive windows of N samples).
        max_samples: maximum number of samples per pack; None for no limit.
        multiple: sample lengths are rounded up to a multiple of this many tokens to compute free space.
        seed: shuffles the order of the packs; None keeps the order in which they were opened.
        groups: integers (n,), key of the group of each sample. The samples with a key are in one pack, in their order,
            or all of them in `overlong`. A window of `window_N` has N groups. With `max_samples`, only groups of equal
            size share a pack. None without groups.

    Needs at most 20 bytes of memory per sample at a time beside `lengths` of int32, with `seed` 21; the plan has 8,
    and 8 per pack. `groups` need 80.
    `energon_packed.packing.plan_counts` plans any number of samples in little memory.

    Raises:
        ConfigError: an argument is out of range, or the algorithm is unknown (the message lists the valid names).
        ValueError: `lengths` is not an array of integers >= 1 with one dimension, or `groups` has another shape.
    """
    for name, value in (("capacity", capacity), ("multiple", multiple), ("max_samples", max_samples)):
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ConfigError(f"`{name}` must be an integer >= 1, got {value!r}.")
    if capacity > _MOST_TOKENS:
        raise ConfigError(f"`capacity` must be at most {_MOST_TOKENS} (int32), got {capacity}.")
    check_algorithm(algorithm)
    array = _checked_lengths(lengths)
    assigned = assign(array, int(capacity), algorithm, max_samples, int(multiple), groups)
    overlong = np.flatnonzero(assigned.pack < 0)
    indices, offsets = _by_pack(assigned)
    plan = PackPlan(
        indices=indices,
        offsets=offsets,
        overlong=overlong,
        tokens=int(array.sum(dtype=np.int64) - array[overlong].sum(dtype=np.int64)),
        capacity=int(capacity),
    )
    del assigned
    if seed is None:
        return plan
    return plan.reordered(np.random.default_rng(seed).permutation(plan.num_packs))


def algorithm_names() -> list[str]:
    """Names that `pack_lengths` accepts; N in `window_N` is any integer >= 1."""
    return [*_ALGORITHMS, "window_N"]


def check_algorithm(name: str) -> None:
    """Raise a ConfigError that lists the valid names if the algorithm is unknown."""
    if name not in _ALGORITHMS and not _WINDOW.fullmatch(name):
        raise ConfigError(f"unknown algorithm {name!r}; use one of {', '.join(algorithm_names())}")


class Assignment(NamedTuple):
    """Pack of each sample: a PackPlan in the order of the samples.

    Attributes:
        pack: int32 (n,), or int64 from 2**31 samples: index of its pack; -1 for a sample longer than a pack.
        place: int32 (n,), its index in the pack.
        sizes: integers (P,), samples of each pack.
    """

    pack: npt.NDArray[Any]
    place: Int32
    sizes: npt.NDArray[Any]


def assign(
    lengths: Int32 | Int64,
    capacity: int,
    algorithm: str,
    max_samples: int | None = None,
    multiple: int = 1,
    groups: npt.ArrayLike | None = None,
    empty: Allocate = np.zeros,
) -> Assignment:
    """Find the packs of `pack_lengths` of all samples, reading and writing arrays in order.

    Args:
        lengths: integers (n,) >= 1.
        capacity, algorithm, max_samples, multiple, groups: as for `pack_lengths`, of valid values.
        empty: makes the arrays of n entries. Only groups are placed in memory.
    """
    count, usable = len(lengths), capacity // multiple * multiple
    pack, place = empty(count, np.int32 if count < 1 << 31 else np.int64), empty(count, np.int32)
    if groups is not None:
        cost = lengths if multiple == 1 else round_up(lengths.astype(np.int64), multiple)
        indices, offsets, overlong = _packs_of_groups(groups, cost, usable, algorithm, max_samples or count or 1)
        sizes = np.diff(offsets)
        pack[indices] = np.repeat(np.arange(len(sizes)), sizes)
        place[indices] = np.arange(len(indices)) - np.repeat(offsets[:-1], sizes)
        pack[overlong] = -1
        return Assignment(pack, place, sizes)

    def cost_of(block: slice) -> npt.NDArray[Any]:
        return lengths[block] if multiple == 1 else round_up(lengths[block].astype(np.int64), multiple)

    limit = max_samples or count or 1
    if algorithm == "sequential":
        sizes = _in_order(cost_of, usable, limit, pack, place, empty(count, np.int32))
    else:
        sizes = _longest_first(cost_of, usable, limit, pack, place, algorithm)
    return Assignment(pack, place, sizes)


def _by_pack(assigned: Assignment) -> tuple[Int64, Int64]:
    """`indices` and `offsets` of the PackPlan."""
    offsets = np.zeros(len(assigned.sizes) + 1, dtype=np.int64)
    np.cumsum(assigned.sizes, out=offsets[1:])
    indices = np.empty(int(offsets[-1]), dtype=np.int64)
    for first in range(0, len(assigned.pack), _BLOCK):
        pack = assigned.pack[first : first + _BLOCK]
        own = np.flatnonzero(pack >= 0)
        indices[offsets[pack[own]] + assigned.place[first : first + _BLOCK][own]] = own + first
    return indices, offsets


def _in_order(
    cost_of: Callable[[slice], npt.NDArray[Any]],
    capacity: int,
    max_samples: int,
    pack: npt.NDArray[Any],
    place: Int32,
    costs: Int32,
) -> npt.NDArray[Any]:
    """Place the samples in input order, with room for all tokens in `costs`; else as `_longest_first`."""
    count, total = len(pack), 0
    blocks = [slice(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK)]
    for block in blocks:
        cost = cost_of(block)
        kept = cost[cost <= capacity]
        costs[total : total + len(kept)] = kept
        total += len(kept)
    firsts = next_fit(costs[:total], capacity, max_samples) if max_samples > 1 else None
    done = 0
    for block in blocks:
        kept = np.flatnonzero(cost_of(block) <= capacity)
        sample = np.arange(done, done + len(kept))
        number = sample if firsts is None else np.searchsorted(firsts, sample, side="right") - 1
        pack[block] = -1
        pack[block][kept], place[block][kept] = number, 0 if firsts is None else sample - firsts[number]
        done += len(kept)
    return np.broadcast_to(np.int32(1), total) if firsts is None else np.diff(firsts)


def _longest_first(
    cost_of: Callable[[slice], npt.NDArray[Any]],
    capacity: int,
    max_samples: int,
    pack: npt.NDArray[Any],
    place: Int32,
    algorithm: str,
) -> npt.NDArray[Any]:
    """Place the samples that fit a pack from the longest, in each window.

    Args:
        cost_of: returns the tokens of each sample with its padding, of a range of samples.
        capacity, max_samples: of a pack.
        pack, place: zeros, filled as in `Assignment`.
        algorithm: a valid name.

    Returns:
        Number of samples of each pack, integers (P,).
    """
    window, count = _WINDOW.fullmatch(algorithm), len(pack)
    size = max(count, 1)
    if window:
        # Compared as strings: Python limits the digits of an integer.
        size = int(min(window[1], str(size), key=lambda text: (len(text), text)))
    sizes = [np.zeros(0, dtype=np.int32)]
    packs = 0
    span = max(_BLOCK // size, 1) * size
    for start in range(0, count, span):
        stop = min(start + span, count)
        parts = [slice(first, min(first + _BLOCK, stop)) for first in range(start, stop, _BLOCK)]
        # Small windows are sorted once, many at a time; of a large window, the samples of each length are counted.
        is_sorted = len(parts) == 1
        ordered = _sorted(cost_of(parts[0]), capacity, size)
        if is_sorted:
            lengths, counts, windows = (
                ordered.lengths,
                np.diff(ordered.starts, append=len(ordered.samples)),
                ordered.windows,
            )
        else:
            lengths, counts = _counted(map(cost_of, parts), capacity)
            windows = [0, len(lengths)]
        steps: list[Step] = []
        before = packs
        for first, last in pairwise(windows):
            runs = list(zip(lengths[first:last].tolist(), counts[first:last].tolist(), strict=True))
            if algorithm == "ffd":
                placed = first_fit(runs, capacity, max_samples)
            else:
                placed = best_fit(runs, capacity, max_samples, packs)
            steps += placed.steps
            packs = placed.packs
        places = _Places(steps)
        sizes.append(places.sizes(before, packs))
        following = np.cumsum(counts) - counts  # the next sample of each length in the order of the steps
        for part in parts:
            if not is_sorted:
                ordered = _sorted(cost_of(part), capacity, size)
            own = np.arange(len(lengths)) if is_sorted else np.searchsorted(-lengths, -ordered.lengths)
            of_run = np.diff(ordered.starts, append=len(ordered.samples))
            number = np.arange(len(ordered.samples)) + np.repeat(following[own] - ordered.starts, of_run)
            following[own] += of_run
            pack[part] = -1
            pack[part][ordered.samples], place[part][ordered.samples] = places.find(number)
    return np.concatenate(sizes)


class _Sorted(NamedTuple):
    """Samples of some windows that fit a pack, by window, then from the longest; equal lengths are in input order.

    Attributes:
        samples: int64 (m,), their indices.
        lengths: int64 (r,), length of each run of equal lengths in a window.
        starts: int64 (r,), index in `samples` of the first sample of each run.
        windows: the first run of each window, and r.
    """

    samples: Int64
    lengths: Int64
    starts: Int64
    windows: list[int]


def _sorted(cost: npt.NDArray[Any], capacity: int, size: int) -> _Sorted:
    """Sort samples; integers (n,) with at most `size` samples per window."""
    kept = np.flatnonzero(cost <= capacity)
    # Numbers of unused tokens and index are sorted: `argsort` needs more time.
    bits = np.uint64(max(len(cost) - 1, 1).bit_length())
    keys = ((capacity - cost[kept].astype(np.int64)).astype(np.uint64) << bits) | kept.astype(np.uint64)
    bounds = np.searchsorted(kept, [*range(0, len(cost), size), len(cost)])
    for first, last in pairwise(bounds.tolist()):
        keys[first:last].sort()
    is_start = np.ones(len(keys), dtype=bool)
    unused = keys >> bits
    is_start[1:] = unused[1:] != unused[:-1]
    is_start[bounds[:-1][bounds[:-1] < len(keys)]] = True
    starts = np.flatnonzero(is_start)
    return _Sorted(
        samples=(keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64),
        lengths=capacity - unused[starts].astype(np.int64),
        starts=starts,
        windows=np.searchsorted(starts, bounds).tolist(),
    )


def _counted(costs: Iterable[npt.NDArray[Any]], capacity: int) -> tuple[Int64, Int64]:
    """Different lengths of the samples that fit a pack, from the longest, and how many samples have each length."""
    total: Counter[int] = Counter()
    for cost in costs:
        lengths, counts = np.unique(cost[cost <= capacity], return_counts=True)
        total.update(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
    longest_first = sorted(total, reverse=True)
    return np.array(longest_first, dtype=np.int64), np.array(
        [total[length] for length in longest_first], dtype=np.int64
    )


def _packs_of_groups(
    groups: npt.ArrayLike, cost: Int64 | Int32, capacity: int, algorithm: str, max_samples: int
) -> tuple[Int64, Int64, Int64]:
    """Place groups like samples, and return `indices`, `offsets` and `overlong` of the PackPlan.

    Args:
        groups: integers (n,), key of the group of each sample.
        cost: integers (n,), tokens of each sample with its padding.
        capacity, algorithm, max_samples: as for `assign`.
    """
    keys = np.asarray(groups)
    if keys.shape != cost.shape or (keys.size and keys.dtype.kind not in "iu"):
        raise ValueError(f"`groups` must be integers of shape {cost.shape}, got {keys.dtype} of {keys.shape}.")
    # Units, in the order of their first samples: unit u is samples members[starts[u]:starts[u] + sizes[u]].
    is_sorted = bool((keys[1:] >= keys[:-1]).all())
    members: Any = slice(None) if is_sorted else np.argsort(keys, kind="stable")
    joined = keys[members]
    starts = np.concatenate([[0], np.flatnonzero(joined[1:] != joined[:-1]) + 1])[: len(keys)]
    sizes = np.diff(starts, append=len(keys))
    tokens = np.add.reduceat(cost[members], starts, dtype=np.int64) if len(keys) else np.zeros(0, dtype=np.int64)
    if not is_sorted:
        order = np.argsort(members[starts])
        starts, sizes, tokens = starts[order], sizes[order], tokens[order]
    if max_samples >= len(cost):
        placed, ends = _by_pack(assign(tokens, capacity, algorithm, max_samples))
    else:
        # The algorithms count units, not their samples: with a limit, the units of each size are placed on their own.
        units, bounds = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
        for size in np.unique(sizes[sizes <= max_samples]).tolist():
            part = np.flatnonzero(sizes == size)
            indices, offsets = _by_pack(assign(tokens[part], capacity, algorithm, max_samples // size))
            bounds.append(offsets[1:] + sum(map(len, units)))
            units.append(part[indices])
        placed, ends = np.concatenate(units), np.concatenate(bounds)
    samples = _ranges(starts[placed], sizes[placed])
    offsets = np.concatenate([[0], np.cumsum(sizes[placed])])[ends]
    is_placed = np.zeros(len(sizes), dtype=bool)
    is_placed[placed] = True
    overlong = _ranges(starts[~is_placed], sizes[~is_placed])
    if not is_sorted:
        samples, overlong = members[samples], np.sort(members[overlong])
    return samples, offsets, overlong


def _ranges(starts: Int64, sizes: Int64) -> Int64:
    """The integers of all ranges, int64 (sum of sizes,): `starts[i]` to `starts[i] + sizes[i]`."""
    ends = np.cumsum(sizes)
    steps = np.ones(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    steps[:1] = starts[:1]
    steps[ends[:-1]] = starts[1:] - starts[:-1] - sizes[:-1] + 1  # from the last integer of a range to the next range
    return np.cumsum(steps, out=steps)


class _Places:
    """Packs and places of the samples that steps place.

    Args:
        steps: in the order of the samples.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._first, self._step, self._count, self._share, self._before = (
            np.array(steps, dtype=np.int64).reshape(-1, 5).T.copy()
        )
        self._ends = np.cumsum(self._count * self._share)
        self._starts = self._ends - self._count * self._share

    def sizes(self, start: int, stop: int) -> Int32:
        """Number of samples of each pack from `start` up to `stop`, int32 (stop - start,)."""
        lowest = np.minimum(self._first, self._first + self._step * (self._count - 1)) - start
        share = self._share.astype(np.int32)
        change = np.zeros(stop - start + 1, dtype=np.int32)  # of the samples from one pack to the next
        np.add.at(change, lowest, share)
        np.subtract.at(change, lowest + self._count, share)
        return np.cumsum(change[:-1], dtype=np.int32, out=change[:-1])

    def find(self, number: Int64) -> tuple[Int64, Int64]:
        """Pack and place in the pack of samples with these numbers in the order of the steps."""
        own = np.searchsorted(self._ends, number, side="right")
        share = self._share[own]
        place = number - self._starts[own]
        pack = place // share
        place -= pack * share
        place += self._before[own]
        pack *= self._step[own]
        pack += self._first[own]
        return pack, place


def _checked_lengths(lengths: npt.ArrayLike) -> Int32:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"`lengths` must have one dimension, got shape {array.shape}.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"`lengths` must be integers, got {array.dtype}.")
    shortest, longest = int(array.min()), int(array.max())
    if shortest < 1:
        raise ValueError(f"`lengths[{int(np.argmin(array))}]` must be at least 1, got {shortest}.")
    if longest > _MOST_TOKENS:
        raise ValueError(f"`lengths[{int(np.argmax(array))}]` must be at most {_MOST_TOKENS} (int32), got {longest}.")
    return np.ascontiguousarray(array, dtype=np.int32)
