"""A seeded permutation by function: positions of an order in, the numbers at these positions out.

No array of all numbers is made: an epoch of 100 million packs needs as much memory as an epoch of a hundred.

Source: the generalized Feistel cipher with cycle walking for domains of any size, Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5. A number is a place (row, column) of a table of at least
`size` places. A round adds a hash of a coordinate to the other coordinate, which can be undone, so all rounds
together are a bijection of the table. A result past `size` is mapped again until it is below.
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]
_ROUNDS = 16
"""With fewer rounds, some orders of 5 numbers are more frequent than others."""
# Multipliers and shift of `mix13` in Stafford, "Better Bit Mixing", 2011, as used by SplitMix64.
_FIRST, _SECOND, _HALF = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(32)


class Permutation:
    """A permutation of the numbers below `size`, the same for equal keys on every machine.

    Args:
        size: from 0 to 2**62.
        key: integers of at least 0; another key or size is another, independent order.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self.size = size
        # The rows are even, as odd rows and columns have even permutations only.
        rows = 2 * isqrt(max(size - 1, 0) // 4) + 2
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-size // rows) or 1)
        self._keys = np.random.SeedSequence([*key, size]).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: Int64) -> Int64:
        """Return the numbers at positions from 0 to size - 1, int64 (n,)."""
        numbers = self._mapped(positions.astype(np.uint64))
        while len(past := np.flatnonzero(numbers >= np.uint64(self.size))):
            numbers[past] = self._mapped(numbers[past])
        return numbers.astype(np.int64)

    def _mapped(self, places: _UInt64) -> _UInt64:
        """Map places of the table to other places, uint64 (n,)."""
        row, column = np.divmod(places, self._columns)
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _below(self._rows, column + first)) % self._rows
            column = (column + _below(self._columns, row + second)) % self._columns
        return row * self._columns + column


def _below(limit: np.uint64, values: _UInt64) -> _UInt64:
    """Hash values to numbers below a limit of at most 2**32, uint64 (n,)."""
    values *= _FIRST
    values ^= values >> _HALF
    values *= _SECOND
    values >>= _HALF
    values *= limit
    values >>= _HALF
    return values
