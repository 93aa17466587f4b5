"""Packers assign samples to rows during training. Subclasses implement `select`."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BatchError
from energon_packed.packing import pack_lengths


class Packer(ABC):
    """Groups a buffer of samples by their lengths.

    Attributes:
        longest: maximum sample length in tokens that fits a row; None for no limit. Longer samples are never passed
            to `select`; each counts as a failure.
    """

    longest: int | None = None

    @abstractmethod
    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return groups of sample numbers; every sample is in exactly one group.

        Args:
            lengths: int64 (n,), tokens of the buffered samples.

        """


class PoolPacker(Packer):
    """Applies the offline planner to a buffer.

    Args:
        seq_len: tokens per row.
        algorithm, max_samples, multiple: as for `pack_lengths`; `sequential` keeps the order.
    """

    def __init__(
        self, seq_len: int, *, algorithm: str = "bfd", max_samples: int | None = None, multiple: int = 1
    ) -> None:
        pack_lengths([], seq_len, algorithm=algorithm, max_samples=max_samples, multiple=multiple)
        self.seq_len = seq_len
        self.longest = seq_len - seq_len % multiple
        self._options = {"algorithm": algorithm, "max_samples": max_samples, "multiple": multiple}

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return groups of sample numbers, each of at most `seq_len` tokens.

        Raises:
            BatchError: a sample is longer than `longest`.
        """
        plan = pack_lengths(lengths, self.seq_len, **self._options)  # type: ignore[arg-type]
        if len(plan.overlong):
            raise too_long(int(lengths[plan.overlong[0]]), self.longest or 0)
        return list(plan)


def too_long(length: int, longest: int) -> BatchError:
    """Error for a sample that does not fit a row."""
    return BatchError(
        f"a sample of {length} tokens does not fit a row of {longest}; raise `seq_len`, or pack with this `seq_len`"
    )
