"""Parts of arrays that are handled one after the other, so that temporary arrays are small. In pure NumPy.

BLOCK           the number of entries of a part
blocks          the number of entries of an array -> ranges of entries
entries         an array -> its entries as Python values
common_ranges   two sorted arrays -> pairs of their parts with the same range of numbers
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 18
"""Entries of a part."""


def blocks(count: int) -> Iterator[slice]:
    """Yield ranges of the entries of an array that is not handled as a whole."""
    for first in range(0, count, BLOCK):
        yield slice(first, min(first + BLOCK, count))


def entries(array: npt.NDArray[Any]) -> Iterator[Any]:
    """Yield the entries of an array as Python values, a block at a time."""
    for block in blocks(len(array)):
        yield from array[block].tolist()


def common_ranges(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of two sorted arrays with the numbers of the same range."""
    limits = np.unique((first if len(first) > len(second) else second)[BLOCK::BLOCK])
    ends = [[0, *np.searchsorted(numbers, limits).tolist(), len(numbers)] for numbers in (first, second)]
    for (start, stop), (other, end) in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True):
        yield first[start:stop], second[other:end]
