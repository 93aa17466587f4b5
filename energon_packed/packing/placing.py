"""Packing algorithms on counts: how many samples have each length in, which packs get how many of them out.

Samples of the same length are interchangeable, so that an algorithm needs no step per sample: packs with the same
content are a run, and a step puts samples of a length into the packs of a run. The number of steps depends on the
number of different lengths, not on the number of samples. (Packing of a histogram: M. Krell et al., "Efficient
Sequence Packing without Cross-contamination", 2021, section 3; patterns of equal content: P. Gilmore and R. Gomory, "A
Linear Programming Approach to the Cutting-Stock Problem", 1961.)

    lengths  8 5 5 5 3    capacity 10
    steps    pack 0 gets 8, pack 1 gets 5 5, pack 2 gets 5, then 3 (best fit)

Source of the heuristics: D. S. Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
Algorithms", SIAM J. Comput. 3(4), 1974.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_BLOCK = 128
Int64 = npt.NDArray[np.int64]
Content = tuple["Content | None", int, int]
"""Content of a pack: what it had before, and the length and number of samples that it got last."""


Run = tuple[int, int, int, int, int, Content | None]
"""Packs of equal content, with consecutive numbers: the pack that is filled next, 1 or -1 to the pack after it, how
many packs, free tokens of each, samples that each has, and content. A tuple, because a plan makes millions of them."""
Step = tuple[int, int, int, int, int]
"""Samples of a length for packs, as the first pack, 1 or -1 to the next, how many packs, samples for each, and samples
that each has already."""


class Placed(NamedTuple):
    """Result of an algorithm.

    Attributes:
        steps: in the order of the lengths; together they place every sample.
        runs: the packs by content.
        packs: how many.
    """

    steps: list[Step]
    runs: list[Run]
    packs: int


def best_fit(runs: Iterable[tuple[int, int]], capacity: int, max_samples: int, first: int = 0) -> Placed:
    """Put samples into the pack with the least sufficient free space; of packs with equal space, the latest.

    Args:
        runs: a length, 1 to `capacity`, and the number of samples with it, from the longest.
        capacity: tokens that fit in a pack.
        max_samples: samples that fit in a pack.
        first: number of the first pack.
    """
    steps: list[Step] = []
    stacks: dict[int, list[Run]] = {}  # open runs by free space
    spaces: list[int] = []  # the free spaces with open runs, sorted
    closed: list[Run] = []
    number = first
    for length, count in runs:
        while count:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                free = spaces[at]
                stack = stacks[free]
                pack, step, packs, _, has, content = stack.pop()
            else:  # as many new packs as these samples may need
                free, stack = capacity, None
                pack, step, packs, has, content = number, 1, count, 0, None
            samples = min(free // length, max_samples - has)
            # Packs of the run that get all that they have room for, then one that gets the rest.
            while count and packs:
                share = samples if samples <= count else count
                filled = min(count // share, packs)
                steps.append((pack, step, filled, share, has))
                count -= filled * share
                space, last = free - length * share, pack + step * (filled - 1)
                pack, packs = last + step, packs - filled
                # Packs of equal space are a stack: the pack that was filled last is the next to be filled.
                run = (last, -step, filled, space, has + share, (content, length, share))
                if space == 0 or has + share == max_samples:
                    closed.append(run)
                elif others := stacks.get(space):
                    others.append(run)
                else:
                    stacks[space] = [run]
                    insort(spaces, space)
            if stack is None:
                number = pack
            elif packs:
                stack.append((pack, step, packs, free, has, content))
            elif not stack:
                del spaces[bisect_left(spaces, free)]
    return Placed(steps, [*closed, *[run for stack in stacks.values() for run in stack]], number)


def first_fit(runs: Iterable[tuple[int, int]], capacity: int, max_samples: int) -> Placed:
    """Put samples into the oldest pack with enough free space; arguments as for `best_fit`."""
    steps: list[Step] = []
    # All runs by age, in short lists, and the most free space of a run of each list. A full pack has no free space.
    blocks: list[list[Run]] = [[]]
    largest = [0]
    number = 0
    for length, count in runs:
        at = place = 0  # the runs before this place have too little space for this length
        while count:
            while at < len(blocks) and largest[at] < length:
                at, place = at + 1, 0
            is_new = at == len(blocks)
            if is_new:
                at, place = len(blocks) - 1, len(blocks[-1])
                pack, packs, free, has, content = number, count, capacity, 0, None
            else:
                block = blocks[at]
                place = next(i for i in range(place, len(block)) if block[i][3] >= length)
                pack, _, packs, free, has, content = block.pop(place)
            samples = min(free // length, max_samples - has)
            changed: list[Run] = []
            while count and packs:
                share = samples if samples <= count else count
                filled = min(count // share, packs)
                steps.append((pack, 1, filled, share, has))
                count -= filled * share
                space = free - length * share if has + share < max_samples else 0
                changed.append((pack, 1, filled, space, has + share, (content, length, share)))
                pack, packs = pack + filled, packs - filled
            if is_new:
                number = pack
            elif packs:
                changed.append((pack, 1, packs, free, has, content))
            block = blocks[at]
            block[place:place] = changed
            place += len(changed)
            if (half := len(block) // 2) >= _BLOCK:
                blocks[at : at + 1] = [block[:half], block[half:]]
                largest[at : at + 1] = [max([run[3] for run in part]) for part in blocks[at : at + 2]]
                at, place = (at, place) if place <= half else (at + 1, place - half)
            else:
                largest[at] = max([run[3] for run in block])
    return Placed(steps, [run for block in blocks for run in block], number)


def next_fit(lengths: npt.NDArray[np.integer], capacity: int, max_samples: int, tokens: int, samples: int) -> Int64:
    """Put each sample into the current pack, or into a new one if it does not fit.

    Args:
        lengths: integers (n,), in input order, each 1 to `capacity`.
        capacity, max_samples: as for `best_fit`.
        tokens, samples: content of the current pack before the first sample.

    Returns:
        Index of the first sample of each new pack: int64 (k,).
    """
    total = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first = min(int(np.searchsorted(total, capacity - tokens, side="right")) - 1, max_samples - samples)
    if max_samples == 1:
        return np.arange(first, len(lengths))
    ends = np.searchsorted(total, total[:-1] + capacity, side="right") - 1
    end_of = np.minimum(ends, np.arange(len(lengths)) + max_samples).data  # a buffer, whose items are Python integers
    firsts = []
    while first < len(lengths):
        firsts.append(first)
        first = end_of[first]
    return np.array(firsts, dtype=np.int64)
