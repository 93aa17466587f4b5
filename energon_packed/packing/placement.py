"""Input and result of a packing algorithm: lengths and limits -> Placement."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Placement(NamedTuple):
    """Samples in placement order.

    Attributes:
        order: int32 (m,), sample indices; samples longer than the capacity are excluded.
        pack_at: int32 (m,), pack index of each sample.
        packs: number of packs.
    """

    order: Int32
    pack_at: Int32
    packs: int


Algorithm = Callable[[Int32, int, int], Placement]
"""(lengths int32 (n,), capacity, max_samples) -> Placement."""
