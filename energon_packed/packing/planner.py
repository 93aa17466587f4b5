"""`pack_lengths`: sample lengths, row capacity and the name of an algorithm -> PackPlan.

Numba and the kernels are imported by the first plan, so that checking the name of an algorithm stays cheap.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.compiled import compile_now
from energon_packed.errors import ConfigError
from energon_packed.packing.placement import Algorithm, Int32, Int64, Placement

_MOST_SAMPLES = _MOST_TOKENS = 2**31 - 1  # int32, which the kernels use
_LARGE = 1 << 20  # tokens; kernels need about eight bytes for each token of the capacity
_ALGORITHMS = ("bfd", "ffd", "sequential")
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
        # Source position in the old `indices` for each entry of the new array.
        source = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][order] - offsets[:-1], counts)
        return PackPlan(
            indices=self.indices[source],
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
            or all of them in `overlong`. A window of `window_N` has N groups. With `max_samples`, groups of different
            numbers of samples do not share a pack. None without groups.

    Runs as compiled code that releases the GIL; uses about 24 bytes per sample in addition to `lengths`.

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
    from energon_packed.packing.kernels import group_by_pack

    array = _checked_lengths(lengths)
    cost = array
    usable = int(capacity) // multiple * multiple
    if multiple > 1:
        cost = ((array.astype(np.int64) + multiple - 1) // multiple * multiple).clip(max=_MOST_TOKENS).astype(np.int32)
    limit = max_samples or len(array) or 1
    if groups is None:
        indices, offsets = group_by_pack(*_place(cost, usable, algorithm, limit))
        overlong = np.flatnonzero(cost > usable).astype(np.int64)
    else:
        indices, offsets, overlong = _place_units(_Units.of(groups, cost), usable, algorithm, limit)
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


class _Units(NamedTuple):
    """Groups of samples, which are placed like samples.

    Attributes:
        members: int64 (n,), samples, group after group; None for samples in that order.
        bounds: int32 (U+1,), group u is `members[bounds[u]:bounds[u + 1]]`.
        cost: int32 (U,), tokens of each group.
    """

    members: Int64 | None
    bounds: Int32
    cost: Int32

    @classmethod
    def of(cls, groups: npt.ArrayLike, cost: Int32) -> "_Units":
        """Join the samples of each group, in the order of the first samples of the groups."""
        from energon_packed.packing.kernels import group_by_pack, join_runs

        keys = np.asarray(groups)
        if keys.shape != cost.shape or (keys.size and keys.dtype.kind not in "iu"):
            raise ValueError(f"`groups` must be integers of shape {cost.shape}, got {keys.dtype} of {keys.shape}.")
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        if (keys[1:] >= keys[:-1]).all():
            return cls(None, *join_runs(keys, cost))
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        rank = np.empty(len(first), dtype=np.int32)
        rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
        unit_of = rank[inverse]
        members, _ = group_by_pack(np.arange(len(keys), dtype=np.int32), unit_of, len(first))
        return cls(members, *join_runs(unit_of[members].astype(np.int64), cost[members]))


def _place(cost: Int32, usable: int, algorithm: str, max_samples: int) -> Placement:
    space = usable
    if usable > _LARGE:  # the memory of kernels grows with the capacity; no pack can be larger than all samples
        space = min(usable, max(int(cost[cost <= usable].sum(dtype=np.int64)), 1))
    return _algorithm(algorithm)(cost, space, max_samples)


def _place_units(units: _Units, usable: int, algorithm: str, max_samples: int) -> tuple[Int64, Int64, Int64]:
    """Place groups in packs, and return `indices`, `offsets` and `overlong` of a PackPlan."""
    from energon_packed.packing.kernels import group_runs_by_pack

    if max_samples >= units.bounds[-1]:
        is_overlong, placement = units.cost > usable, _place(units.cost, usable, algorithm, max_samples)
    else:
        # The kernels count units, not their samples: with a limit, the units of each size are placed on their own.
        sizes = np.diff(units.bounds)
        is_overlong = (units.cost > usable) | (sizes > max_samples)
        orders, packs_at, packs = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int32)], 0
        for size in np.unique(sizes[sizes <= max_samples]).tolist():
            part = np.flatnonzero(sizes == size).astype(np.int32)
            order, pack_at, count = _place(units.cost[part], usable, algorithm, max_samples // size)
            orders.append(part[order])
            packs_at.append(pack_at + np.int32(packs))
            packs += count
        placement = Placement(np.concatenate(orders), np.concatenate(packs_at), packs)
    indices, offsets = group_runs_by_pack(*placement, units.bounds)
    rejected = np.flatnonzero(is_overlong)
    firsts, counts = units.bounds[rejected].astype(np.int64), units.bounds[rejected + 1] - units.bounds[rejected]
    overlong = np.arange(counts.sum(dtype=np.int64)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
    if units.members is not None:
        indices, overlong = units.members[indices], np.sort(units.members[overlong])
    return indices, offsets, overlong


def algorithm_names() -> list[str]:
    """Names that `pack_lengths` accepts; N in `window_N` is any integer >= 1."""
    return [*_ALGORITHMS, "window_N"]


def check_algorithm(name: str) -> None:
    """Raise a ConfigError that lists the valid names if the algorithm is unknown."""
    if name not in _ALGORITHMS and not _WINDOW.fullmatch(name):
        raise ConfigError(f"unknown algorithm {name!r}; use one of {', '.join(algorithm_names())}")


def load_kernels() -> None:
    """Load the compiled kernels ahead of time: about half a second, or several seconds for the first compilation."""
    compile_now()
    pack_lengths([1, 2], 2)


def _algorithm(name: str) -> Algorithm:
    from energon_packed.packing import kernels

    if match := _WINDOW.fullmatch(name):
        # Compared as strings: Python limits the digits of an integer, and no plan needs a larger window.
        return kernels.windowed(int(min(match.group(1), str(_MOST_SAMPLES), key=lambda text: (len(text), text))))
    return kernels.ALGORITHMS[name]


def _checked_lengths(lengths: npt.ArrayLike) -> Int32:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"`lengths` must have one dimension, got shape {array.shape}.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if len(array) > _MOST_SAMPLES:
        raise ValueError(f"`lengths` must have at most {_MOST_SAMPLES} entries, got {len(array)}. Plan slices.")
    if array.dtype.kind not in "iu":
        raise ValueError(f"`lengths` must be integers, got {array.dtype}.")
    shortest, longest = int(array.min()), int(array.max())
    if shortest < 1:
        raise ValueError(f"`lengths[{int(np.argmin(array))}]` must be at least 1, got {shortest}.")
    if longest > _MOST_TOKENS:
        raise ValueError(f"`lengths[{int(np.argmax(array))}]` must be at most {_MOST_TOKENS} (int32), got {longest}.")
    return np.ascontiguousarray(array, dtype=np.int32)
