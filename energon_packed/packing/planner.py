"""`pack_lengths`: sample lengths, row capacity and the name of an algorithm -> PackPlan.

Numba and the kernels are imported by the first plan, so that checking the name of an algorithm stays cheap.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.compiled import compile_now
from energon_packed.errors import ConfigError
from energon_packed.packing.placement import Algorithm, Int32, Int64

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

    Runs as compiled code that releases the GIL; uses about 24 bytes per sample in addition to `lengths`.

    Raises:
        ConfigError: an argument is out of range, or the algorithm is unknown (the message lists the valid names).
        ValueError: `lengths` is not an array of integers >= 1 with one dimension.
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
    space = usable
    if usable > _LARGE:  # the memory of kernels grows with the capacity; no pack can be larger than all samples
        space = min(usable, max(int(cost[cost <= usable].sum(dtype=np.int64)), 1))
    placement = _algorithm(algorithm)(cost, space, max_samples or len(array) or 1)
    indices, offsets = group_by_pack(*placement)
    overlong = np.flatnonzero(cost > usable).astype(np.int64)
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
