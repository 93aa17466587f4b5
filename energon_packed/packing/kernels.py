"""Packing algorithms: sample lengths -> Placement (the pack of each sample), compiled for large inputs.

The algorithms that `pack_lengths` selects by name are at the end. They sort the samples and call a kernel with
the lengths in placement order, so that memory access is sequential:

    placed       int32 (m,)   lengths in placement order, 1 <= length <= capacity
    capacity     int          tokens that fit in a pack
    max_samples  int          samples that fit in a pack
    pack_at      int32 (m,)   pack index of each placed sample

Source of the heuristics: D. S. Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
Algorithms", SIAM J. Comput. 3(4), 1974.

Best fit has a list of open packs per amount of free space and finds the smallest sufficient amount with a bitset: a
64-ary tree of bit words that finds the next key in a few steps.

    words   uint64 (levels[-1],)   level 0 has a bit per key, level k + 1 a bit per word of level k
    levels  int64 (L+1,)           index of the first word of each level, then the number of words

Three levels are enough for 262,144 keys. `bitset_add` and `bitset_remove` modify `words` in place.
"""

import numpy as np
import numpy.typing as npt

from energon_packed.compiled import called_by_kernels, compiled, trailing_zeros
from energon_packed.packing.placement import Algorithm, Int32, Int64, Placement


@called_by_kernels
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


@called_by_kernels
def bitset_add(words: npt.NDArray[np.uint64], levels: Int64, key: int) -> None:
    """Add `key` to the set."""
    for level in range(levels.size - 1):
        slot = levels[level] + (key >> 6)
        before = words[slot]
        words[slot] = before | (np.uint64(1) << np.uint64(key & 63))
        if before != 0:
            return
        key >>= 6


@called_by_kernels
def bitset_remove(words: npt.NDArray[np.uint64], levels: Int64, key: int) -> None:
    """Remove `key` from the set; it must be a member."""
    for level in range(levels.size - 1):
        slot = levels[level] + (key >> 6)
        words[slot] &= ~(np.uint64(1) << np.uint64(key & 63))
        if words[slot] != 0:
            return
        key >>= 6


@called_by_kernels
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


@compiled
def descending_order(lengths: Int32, top: int) -> tuple[Int32, Int32]:
    """Sort samples by descending length (counting sort); equal lengths stay in ascending order of index.

    Args:
        lengths: int32 (n,), each >= 1; samples longer than `top` are skipped.
        top: maximum length to keep.

    Returns:
        Sample indices, int32 (m,), and their lengths, int32 (m,).
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

    Consecutive equal lengths need few searches. A pack that got the first of them and has room for the next is the
    best fit for the next too, because any fuller pack with that room would have been chosen before. For the same
    reason, packs with the chosen amount of free space are used until there are none left.
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
        tree[node] = tree[node] - length if samples[pack] < max_samples else 0  # 0: a pack with all samples is full
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
    """Group sample indices by pack, in placement order: (indices int64 (m,), offsets int64 (P+1,))."""
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


@compiled
def join_runs(keys: Int64, cost: Int32) -> tuple[Int32, Int32]:
    """Sum the tokens of each run of equal keys: (boundaries of the runs int32 (U+1,), tokens int32 (U,))."""
    runs = min(keys.size, 1)
    for sample in range(1, keys.size):
        runs += keys[sample] != keys[sample - 1]
    bounds = np.empty(runs + 1, dtype=np.int32)
    sums = np.empty(runs, dtype=np.int32)
    run = 0
    sample = 0
    while sample < keys.size:
        bounds[run] = sample
        key = keys[sample]
        total = 0
        while sample < keys.size and keys[sample] == key:
            total += cost[sample]
            sample += 1
        sums[run] = min(total, 2147483647)
        run += 1
    bounds[runs] = keys.size
    return bounds, sums


@compiled
def group_runs_by_pack(order: Int32, pack_at: Int32, packs: int, bounds: Int32) -> tuple[Int64, Int64]:
    """Do the same as `group_by_pack` for runs: run u is samples bounds[u] to bounds[u + 1], which stay together."""
    offsets = np.zeros(packs + 1, dtype=np.int64)
    # The boundaries in placement order: `bounds` is read at random, so it is read only once.
    first = np.empty(order.size, dtype=np.int32)
    last = np.empty(order.size, dtype=np.int32)
    for place in range(order.size):
        first[place] = bounds[order[place]]
        last[place] = bounds[order[place] + 1]
        offsets[pack_at[place] + 1] += last[place] - first[place]
    for pack in range(packs):
        offsets[pack + 1] += offsets[pack]
    cursor = offsets[:-1].copy()
    indices = np.empty(offsets[-1], dtype=np.int64)
    for place in range(order.size):
        slot = cursor[pack_at[place]]
        for sample in range(first[place], last[place]):
            indices[slot] = sample
            slot += 1
        cursor[pack_at[place]] = slot
    return indices, offsets


def best_fit_decreasing(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Longest sample first, each into the fullest pack with enough free space."""
    order, placed = descending_order(lengths, capacity)
    return Placement(order, *best_fit(placed, np.zeros(0, dtype=np.int64), capacity, max_samples))


def first_fit_decreasing(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Longest sample first, each into the oldest pack with enough free space."""
    order, placed = descending_order(lengths, capacity)
    return Placement(order, *first_fit(placed, capacity, max_samples))


def sequential(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Keep the input order and open a new pack when the next sample does not fit."""
    order = np.flatnonzero(lengths <= capacity).astype(np.int32)
    return Placement(order, *next_fit(lengths[order], capacity, max_samples))


ALGORITHMS: dict[str, Algorithm] = {
    "bfd": best_fit_decreasing,
    "ffd": first_fit_decreasing,
    "sequential": sequential,
}


def windowed(window: int) -> Algorithm:
    """Best fit decreasing within consecutive windows of `window` samples; no pack spans two windows."""

    def place(lengths: Int32, capacity: int, max_samples: int) -> Placement:
        samples = np.flatnonzero(lengths <= capacity)
        windows = samples // window
        order = samples[np.lexsort((-lengths[samples], windows))].astype(np.int32)
        closes = np.flatnonzero(np.diff(windows)) + 1
        return Placement(order, *best_fit(lengths[order], closes, capacity, max_samples))

    return place
