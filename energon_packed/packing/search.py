"""`best`: tries several heuristics and keeps the plan with the fewest packs.

The search stops when a plan reaches the lower bound or when the budget of placed samples is exhausted. The budget acts
as a time limit (100 million samples take about five seconds) that gives the same plan on every machine.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from energon_packed.compiled import compiled
from energon_packed.packing import kernels
from energon_packed.packing.bitset import bitset_add, bitset_levels, bitset_next, bitset_previous, bitset_remove
from energon_packed.packing.placement import Placement

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
BUDGET = 100_000_000
_ROUNDS = 12  # maximum number of perturbed best-fit runs
_LOOKAHEAD = 64  # maximum number of candidate lengths per position


def best(lengths: Int32, capacity: int, max_samples: int) -> Placement:
    """Return the plan with the fewest packs found within the budget; never more packs than best fit decreasing.

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
    # Best fit on perturbed orders: sort by lengths scaled by random factors, from +-30% down to +-0.2%.
    rng = np.random.default_rng(0)
    for blur in np.geomspace(0.3, 0.002, _ROUNDS):
        keys = placed * rng.uniform(1 - blur, 1 + blur, len(placed))
        shuffled = np.argsort(-keys, kind="stable")
        yield Placement(order[shuffled], *kernels.best_fit(placed[shuffled], capacity, max_samples))


def _lower_bound(lengths: Int32, capacity: int, max_samples: int) -> int:
    """Lower bound on the number of packs: by tokens, by samples, and by samples longer than half the capacity."""
    kept = lengths[lengths <= capacity]
    if len(kept) == 0:
        return 0
    halves = int(np.count_nonzero(2 * kept.astype(np.int64) > capacity))
    return max(-(-int(kept.sum(dtype=np.int64)) // capacity), -(-len(kept) // max_samples), halves)


@compiled
def _fill_exactly(placed: Int32, capacity: int, max_samples: int, lookahead: int) -> tuple[Int32, Int32, int]:
    """Fill one pack at a time: the longest remaining sample, then lengths that let a later one fill the pack exactly.

    After the bin-focused heuristics of J. N. D. Gupta and J. C. Ho, "A new heuristic algorithm for the
    one-dimensional bin-packing problem", Production Planning & Control 10(6), 1999, with a lookahead of two samples.

    Args:
        placed: int32 (m,), in descending order.
        capacity, max_samples: as in the other kernels.
        lookahead: maximum number of candidate lengths per position.

    Returns:
        Position in `placed` of each sample in placement order, int32 (m,); pack_at int32 (m,); packs.
    """
    left = np.zeros(capacity + 1, dtype=np.int32)  # remaining samples of each length
    start = np.zeros(capacity + 1, dtype=np.int64)  # position of the next sample of each length
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
        elif length != space and room > 1 and space - length >= bitset_next(words, levels, 1):
            length = _closest(words, levels, left, space, length, lookahead)
        places[number] = start[length]
        pack_at[number] = packs - 1
        start[length] += 1
        left[length] -= 1
        if left[length] == 0:
            bitset_remove(words, levels, length)
        space -= length
        room -= 1
    return places, pack_at, packs


@compiled
def _closest(
    words: npt.NDArray[np.uint64], levels: Int64, left: Int32, space: int, longest: int, lookahead: int
) -> int:
    """Among the longest candidates, the length that leaves the smallest gap after the best filler."""
    candidate = chosen = longest
    least = space - longest
    for _ in range(lookahead):
        rest = space - candidate
        filler = bitset_previous(words, levels, rest)
        if filler == candidate and left[candidate] < 2:
            filler = bitset_previous(words, levels, filler - 1)
        gap = rest - max(filler, 0)
        if gap < least:
            least = gap
            chosen = candidate
        if least == 0 or candidate == 1:
            break
        candidate = bitset_previous(words, levels, candidate - 1)
        if candidate < 0:
            break
    return chosen
