"""Boundaries of the samples in a row, in pure NumPy.

Input: the lengths of the samples of a row, or its cu_seqlens. Output: cu_seqlens, lengths, position ids or segment
ids of the row:

lengths        [3, 2, 4]
cu_seqlens  [0, 3, 5, 9]                 sample i is row[cu_seqlens[i]:cu_seqlens[i + 1]]
positions   [0 1 2 0 1 0 1 2 3]          restart at every boundary
segments    [0 0 0 1 1 2 2 2 2]
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def cu_seqlens_from_lengths(lengths: Sequence[int] | npt.NDArray[np.integer]) -> Int32:
    """Compute the cumulative boundaries of concatenated samples.

    Args:
        lengths: tokens of each sample, shape (S,), all >= 1.

    Returns:
        int32 (S+1,), from 0 to the sum of `lengths`, as varlen attention kernels expect.

    Raises:
        ValueError: a length is below 1, or the sum exceeds int32.
    """
    array = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if array.size and array.min() < 1:
        raise ValueError(f"`lengths` must be at least 1, got {array.min()}")
    total = int(array.sum())
    if total > np.iinfo(np.int32).max:  # varlen attention kernels read int32 boundaries
        raise ValueError(f"the sum of `lengths` must be at most {np.iinfo(np.int32).max} (int32), got {total}")
    out = np.zeros(array.size + 1, dtype=np.int32)
    np.cumsum(array, out=out[1:])
    return out


def lengths_from_cu_seqlens(cu_seqlens: npt.NDArray[np.integer]) -> Int64:
    """Tokens of each sample, int64 (S,), from boundaries (S+1,)."""
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    return bounds[1:] - bounds[:-1]


def position_ids_from_cu_seqlens(cu_seqlens: npt.NDArray[np.integer]) -> Int64:
    """Positions that restart at 0 at each boundary: int64 (T,), from boundaries (S+1,)."""
    cu = np.asarray(cu_seqlens, dtype=np.int64)
    positions = np.arange(cu[-1], dtype=np.int64)
    positions -= np.repeat(cu[:-1], cu[1:] - cu[:-1])  # index in the row minus the start of its sample
    return positions


def segment_ids_from_cu_seqlens(cu_seqlens: npt.NDArray[np.integer]) -> Int64:
    """Index of the sample that each token belongs to: int64 (T,), from boundaries (S+1,)."""
    lengths = lengths_from_cu_seqlens(cu_seqlens)
    return np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)


def round_up(lengths: npt.NDArray[np.integer], multiple: int) -> Int64:
    """Each length rounded up to a multiple of `multiple` (tokens): int64, same shape."""
    if multiple < 1:
        raise ValueError(f"`multiple` must be at least 1, got {multiple}")
    array = np.asarray(lengths, dtype=np.int64)
    return (array + multiple - 1) // multiple * multiple
