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

from energon_packed import arrays
from energon_packed.arrays import blocks
from energon_packed.errors import ConfigError
from energon_packed.options import as_integer, optional_integer
from energon_packed.packing.placing import Step, best_fit, first_fit, next_fit
from energon_packed.seqlens import round_up

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
_MOST_TOKENS = 2**31 - 1  # int32, dtype of lengths
_ALGORITHMS = ("bfd", "ffd", "sequential")
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

    Needs at most 30 bytes of memory per sample at a time beside `lengths` of int32; the plan has 8,
    and 8 per pack. `groups` need up to 72.
    `energon_packed.packing.plan_counts` plans any number of samples in little memory.

    Raises:
        ConfigError: an argument is out of range, or the algorithm is unknown (the message lists the valid names).
        ValueError: `lengths` is not an array of integers >= 1 with one dimension, or `groups` has another shape.
    """
    capacity, multiple = as_integer(capacity, "capacity"), as_integer(multiple, "multiple")
    max_samples = optional_integer(max_samples, "max_samples")
    if capacity > _MOST_TOKENS:
        raise ConfigError(f"a row must have at most {_MOST_TOKENS} tokens (int32), got {capacity}.")
    check_algorithm(algorithm)
    array = _checked_lengths(lengths)
    pack, place, sizes = assign(array, capacity, algorithm, max_samples, multiple, groups)
    overlong = np.flatnonzero(pack < 0)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    del sizes
    plan = PackPlan(
        indices=_by_pack(pack, place, offsets),
        offsets=offsets,
        overlong=overlong,
        tokens=int(array.sum(dtype=np.int64) - array[overlong].sum(dtype=np.int64)),
        capacity=capacity,
    )
    del pack, place
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
        sizes: int32 (P,), samples of each pack.
    """

    pack: npt.NDArray[Any]
    place: Int32
    sizes: Int32


def assign(
    lengths: npt.NDArray[Any],
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
        empty: makes the arrays of all samples.
    """
    count = len(lengths)
    out = Assignment(empty(count, index_type(count)), empty(count, np.int32), empty(count + 1, np.int32))
    if groups is not None:
        return _assign_groups(lengths, capacity, algorithm, max_samples, multiple, np.asarray(groups), out, empty)
    packs = _assign(lengths, capacity, algorithm, max_samples, multiple, out)
    return out._replace(sizes=out.sizes[:packs])


def count_packs(
    lengths: Int32, capacity: int, algorithm: str, max_samples: int | None = None, multiple: int = 1
) -> int:
    """Number of packs of `pack_lengths`, in memory that does not grow with the number of samples."""
    check_algorithm(algorithm)
    return _assign(lengths, capacity, algorithm, max_samples, multiple, None)


def index_type(count: int) -> Any:
    """Type of indices of `count` entries: half the memory of int64, for arrays of almost any size."""
    return np.int32 if count < 1 << 31 else np.int64


def first_of_group(groups: npt.NDArray[np.integer], empty: Allocate) -> Int64:
    """Index of the first sample with the same key, for each sample: int64 (n,).

    Args:
        groups: integers (n,), keys.
        empty: makes arrays of 8 bytes per sample.
    """
    # A key has the place of its first copy in the sorted keys. The keys of a block are looked up in their order, so
    # that files are read in order.
    ordered, firsts, first = (empty(len(groups), dtype) for dtype in (groups.dtype, np.int64, np.int64))
    ordered[:] = groups
    ordered.sort()
    for block in blocks(len(groups)):
        keys, at, key_of = np.unique(groups[block], return_index=True, return_inverse=True)
        place = np.searchsorted(ordered, keys)
        found = firsts[place]  # + 1; 0 for a key that no earlier block has
        firsts[place] = np.where(found == 0, at + block.start + 1, found)
        first[block] = (firsts[place] - 1)[key_of]
    return first


def _by_pack(pack: npt.NDArray[Any], place: Int32, offsets: Int64) -> Int64:
    """`indices` of the PackPlan."""
    indices = np.empty(int(offsets[-1]), dtype=np.int64)
    for block in blocks(len(pack)):
        own = np.flatnonzero(pack[block] >= 0) + block.start
        indices[offsets[pack[own]] + place[own]] = own
    return indices


def _assign(
    lengths: npt.NDArray[Any],
    capacity: int,
    algorithm: str,
    max_samples: int | None,
    multiple: int,
    out: Assignment | None,
) -> int:
    """Place samples without groups in `out`, whose arrays are zeros, and return the number of packs.

    Args:
        lengths, capacity, algorithm, max_samples, multiple: as for `assign`.
        out: with `sizes` of n + 1 entries; None to count the packs.
    """

    def cost_of(block: slice) -> npt.NDArray[Any]:
        return lengths[block] if multiple == 1 else round_up(lengths[block].astype(np.int64), multiple)

    usable, limit = capacity // multiple * multiple, max_samples or len(lengths) or 1
    if algorithm == "sequential":
        return _in_order(cost_of, len(lengths), usable, limit, out)
    return _longest_first(cost_of, len(lengths), usable, limit, algorithm, out)


def _in_order(
    cost_of: Callable[[slice], npt.NDArray[Any]],
    count: int,
    capacity: int,
    max_samples: int,
    out: Assignment | None,
) -> int:
    """Place the samples in input order; arguments as for `_longest_first`."""
    packs, tokens, samples = 0, 0, max_samples  # of the last pack: before the first pack, a full one
    for block in blocks(count):
        cost = cost_of(block)
        kept = np.flatnonzero(cost <= capacity)
        cost = cost[kept]
        firsts = next_fit(cost, capacity, max_samples, tokens, samples)
        sizes = np.diff(firsts, prepend=0, append=len(kept))  # of the samples of the block: of the last pack, then new
        if out is not None:
            out.pack[block] = -1
            out.pack[block][kept] = np.repeat(np.arange(packs - 1, packs + len(firsts)), sizes)
            out.place[block][kept] = np.arange(len(kept)) - np.repeat(np.append(-samples, firsts), sizes)
            out.sizes[packs : packs + len(firsts)] = sizes[1:]
            if packs:
                out.sizes[packs - 1] += sizes[0]
        if len(firsts):
            tokens = samples = 0
        last = cost[firsts[-1] :] if len(firsts) else cost
        tokens, samples, packs = tokens + int(last.sum(dtype=np.int64)), samples + len(last), packs + len(firsts)
    return packs


def _longest_first(
    cost_of: Callable[[slice], npt.NDArray[Any]],
    count: int,
    capacity: int,
    max_samples: int,
    algorithm: str,
    out: Assignment | None,
) -> int:
    """Place the samples that fit a pack from the longest, in each window.

    Args:
        cost_of: returns the tokens of each sample with its padding, of a range of samples.
        count: number of samples.
        capacity, max_samples: of a pack.
        algorithm: a valid name.
        out: as for `_assign`.

    Returns:
        Number of packs.
    """
    window, size, packs = _WINDOW.fullmatch(algorithm), max(count, 1), 0
    if window:
        # Compared as strings: Python limits the digits of an integer.
        size = int(min(window[1], str(size), key=lambda text: (len(text), text)))
    span = max(arrays.BLOCK // size, 1) * size
    for start in range(0, count, span):
        stop = min(start + span, count)
        parts = [slice(first, min(first + arrays.BLOCK, stop)) for first in range(start, stop, arrays.BLOCK)]
        # Small windows are sorted once, many at a time; of a large window, the samples of each length are counted.
        is_sorted = len(parts) == 1
        if is_sorted:
            ordered = _sorted(cost_of(parts[0]), capacity, size)
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
        if out is None:
            continue
        places = _Places(steps)
        places.add_sizes(before, out.sizes[before : packs + 1])
        following = np.cumsum(counts) - counts  # the next sample of each length in the order of the steps
        for part in parts:
            if not is_sorted:
                ordered = _sorted(cost_of(part), capacity, size)
            own = np.arange(len(lengths)) if is_sorted else np.searchsorted(-lengths, -ordered.lengths)
            of_run = np.diff(ordered.starts, append=len(ordered.samples))
            out.pack[part] = -1
            out.pack[part][ordered.samples], out.place[part][ordered.samples] = places.find(following[own], of_run)
            following[own] += of_run
    return packs


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
        kept = cost[cost <= capacity]
        if capacity < arrays.BLOCK:  # `unique` sorts
            of_length = np.bincount(kept)
            lengths = np.flatnonzero(of_length)
            counts = of_length[lengths]
        else:
            lengths, counts = np.unique(kept, return_counts=True)
        total.update(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
    longest_first = sorted(total, reverse=True)
    return np.array(longest_first, dtype=np.int64), np.array(
        [total[length] for length in longest_first], dtype=np.int64
    )


def _assign_groups(
    lengths: npt.NDArray[Any],
    capacity: int,
    algorithm: str,
    max_samples: int | None,
    multiple: int,
    groups: npt.NDArray[Any],
    out: Assignment,
    empty: Allocate,
) -> Assignment:
    """Place groups like samples, and their samples in `out`, whose arrays are zeros; arguments as for `assign`."""
    if groups.shape != lengths.shape or (groups.size and groups.dtype.kind not in "iu"):
        raise ValueError(f"`groups` must be integers of shape {lengths.shape}, got {groups.dtype} of {groups.shape}.")
    count, units = len(lengths), 0
    first = first_of_group(groups, empty)
    unit = empty(count, index_type(count))  # number of the group of each sample, in the order of their first samples
    for block in blocks(count):
        is_first = first[block] == np.arange(block.start, block.stop)
        new = int(np.count_nonzero(is_first))
        unit[block][is_first] = np.arange(units, units + new)
        units += new
    tokens, sizes = empty(units, np.int64), empty(units, np.int32)
    for block in blocks(count):
        own = unit[first[block]]
        unit[block] = own
        # Samples of a group in the block, after those in earlier blocks.
        order = np.argsort(own, kind="stable")
        of_unit, number = np.unique(own, return_counts=True)
        starts = np.repeat(np.cumsum(number) - number, number)
        out.place[block][order] = sizes[own[order]] + np.arange(len(own)) - starts
        sizes[of_unit] += number.astype(np.int32)
        np.add.at(tokens, own, round_up(lengths[block], multiple))
    limit = None if max_samples is None or max_samples >= count else max_samples
    usable = capacity // multiple * multiple
    pack, place, per_pack = _assign_units(tokens, sizes, usable, algorithm, limit, empty)
    # The groups by pack, as `offsets` of a PackPlan, and the samples before each.
    offsets, before = empty(len(per_pack) + 1, np.int64), empty(units + 1, np.int64)
    offsets[1:] = per_pack
    _accumulate(offsets)
    by_place = empty(units, np.int64)
    for block in blocks(units):
        own = np.flatnonzero(pack[block] >= 0)
        by_place[block][own] = offsets[pack[block][own]] + place[block][own]
        before[by_place[block][own] + 1] = sizes[block][own]
    _accumulate(before)
    for block in blocks(count):
        own = unit[block]
        out.pack[block] = pack[own]
        out.place[block] += (before[by_place[own]] - before[offsets[pack[own]]]).astype(np.int32)
    for block in blocks(len(per_pack)):
        ends = offsets[block.start : block.stop + 1]
        out.sizes[block] = np.diff(before[ends])
    return out._replace(sizes=out.sizes[: len(per_pack)])


def _assign_units(
    tokens: Int64, sizes: Int32, capacity: int, algorithm: str, max_samples: int | None, empty: Allocate
) -> Assignment:
    """Place groups.

    Args:
        tokens, sizes: int64 (u,), int32 (u,), tokens and samples of each group.
        capacity, algorithm, max_samples, empty: as for `assign`.
    """
    if max_samples is None:
        return assign(tokens, capacity, algorithm, empty=empty)
    # The algorithms count groups, not their samples: with a limit, the groups of each size are placed on their own.
    units, packs = len(sizes), 0
    out = Assignment(empty(units, index_type(units)), empty(units, np.int32), empty(units, np.int32))
    for block in blocks(units):
        out.pack[block] = -1
    for size in sorted(set().union(*[np.unique(sizes[block]).tolist() for block in blocks(units)])):
        if size > max_samples:
            break
        part, count = empty(units, index_type(units)), 0
        for block in blocks(units):
            own = np.flatnonzero(sizes[block] == size)
            part[count : count + len(own)] = own + block.start
            count += len(own)
        own_tokens = empty(count, np.int64)
        for block in blocks(count):
            own_tokens[block] = tokens[part[block]]
        placed = assign(own_tokens, capacity, algorithm, max_samples // size, empty=empty)
        for block in blocks(count):
            own = part[block]
            out.pack[own] = np.where(placed.pack[block] < 0, -1, placed.pack[block] + packs)
            out.place[own] = placed.place[block]
        out.sizes[packs : packs + len(placed.sizes)] = placed.sizes
        packs += len(placed.sizes)
    return out._replace(sizes=out.sizes[:packs])


def _accumulate(numbers: npt.NDArray[Any]) -> None:
    """Add to each number all numbers before it."""
    for block in blocks(len(numbers)):
        numbers[block.start] += numbers[block.start - 1] if block.start else 0
        numbers[block] = np.cumsum(numbers[block], dtype=numbers.dtype)


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

    def add_sizes(self, start: int, sizes: Int32) -> None:
        """Write the number of samples of each pack from `start` to zeros, int32 (packs + 1,)."""
        lowest = np.minimum(self._first, self._first + self._step * (self._count - 1)) - start
        share = self._share.astype(np.int32)
        np.add.at(sizes, lowest, share)  # the change of the samples from one pack to the next
        np.subtract.at(sizes, lowest + self._count, share)
        _accumulate(sizes)

    def find(self, first: Int64, counts: Int64) -> tuple[Int64, Int64]:
        """Pack and place in the pack of consecutive samples, in the order of the steps.

        Args:
            first, counts: int64 (r,), number of the first sample, and how many, at least one.
        """
        # A part of a run is in one step: what samples of a part share is found once.
        last = first + counts
        step = np.searchsorted(self._ends, first, side="right")
        parts = np.searchsorted(self._ends, last - 1, side="right") - step + 1
        run = np.repeat(np.arange(len(first)), parts)
        step = np.arange(len(run)) + (step - np.cumsum(parts) + parts)[run]
        start = np.maximum(first[run], self._starts[step])
        sizes = np.minimum(last[run], self._ends[step]) - start

        place = np.repeat(start - self._starts[step] - np.cumsum(sizes) + sizes, sizes)
        place += np.arange(len(place))
        share = np.repeat(self._share[step], sizes)
        pack = place // share
        place -= pack * share
        place += np.repeat(self._before[step], sizes)
        pack *= np.repeat(self._step[step], sizes)
        pack += np.repeat(self._first[step], sizes)
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
