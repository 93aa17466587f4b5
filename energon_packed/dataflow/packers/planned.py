"""PlannedPacker: every item is a pack already, made offline or by a plan."""

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.packers.base import Packer


class PlannedPacker(Packer):
    """One row for each item: for packs of `energon-packed pack`, and for `plan_in_memory`."""

    buffer_size = 1
    rows = 1

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return a group for each item."""
        return [np.array([number]) for number in range(len(lengths))]
