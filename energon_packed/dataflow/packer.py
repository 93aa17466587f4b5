"""Packer: which samples share a row, decided while training. One required method: `select`."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BatchError
from energon_packed.packing import pack_lengths


class Packer(ABC):
    """Groups a buffer of samples by their lengths."""

    @abstractmethod
    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Groups of sample numbers; every sample is in exactly one.

        Args:
            lengths: int64 (n,), tokens of the buffered samples.

        Raises:
            BatchError: a sample does not fit a row.
        """


class PoolPacker(Packer):
    """The offline planner over a buffer.

    Args:
        seq_len: tokens in one row.
        algorithm, max_samples, multiple: as `pack_lengths` takes them; `sequential` keeps the order.
    """

    def __init__(
        self, seq_len: int, *, algorithm: str = "bfd", max_samples: int | None = None, multiple: int = 1
    ) -> None:
        pack_lengths([], seq_len, algorithm=algorithm, max_samples=max_samples, multiple=multiple)
        self.seq_len = seq_len
        self._options = {"algorithm": algorithm, "max_samples": max_samples, "multiple": multiple}

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Groups of sample numbers, each at most `seq_len` tokens."""
        plan = pack_lengths(lengths, self.seq_len, **self._options)  # type: ignore[arg-type]
        if len(plan.overlong):
            raise BatchError(
                f"a sample of {lengths[plan.overlong[0]]} tokens does not fit a row of {self.seq_len}; "
                "pack with that --seq-len, or raise seq_len"
            )
        return list(plan)
