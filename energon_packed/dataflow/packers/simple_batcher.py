"""SimpleBatcher: a fixed number of items in one row."""

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.packers.base import Packer, check_positive


class SimpleBatcher(Packer):
    """Joins `batch_size` items, samples or packs, in the order they come.

    Args:
        batch_size: items in one batch.
        drop_last: drop the short batch at the end of an epoch; its items are counted.

    Raises:
        ConfigError: `batch_size` is below 1.
    """

    def __init__(self, batch_size: int, *, drop_last: bool = False) -> None:
        check_positive(batch_size=batch_size)
        self.batch_size = self.buffer_size = self.rows = batch_size
        self.drop_last = drop_last

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return groups of `batch_size` consecutive numbers."""
        return list(np.split(np.arange(len(lengths)), range(self.batch_size, len(lengths), self.batch_size)))
