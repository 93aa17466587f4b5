"""Integer set as a 64-ary tree of bit words, compiled with Numba. Finds the next key in a few steps.

    words   uint64 (levels[-1],)   level 0 has one bit per key, level k + 1 one bit per word of level k
    levels  int64 (L+1,)           index of the first word of each level, then the number of words

262,144 keys take three levels. `bitset_add` and `bitset_remove` modify `words` in place.
"""

import numpy as np
import numpy.typing as npt
from numba.cpython.unsafe.numbers import trailing_zeros

from energon_packed.compiled import compiled

Int64 = npt.NDArray[np.int64]


@compiled
def bitset_levels(size: int) -> Int64:
    """Index of the first word of each level of a 64-ary bitset over `size` keys, then the number of words."""
    offsets = np.zeros(8, dtype=np.int64)
    level = 0
    words = size
    while True:
        words = (words + 63) >> 6
        offsets[level + 1] = offsets[level] + words
        level += 1
        if words == 1:
            return offsets[: level + 1]


@compiled
def bitset_add(words: npt.NDArray[np.uint64], levels: Int64, key: int) -> None:
    """Add `key` to the set."""
    for level in range(levels.size - 1):
        slot = levels[level] + (key >> 6)
        before = words[slot]
        words[slot] = before | (np.uint64(1) << np.uint64(key & 63))
        if before != 0:
            return
        key >>= 6


@compiled
def bitset_remove(words: npt.NDArray[np.uint64], levels: Int64, key: int) -> None:
    """Remove `key` from the set; it must be a member."""
    for level in range(levels.size - 1):
        slot = levels[level] + (key >> 6)
        words[slot] &= ~(np.uint64(1) << np.uint64(key & 63))
        if words[slot] != 0:
            return
        key >>= 6


@compiled
def bitset_next(words: npt.NDArray[np.uint64], levels: Int64, key: int) -> int:
    """Smallest key >= `key` in the set, or -1."""
    top = levels.size - 1
    level = 0
    while level < top:
        word_index = key >> 6
        if levels[level] + word_index >= levels[level + 1]:
            return -1
        masked = words[levels[level] + word_index] & (~np.uint64(0) << np.uint64(key & 63))
        if masked != 0:
            found = (word_index << 6) + trailing_zeros(masked)
            while level > 0:
                level -= 1
                found = (found << 6) + trailing_zeros(words[levels[level] + found])
            return int(found)
        key = word_index + 1
        level += 1
    return -1
