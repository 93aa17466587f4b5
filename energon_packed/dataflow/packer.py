"""Packer: which samples share a row, decided while training. One required method: `select`."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BatchError
from energon_packed.packing import pack_lengths


class Packer(ABC):
    """Groups a buffer of samples by their lengths.

    Attributes:
        longest: tokens of the longest sample that fits a row; None where any does. Longer ones are never given to
            `select`: they fail one by one.
    """

    longest: int | None = None

    @abstractmethod
    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Groups of sample numbers; every sample is in exactly one.

        Args:
            lengths: int64 (n,), tokens of the buffered samples.

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
        self.longest = seq_len - seq_len % multiple
        self._options = {"algorithm": algorithm, "max_samples": max_samples, "multiple": multiple}

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Groups of sample numbers, each at most `seq_len` tokens.

        Raises:
            BatchError: a sample is longer than `longest`.
        """
        plan = pack_lengths(lengths, self.seq_len, **self._options)  # type: ignore[arg-type]
        if len(plan.overlong):
            raise too_long(int(lengths[plan.overlong[0]]), self.longest or 0)
        return list(plan)


def too_long(length: int, longest: int) -> BatchError:
    """The error for a sample that fits no row."""
    return BatchError(
        f"a sample of {length} tokens does not fit a row of {longest}; pack with that --seq-len, or raise seq_len"
    )
