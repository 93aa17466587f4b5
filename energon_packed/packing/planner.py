"""`pack_lengths`: check the input, choose an algorithm by name, return a PackPlan."""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.packing import kernels
from energon_packed.packing.plan import PackPlan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Algorithm = Callable[[Int32, int, int], tuple[Int32, Int64, int]]
"""(lengths int32 (n,), capacity, max_samples) -> (pack_of int32 (n,), placing order int64, packs); samples
longer than `capacity` are in no pack and not in the order."""

_WINDOW = re.compile(r"window_([1-9][0-9]*)")


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
        lengths: tokens of each sample, whole numbers >= 1, shape (n,).
        capacity: tokens that fit in one row.
        algorithm: `bfd` (best fit decreasing), `ffd` (first fit decreasing), `sequential` (the order is kept) or
            `window_N` (best fit decreasing inside consecutive windows of N samples).
        max_samples: most samples in one pack; None for no limit.
        multiple: each sample is rounded up to a multiple of this many tokens when its space is counted.
        seed: shuffles the order of the packs; None keeps the order in which they were opened.

    Raises:
        ConfigError: an argument out of range, or an unknown algorithm (the message lists the valid names).
        ValueError: lengths that are not whole numbers >= 1 in one dimension.
    """
    for name, value in (("capacity", capacity), ("multiple", multiple), ("max_samples", max_samples)):
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ConfigError(f"{name} must be a whole number >= 1, not {value!r}")
    if capacity > np.iinfo(np.int32).max:
        raise ConfigError(f"capacity {capacity} does not fit int32; use at most {np.iinfo(np.int32).max}")
    place = _algorithm(algorithm)
    array = _checked_lengths(lengths)
    cost = array
    usable = int(capacity) // multiple * multiple
    if multiple > 1:
        cost = ((array.astype(np.int64) + multiple - 1) // multiple * multiple).clip(max=2**31 - 1).astype(np.int32)
    pack_of, order, packs = place(cost, usable, max_samples or len(array) or 1)
    indices, offsets = kernels.group_by_pack(pack_of, order, packs)
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
    """Names that `pack_lengths` accepts; N in `window_N` stands for any whole number >= 1."""
    return [*_ALGORITHMS, "window_N"]


def _checked_lengths(lengths: npt.ArrayLike) -> Int32:
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.ndim != 1:
        raise ValueError(f"lengths must have one dimension, not shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths must be whole numbers, not {array.dtype}; use .astype(numpy.int32)")
    shortest, longest = int(array.min()), int(array.max())
    if shortest < 1:
        where = int(np.argmin(array))
        raise ValueError(f"lengths[{where}] is {shortest}; every sample needs at least 1 token")
    if longest > np.iinfo(np.int32).max:
        raise ValueError(f"lengths[{int(np.argmax(array))}] is {longest}, more than int32 holds")
    return np.ascontiguousarray(array, dtype=np.int32)


def _best_fit_decreasing(lengths: Int32, capacity: int, max_samples: int) -> tuple[Int32, Int64, int]:
    order = kernels.descending_order(lengths, capacity)
    pack_of, packs = kernels.best_fit(lengths, order, capacity, max_samples)
    return pack_of, order, packs


def _first_fit_decreasing(lengths: Int32, capacity: int, max_samples: int) -> tuple[Int32, Int64, int]:
    order = kernels.descending_order(lengths, capacity)
    pack_of, packs = kernels.first_fit(lengths, order, capacity, max_samples)
    return pack_of, order, packs


def _sequential(lengths: Int32, capacity: int, max_samples: int) -> tuple[Int32, Int64, int]:
    order = np.flatnonzero(lengths <= capacity).astype(np.int64)
    pack_of, packs = kernels.next_fit(lengths, order, capacity, max_samples)
    return pack_of, order, packs


def _windowed(window: int) -> Algorithm:
    """Best fit decreasing inside consecutive windows of `window` samples; no pack spans two windows."""

    def place(lengths: Int32, capacity: int, max_samples: int) -> tuple[Int32, Int64, int]:
        pack_of = np.empty(len(lengths), dtype=np.int32)
        orders = [np.zeros(0, dtype=np.int64)]
        packs = 0
        for start in range(0, len(lengths), window):
            part, order, opened = _best_fit_decreasing(lengths[start : start + window], capacity, max_samples)
            pack_of[start : start + window] = part + packs
            orders.append(order + start)
            packs += opened
        return pack_of, np.concatenate(orders), packs

    return place


_ALGORITHMS: dict[str, Algorithm] = {
    "bfd": _best_fit_decreasing,
    "ffd": _first_fit_decreasing,
    "sequential": _sequential,
}


def _algorithm(name: str) -> Algorithm:
    if name in _ALGORITHMS:
        return _ALGORITHMS[name]
    if match := _WINDOW.fullmatch(name):
        return _windowed(int(match.group(1)))
    raise ConfigError(f"unknown algorithm {name!r}; use one of {', '.join(algorithm_names())}")
