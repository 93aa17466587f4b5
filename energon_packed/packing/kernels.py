"""The packing loops, compiled with Numba.

Every kernel has one shape: `(lengths, order, capacity, max_samples) -> (pack_of, num_packs)`.

    lengths      int32 (n,)   tokens of each sample, 1 <= length <= capacity
    order        int64 (n,)   sample numbers in the order in which they are placed
    capacity     int          tokens that fit in one pack
    max_samples  int          samples that fit in one pack
    pack_of      int32 (n,)   pack number of each sample

Best fit keeps open packs in one list per free space, and finds the least free space that is large enough with a
64-ary bitset: a word of 64 bits per level, so at most three steps for 262,144 tokens.

Source of the heuristics: D. S. Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
Algorithms", SIAM J. Comput. 3(4), 1974.
"""

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def descending_order(lengths: Int32, top: int) -> Int64:
    """Sample numbers by falling length, equal lengths in ascending order (counting sort): int64 (n,).

    Args:
        lengths: int32 (n,), each in 0..top; samples longer than `top` are left out.
        top: the largest length that is kept.
    """
    counts = np.zeros(top + 2, dtype=np.int64)
    kept = 0
    for length in lengths:
        if length <= top:
            counts[length] += 1
            kept += 1
    start = 0
    for length in range(top, -1, -1):
        count = counts[length]
        counts[length] = start
        start += count
    order = np.empty(kept, dtype=np.int64)
    for sample in range(lengths.size):
        length = lengths[sample]
        if length <= top:
            order[counts[length]] = sample
            counts[length] += 1
    return order


@njit(cache=True, nogil=True)
def _bitset_offsets(size: int) -> Int64:
    """First word of each level of a 64-ary bitset over `size` keys, and the total at the end."""
    offsets = np.zeros(8, dtype=np.int64)
    level = 0
    words = size
    while True:
        words = (words + 63) >> 6
        offsets[level + 1] = offsets[level] + words
        level += 1
        if words == 1:
            return offsets[: level + 1]


@njit(cache=True, nogil=True)
def _bitset_add(words: npt.NDArray[np.uint64], offsets: Int64, key: int) -> None:
    for level in range(offsets.size - 1):
        slot = offsets[level] + (key >> 6)
        before = words[slot]
        words[slot] = before | (np.uint64(1) << np.uint64(key & 63))
        if before != 0:
            return
        key >>= 6


@njit(cache=True, nogil=True)
def _bitset_remove(words: npt.NDArray[np.uint64], offsets: Int64, key: int) -> None:
    for level in range(offsets.size - 1):
        slot = offsets[level] + (key >> 6)
        words[slot] &= ~(np.uint64(1) << np.uint64(key & 63))
        if words[slot] != 0:
            return
        key >>= 6


@njit(cache=True, nogil=True)
def _bitset_next(words: npt.NDArray[np.uint64], offsets: Int64, key: int) -> int:
    """Least key >= `key` in the set, or -1."""
    levels = offsets.size - 1
    level = 0
    while level < levels:
        word_index = key >> 6
        if offsets[level] + word_index >= offsets[level + 1]:
            return -1
        masked = words[offsets[level] + word_index] & (~np.uint64(0) << np.uint64(key & 63))
        if masked != 0:
            found = (word_index << 6) + trailing_zeros(masked)
            while level > 0:
                level -= 1
                found = (found << 6) + trailing_zeros(words[offsets[level] + found])
            return int(found)
        key = word_index + 1
        level += 1
    return -1


@njit(cache=True, nogil=True)
def best_fit(lengths: Int32, order: Int64, capacity: int, max_samples: int) -> tuple[Int32, int]:
    """Each sample goes to the open pack with the least free space that still holds it."""
    pack_of = np.empty(lengths.size, dtype=np.int32)
    offsets = _bitset_offsets(capacity + 1)
    words = np.zeros(offsets[-1], dtype=np.uint64)
    head = np.full(capacity + 1, -1, dtype=np.int32)  # free space -> first open pack with that much
    below = np.empty(order.size, dtype=np.int32)  # open pack -> next pack with the same free space
    samples = np.zeros(order.size, dtype=np.int32)
    packs = 0
    for sample in order:
        length = lengths[sample]
        space = _bitset_next(words, offsets, length)
        if space < 0:
            pack = packs
            packs += 1
            space = capacity
        else:
            pack = head[space]
            head[space] = below[pack]
            if head[space] < 0:
                _bitset_remove(words, offsets, space)
        pack_of[sample] = pack
        samples[pack] += 1
        space -= length
        if space > 0 and samples[pack] < max_samples:
            below[pack] = head[space]
            if head[space] < 0:
                _bitset_add(words, offsets, space)
            head[space] = pack
    return pack_of, packs


@njit(cache=True, nogil=True)
def first_fit(lengths: Int32, order: Int64, capacity: int, max_samples: int) -> tuple[Int32, int]:
    """Each sample goes to the oldest pack that still holds it (a max-tree over packs finds it)."""
    pack_of = np.empty(lengths.size, dtype=np.int32)
    samples = np.zeros(order.size, dtype=np.int32)
    leaves = 1
    while leaves < order.size:
        leaves *= 2
    tree = np.full(2 * leaves, capacity, dtype=np.int32)  # most free space below each node
    packs = 0
    for sample in order:
        length = lengths[sample]
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        pack = node - leaves
        packs = max(packs, pack + 1)
        pack_of[sample] = pack
        samples[pack] += 1
        tree[node] = tree[node] - length if samples[pack] < max_samples else 0
        node //= 2
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node //= 2
    return pack_of, packs


@njit(cache=True, nogil=True)
def next_fit(lengths: Int32, order: Int64, capacity: int, max_samples: int) -> tuple[Int32, int]:
    """Each sample goes to the current pack, or opens a new one: the order is kept."""
    pack_of = np.empty(lengths.size, dtype=np.int32)
    packs = 0
    space = 0
    room = 0
    for sample in order:
        length = lengths[sample]
        if space < length or room == 0:
            packs += 1
            space = capacity
            room = max_samples
        pack_of[sample] = packs - 1
        space -= length
        room -= 1
    return pack_of, packs


@njit(cache=True, nogil=True)
def group_by_pack(pack_of: Int32, order: Int64, packs: int) -> tuple[Int64, Int64]:
    """Sample numbers grouped by pack, each pack in placing order: (indices int64 (n,), offsets int64 (P+1,))."""
    offsets = np.zeros(packs + 1, dtype=np.int64)
    for sample in order:
        offsets[pack_of[sample] + 1] += 1
    for pack in range(packs):
        offsets[pack + 1] += offsets[pack]
    cursor = offsets[:-1].copy()
    indices = np.empty(order.size, dtype=np.int64)
    for sample in order:
        pack = pack_of[sample]
        indices[cursor[pack]] = sample
        cursor[pack] += 1
    return indices, offsets
