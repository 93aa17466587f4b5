"""Packing loops, compiled with Numba.

A kernel receives only the lengths of the samples in placement order, so its memory access is sequential regardless of
the sample numbers:

    placed       int32 (m,)   lengths in placement order, 1 <= length <= capacity
    capacity     int          tokens that fit in one pack
    max_samples  int          samples that fit in one pack
    pack_at      int32 (m,)   pack number of each placed sample

Best fit keeps one list of open packs per amount of free space and finds the smallest sufficient amount with a bitset.

Source of the heuristics: D. S. Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
Algorithms", SIAM J. Comput. 3(4), 1974.
"""

import numpy as np
import numpy.typing as npt

from energon_packed.compiled import compiled
from energon_packed.packing.bitset import bitset_add, bitset_levels, bitset_next, bitset_remove

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@compiled
def descending_order(lengths: Int32, top: int) -> tuple[Int32, Int32]:
    """Counting sort by descending length; equal lengths stay in ascending order of sample number.

    Args:
        lengths: int32 (n,), each >= 1; samples longer than `top` are skipped.
        top: maximum length to keep.

    Returns:
        Sample numbers, int32 (m,), and their lengths, int32 (m,).
    """
    starts = np.zeros(top + 2, dtype=np.int64)
    for length in lengths:
        if length <= top:
            starts[length] += 1
    kept = 0
    for length in range(top, -1, -1):
        count = starts[length]
        starts[length] = kept
        kept += count
    order = np.empty(kept, dtype=np.int32)
    for sample in range(lengths.size):
        length = lengths[sample]
        if length <= top:
            order[starts[length]] = sample
            starts[length] += 1
    placed = np.empty(kept, dtype=np.int32)
    start = 0
    for length in range(top, -1, -1):
        placed[start : starts[length]] = length
        start = starts[length]
    return order, placed


@compiled
def best_fit(placed: Int32, closes: Int64, capacity: int, max_samples: int) -> tuple[Int32, int]:
    """Place each sample in the open pack with the least sufficient free space.

    All packs are closed before each position in `closes`, int64 (w,), ascending.

    Equal lengths that follow one another need few searches: a pack that takes one of them and has room for the next
    is the best fit for that one too, as any fuller pack with that room would have been chosen before it. For the same
    reason the packs with the chosen amount of free space come before all others, until there are none.
    """
    pack_at = np.empty(placed.size, dtype=np.int32)
    levels = bitset_levels(capacity + 1)
    words = np.zeros(levels[-1], dtype=np.uint64)
    head = np.full(capacity + 1, -1, dtype=np.int32)  # free space -> first open pack with that amount
    below = np.empty(placed.size, dtype=np.int32)  # open pack -> next pack with the same free space
    is_limited = max_samples < placed.size
    samples = np.zeros(placed.size if is_limited else 0, dtype=np.int32)
    packs = 0
    window = 0
    place = 0
    while place < placed.size:
        if window < closes.size and place == closes[window]:
            window += 1
            space = bitset_next(words, levels, 0)
            while space >= 0:
                bitset_remove(words, levels, space)
                head[space] = -1
                space = bitset_next(words, levels, space)
        length = placed[place]
        end = closes[window] if window < closes.size else placed.size
        fit = bitset_next(words, levels, length)
        while place < end and placed[place] == length:
            if fit >= 0 and head[fit] < 0:
                fit = bitset_next(words, levels, length)
            if fit < 0:
                pack = packs
                packs += 1
                space = capacity
            else:
                pack = head[fit]
                space = fit
                head[fit] = below[pack]
                if head[fit] < 0:
                    bitset_remove(words, levels, fit)
            room = max_samples - (samples[pack] if is_limited else 0)
            while True:
                pack_at[place] = pack
                place += 1
                space -= length
                room -= 1
                if space < length or room == 0 or place == end or placed[place] != length:
                    break
            if is_limited:
                samples[pack] = max_samples - room
            if space > 0 and room > 0:
                below[pack] = head[space]
                if head[space] < 0:
                    bitset_add(words, levels, space)
                head[space] = pack
    return pack_at, packs


@compiled
def first_fit(placed: Int32, capacity: int, max_samples: int) -> tuple[Int32, int]:
    """Place each sample in the oldest pack with enough free space, found with a max-tree over packs."""
    pack_at = np.empty(placed.size, dtype=np.int32)
    samples = np.zeros(placed.size, dtype=np.int32)
    leaves = 1
    while leaves < placed.size:
        leaves *= 2
    tree = np.full(2 * leaves, capacity, dtype=np.int32)  # maximum free space in each subtree
    packs = 0
    for place in range(placed.size):
        length = placed[place]
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        pack = node - leaves
        packs = max(packs, pack + 1)
        pack_at[place] = pack
        samples[pack] += 1
        tree[node] = tree[node] - length if samples[pack] < max_samples else 0
        node //= 2
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node //= 2
    return pack_at, packs


@compiled
def next_fit(placed: Int32, capacity: int, max_samples: int) -> tuple[Int32, int]:
    """Place each sample in the current pack or open a new one, in input order."""
    pack_at = np.empty(placed.size, dtype=np.int32)
    packs = 0
    space = 0
    room = 0
    for place in range(placed.size):
        length = placed[place]
        if space < length or room == 0:
            packs += 1
            space = capacity
            room = max_samples
        pack_at[place] = packs - 1
        space -= length
        room -= 1
    return pack_at, packs


@compiled
def group_by_pack(order: Int32, pack_at: Int32, packs: int) -> tuple[Int64, Int64]:
    """Group sample numbers by pack, in placement order: (indices int64 (m,), offsets int64 (P+1,))."""
    offsets = np.zeros(packs + 1, dtype=np.int64)
    for pack in pack_at:
        offsets[pack + 1] += 1
    for pack in range(packs):
        offsets[pack + 1] += offsets[pack]
    cursor = offsets[:-1].copy()
    indices = np.empty(order.size, dtype=np.int64)
    for place in range(order.size):
        pack = pack_at[place]
        indices[cursor[pack]] = order[place]
        cursor[pack] += 1
    return indices, offsets
