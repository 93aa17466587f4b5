"""`best`: several heuristics, the plan with the fewest packs wins.

The search ends when a plan reaches the lower bound, or when its budget of placed samples is spent. The budget stands
for a time limit (100 million samples take about five seconds) but, unlike one, gives the same plan on every machine.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from numba import njit

from energon_packed.packing import kernels
from energon_packed.packing.bitset import bitset_add, bitset_levels, bitset_next, bitset_previous, bitset_remove
from energon_packed.packing.placement import Placement

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
BUDGET = 100_000_000
_ROUNDS = 12  # shuffled best fits, at most
_LOOKAHEAD = 64  # lengths tried for one place before the longest is taken


def best(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """The plan with the fewest packs of all that the budget allows; never more than best fit decreasing.

    Args:
        lengths: int32 (n,).
        capacity: tokens that fit in one pack.
        max_samples: samples that fit in one pack.
    """
    found: Placement | None = None
    spent = 0
    for candidate in _candidates(lengths, capacity, max_samples):
        if found is None or candidate.packs < found.packs:
            found = candidate
        spent += len(candidate.order)
        if found.packs <= _lower_bound(lengths, capacity, max_samples) or spent >= BUDGET:
            break
    assert found is not None
    return found


def _candidates(lengths: Int32, capacity: int, max_samples: int) -> Iterator[Placement]:
    order, placed = kernels.descending_order(lengths, capacity)
    yield Placement(order, *kernels.best_fit(placed, capacity, max_samples))
    places, pack_at, packs = _fill_exactly(placed, capacity, max_samples, _LOOKAHEAD)
    yield Placement(order[places], pack_at, packs)
    yield Placement(order, *kernels.first_fit(placed, capacity, max_samples))
    # Best fit again with the order blurred: each length is taken as up to a few percent shorter or longer.
    rng = np.random.default_rng(0)
    for blur in np.geomspace(0.3, 0.002, _ROUNDS):
        keys = placed * rng.uniform(1 - blur, 1 + blur, len(placed))
        shuffled = np.argsort(-keys, kind="stable")
        yield Placement(order[shuffled], *kernels.best_fit(placed[shuffled], capacity, max_samples))


def _lower_bound(lengths: Int32, capacity: int, max_samples: int) -> int:
    """Packs that no plan can do without: by tokens, by samples, and by those that cannot share with another."""
    kept = lengths[lengths <= capacity]
    if len(kept) == 0:
        return 0
    halves = int(np.count_nonzero(2 * kept.astype(np.int64) > capacity))
    return max(-(-int(kept.sum(dtype=np.int64)) // capacity), -(-len(kept) // max_samples), halves)


@njit(cache=True, nogil=True)
def _fill_exactly(placed: Int32, capacity: int, max_samples: int, lookahead: int) -> tuple[Int32, Int32, int]:
    """One pack at a time: the longest sample left, then lengths that let a later one fill the rest exactly.

    After the bin-focused heuristics of J. N. D. Gupta and J. C. Ho, "A new heuristic algorithm for the
    one-dimensional bin-packing problem", Production Planning & Control 10(6), 1999, with a lookahead of two samples.

    Args:
        placed: int32 (m,), falling.
        capacity, max_samples: as in the other kernels.
        lookahead: how many lengths are tried for a place.

    Returns:
        Position in `placed` of each sample in the order of placing, int32 (m,); pack_at int32 (m,); packs.
    """
    left = np.zeros(capacity + 1, dtype=np.int32)  # samples left of each length
    start = np.zeros(capacity + 1, dtype=np.int64)  # where the next one of each length is
    for place in range(placed.size - 1, -1, -1):
        left[placed[place]] += 1
        start[placed[place]] = place
    levels = bitset_levels(capacity + 1)
    words = np.zeros(levels[-1], dtype=np.uint64)
    for length in range(1, capacity + 1):
        if left[length] > 0:
            bitset_add(words, levels, length)
    places = np.empty(placed.size, dtype=np.int32)
    pack_at = np.empty(placed.size, dtype=np.int32)
    packs = 0
    space = 0
    room = 0
    for number in range(placed.size):
        length = bitset_previous(words, levels, space) if space > 0 and room > 0 else -1
        if length < 0:
            packs += 1
            space = capacity
            room = max_samples
            length = bitset_previous(words, levels, capacity)
        elif length != space and room > 1:
            # Of the longest few, the one whose remainder the closest length fills best.
            candidate = length
            least = space - length
            if least >= bitset_next(words, levels, 1):
                for _ in range(lookahead):
                    rest = space - candidate
                    filler = bitset_previous(words, levels, rest)
                    if filler == candidate and left[candidate] < 2:
                        filler = bitset_previous(words, levels, filler - 1)
                    gap = rest - max(filler, 0)
                    if gap < least:
                        least = gap
                        length = candidate
                    if least == 0 or candidate == 1:
                        break
                    candidate = bitset_previous(words, levels, candidate - 1)
                    if candidate < 0:
                        break
        places[number] = start[length]
        pack_at[number] = packs - 1
        start[length] += 1
        left[length] -= 1
        if left[length] == 0:
            bitset_remove(words, levels, length)
        space -= length
        room -= 1
    return places, pack_at, packs
