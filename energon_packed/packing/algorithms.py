"""Packing algorithms that `pack_lengths` selects by name."""

import numpy as np
import numpy.typing as npt

from energon_packed.packing import kernels
from energon_packed.packing.planner import Algorithm, Placement

Int32 = npt.NDArray[np.int32]


def best_fit_decreasing(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Longest sample first, each into the fullest pack with enough free space."""
    order, placed = kernels.descending_order(lengths, capacity)
    return Placement(order, *kernels.best_fit(placed, np.zeros(0, dtype=np.int64), capacity, max_samples))


def first_fit_decreasing(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Longest sample first, each into the oldest pack with enough free space."""
    order, placed = kernels.descending_order(lengths, capacity)
    return Placement(order, *kernels.first_fit(placed, capacity, max_samples))


def sequential(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Keep the input order and open a new pack when the next sample does not fit."""
    order = np.flatnonzero(lengths <= capacity).astype(np.int32)
    return Placement(order, *kernels.next_fit(lengths[order], capacity, max_samples))


ALGORITHMS: dict[str, Algorithm] = {
    "bfd": best_fit_decreasing,
    "ffd": first_fit_decreasing,
    "sequential": sequential,
}


def windowed(window: int) -> Algorithm:
    """Best fit decreasing within consecutive windows of `window` samples; no pack spans two windows."""

    def place(lengths: Int32, capacity: int, max_samples: int) -> Placement:
        rows = np.flatnonzero(lengths <= capacity)
        number = rows // window
        order = rows[np.lexsort((-lengths[rows], number))].astype(np.int32)
        closes = np.flatnonzero(np.diff(number)) + 1
        return Placement(order, *kernels.best_fit(lengths[order], closes, capacity, max_samples))

    return place
