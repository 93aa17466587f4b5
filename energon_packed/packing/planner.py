"""`pack_lengths`: check the input, choose an algorithm by name, return a PackPlan.

Numba and the kernels are loaded when the first plan is made, so that naming an algorithm costs nothing.
"""

import re

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.packing.placement import Algorithm
from energon_packed.packing.plan import PackPlan

Int32 = npt.NDArray[np.int32]
_MOST_SAMPLES = 2**31 - 1
_NAMES = ("bfd", "ffd", "sequential", "best")
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
            `window_N` (best fit decreasing inside consecutive windows of N samples) or `best` (several heuristics, the
            one with the fewest packs; takes longer).
        max_samples: most samples in one pack; None for no limit.
        multiple: each sample is rounded up to a multiple of this many tokens when its space is counted.
        seed: shuffles the order of the packs; None keeps the order in which they were opened.

    Compiled code does the work and releases the GIL; it takes about 24 bytes a sample beside the lengths.

    Raises:
        ConfigError: an argument out of range, or an unknown algorithm (the message lists the valid names).
        ValueError: lengths that are not whole numbers >= 1 in one dimension.
    """
    for name, value in (("capacity", capacity), ("multiple", multiple), ("max_samples", max_samples)):
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise ConfigError(f"{name} must be a whole number >= 1, not {value!r}")
    if capacity > np.iinfo(np.int32).max:
        raise ConfigError(f"capacity {capacity} does not fit int32; use at most {np.iinfo(np.int32).max}")
    check_algorithm(algorithm)
    from energon_packed.packing.kernels import group_by_pack

    array = _checked_lengths(lengths)
    cost = array
    usable = int(capacity) // multiple * multiple
    if multiple > 1:
        cost = ((array.astype(np.int64) + multiple - 1) // multiple * multiple).clip(max=2**31 - 1).astype(np.int32)
    placement = _algorithm(algorithm)(cost, usable, max_samples or len(array) or 1)
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
    """Names that `pack_lengths` accepts; N in `window_N` stands for any whole number >= 1."""
    return [*_NAMES, "window_N"]


def check_algorithm(name: str) -> None:
    """Raise ConfigError, which lists the valid names, for an unknown algorithm."""
    if name not in _NAMES and not _WINDOW.fullmatch(name):
        raise ConfigError(f"unknown algorithm {name!r}; use one of {', '.join(algorithm_names())}")


def load_kernels() -> None:
    """Load the compiled code, or compile it, before it is needed: half a second, or some seconds the first time."""
    pack_lengths([1, 2], 2)


def _algorithm(name: str) -> Algorithm:
    from energon_packed.packing.algorithms import ALGORITHMS, windowed

    match = _WINDOW.fullmatch(name)
    return windowed(int(match.group(1))) if match else ALGORITHMS[name]


def _checked_lengths(lengths: npt.ArrayLike) -> Int32:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths must have one dimension, not shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if len(array) > _MOST_SAMPLES:
        raise ValueError(f"{len(array)} lengths; at most {_MOST_SAMPLES} can be planned at once, plan them in parts")
    if array.dtype.kind not in "iu":
        raise ValueError(f"lengths must be whole numbers, not {array.dtype}; use .astype(numpy.int32)")
    shortest, longest = int(array.min()), int(array.max())
    if shortest < 1:
        where = int(np.argmin(array))
        raise ValueError(f"lengths[{where}] is {shortest}; every sample needs at least 1 token")
    if longest > np.iinfo(np.int32).max:
        raise ValueError(f"lengths[{int(np.argmax(array))}] is {longest}, more than int32 holds")
    return np.ascontiguousarray(array, dtype=np.int32)
