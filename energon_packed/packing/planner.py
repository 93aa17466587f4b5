"""`pack_lengths`: sample lengths, row capacity and the name of an algorithm -> PackPlan.

The algorithms work on counts of lengths (placing.py). Here the samples of each length, in input order, get the places.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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

    Needs at most 16 bytes of memory per sample at a time beside `lengths` of int32, with `seed` 19 and with `multiple`
    27; the plan has 8, and 8 per pack. `window_N` needs 28, as its packs have many patterns. `groups` need 80.
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
    usable = int(capacity) // multiple * multiple
    cost = array if multiple == 1 else round_up(array.astype(np.int64), multiple)
    limit = max_samples or len(array) or 1
    if groups is None:
        indices, offsets = _packs(cost, usable, algorithm, limit)
        overlong = np.flatnonzero(cost > usable)
    else:
        indices, offsets, overlong = _packs_of_groups(groups, cost, usable, algorithm, limit)
    plan = PackPlan(
        indices=indices,
        offsets=offsets,
        overlong=overlong,
        tokens=int(array.sum(dtype=np.int64) - array[overlong].sum(dtype=np.int64)),
        capacity=int(capacity),
    )
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


def _packs(cost: Int64 | Int32, capacity: int, algorithm: str, max_samples: int) -> tuple[Int64, Int64]:
    """Place the samples that fit a pack.

    Args:
        cost: integers (n,), tokens of each sample with its padding.
        capacity, max_samples: of a pack.
        algorithm: a valid name.

    Returns:
        `indices` and `offsets` of the PackPlan.
    """
    if algorithm == "sequential":
        kept = np.flatnonzero(cost <= capacity)
        return kept, next_fit(cost if len(kept) == len(cost) else cost[kept], capacity, max_samples)
    window, size = _WINDOW.fullmatch(algorithm), max(len(cost), 1)
    if window:
        # Compared as strings: Python limits the digits of an integer.
        size = int(min(window[1], str(size), key=lambda text: (len(text), text)))
    order, starts, bounds = _longest_first(cost, capacity, size)
    lengths, counts = cost[order[starts]], np.diff(starts, append=len(order))
    indices = np.empty(len(order), dtype=np.int64)
    sizes: list[Int64] = [np.zeros(0, dtype=np.int64)]
    steps: list[Step] = []
    done = packs = 0  # samples that have a place, and packs
    # Each window has packs of its own. Together, windows have more steps than fit in memory.
    for first, last in pairwise(np.searchsorted(starts, bounds).tolist()):
        runs = list(zip(lengths[first:last].tolist(), counts[first:last].tolist(), strict=True))
        if algorithm == "ffd":
            placed = first_fit(runs, capacity, max_samples)
        else:
            placed = best_fit(runs, capacity, max_samples, packs)
        steps += placed.steps
        if len(steps) >= _BLOCK or last == len(starts):
            stop = int(starts[last]) if last < len(starts) else len(order)
            before = sum(map(len, sizes))
            sizes.append(_place(order[done:stop], steps, before, placed.packs, indices[done:stop]))
            steps, done = [], stop
        packs = placed.packs
    return indices, np.cumsum(np.concatenate([[0], *sizes]))


def _longest_first(cost: Int64 | Int32, capacity: int, size: int) -> tuple[Any, Int64, list[int]]:
    """Sort the samples that fit a pack by window, then from the longest; equal lengths are in input order.

    Args:
        cost, capacity: as for `_packs`.
        size: samples of a window.

    Returns:
        The samples, int32 or int64 (m,); in them, the places at which a length or window starts, int64 (r,), and the
        places at which each window starts, and m.
    """
    # Numbers of unused tokens and index are sorted in place: `argsort` needs three times the memory.
    bits = np.uint64(max(len(cost) - 1, 1).bit_length())
    keys = np.empty(len(cost), dtype=np.uint64)
    bounds = [0]
    for start in range(0, len(cost), size):
        stop, count = min(start + size, len(cost)), bounds[-1]
        for first in range(start, stop, _BLOCK):
            block = cost[first : min(first + _BLOCK, stop)]
            kept = np.flatnonzero(block <= capacity)
            key = (capacity - block[kept].astype(np.int64)).astype(np.uint64)
            key <<= bits
            key |= (kept + first).astype(np.uint64)
            keys[count : count + len(kept)] = key
            count += len(kept)
        keys[bounds[-1] : count].sort()
        bounds.append(count)
    total = bounds[-1]
    order = np.empty(total, dtype=np.int32 if len(cost) < 1 << 31 else np.int64)
    starts = [np.array(bounds[:-1], dtype=np.int64)]
    mask = (np.uint64(1) << bits) - np.uint64(1)
    for first in range(0, total, _BLOCK):
        stop = min(first + _BLOCK, total)
        order[first:stop] = keys[first:stop] & mask
        starts.append(np.flatnonzero(np.diff(keys[first : stop + 1] >> bits)) + first + 1)
    places = np.unique(np.concatenate(starts))
    return order, places[places < total], bounds


def _packs_of_groups(
    groups: npt.ArrayLike, cost: Int64 | Int32, capacity: int, algorithm: str, max_samples: int
) -> tuple[Int64, Int64, Int64]:
    """Place groups like samples, and return `indices`, `offsets` and `overlong` of the PackPlan.

    Args:
        groups: integers (n,), key of the group of each sample.
        cost, capacity, algorithm, max_samples: as for `_packs`.
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
        placed, ends = _packs(tokens, capacity, algorithm, max_samples)
    else:
        # The algorithms count units, not their samples: with a limit, the units of each size are placed on their own.
        units, bounds = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
        for size in np.unique(sizes[sizes <= max_samples]).tolist():
            part = np.flatnonzero(sizes == size)
            indices, offsets = _packs(tokens[part], capacity, algorithm, max_samples // size)
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


def _place(order: Any, steps: list[Step], first_pack: int, packs: int, out: Int64) -> Int64:
    """Put the samples, integers (m,) in the order of the steps, into the packs from `first_pack` up to `packs`.

    Args:
        order, steps: samples, and where they go.
        first_pack, packs: range of the packs.
        out: int64 (m,), filled with the samples of these packs, pack after pack.

    Returns:
        Number of samples of each pack, int64 (packs - first_pack,).
    """
    first, step, count, share, before = np.array(steps, dtype=np.int64).reshape(-1, 5).T
    first = first - first_pack
    lowest = np.minimum(first, first + step * (count - 1))
    change = np.zeros(packs - first_pack + 1, dtype=np.int64)  # of the samples from one pack to the next
    np.add.at(change, lowest, share)
    np.subtract.at(change, lowest + count, share)
    sizes = np.cumsum(change[:-1])
    offsets = np.cumsum(sizes) - sizes
    ends = np.cumsum(count * share)
    starts = ends - count * share
    for low in range(0, len(order), _BLOCK):  # in blocks, as a sample needs several numbers
        high = min(low + _BLOCK, len(order))
        own = slice(*np.searchsorted(ends, [low, high - 1], side="right").tolist())
        own = slice(own.start, own.stop + 1)
        of_step = np.minimum(ends[own], high) - np.maximum(starts[own], low)
        place = np.arange(low, high) - np.repeat(starts[own], of_step)  # of a sample in its step
        samples = np.repeat(share[own], of_step)
        pack = place // samples
        place -= pack * samples
        place += np.repeat(before[own], of_step)  # of a sample in its pack
        pack *= np.repeat(step[own], of_step)
        pack += np.repeat(first[own], of_step)
        place += offsets[pack]
        out[place] = order[low:high]
    return sizes


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
