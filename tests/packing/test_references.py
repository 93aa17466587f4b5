"""Each algorithm gives exactly the packs of its textbook loop; lists in place of trees and bit sets."""

from collections import defaultdict

import numpy as np
import pytest

from energon_packed import pack_lengths
from tests.internals import bitset, kernels

Packs = list[list[int]]
CASES = [(seed, limit) for seed in range(8) for limit in (None, 1, 2, 5)]


def problem(seed: int) -> tuple[list[int], int]:
    """Lengths of a kind of their own for each seed, many of them equal, and a capacity that some exceed or fill."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(20, 200))
    lengths = rng.integers(1, rng.integers(capacity // 4, capacity + 3), int(rng.integers(1, 160))).tolist()
    return [*lengths, *[capacity, capacity - 1] * (seed % 2)], capacity


def descending(lengths: list[int], capacity: int) -> list[int]:
    return sorted((i for i, one in enumerate(lengths) if one <= capacity), key=lambda i: -lengths[i])


def best_fit(lengths: list[int], capacity: int, limit: int, order: list[int]) -> Packs:
    """The pack with the least sufficient space; of several, the one that got it last."""
    packs: Packs = []
    open_packs: dict[int, list[int]] = defaultdict(list)
    for sample in order:
        spaces = [space for space, found in open_packs.items() if found and space >= lengths[sample]]
        if spaces:
            space, number = min(spaces), open_packs[min(spaces)].pop()
        else:
            space, number = capacity, len(packs)
            packs.append([])
        packs[number].append(sample)
        if space > lengths[sample] and len(packs[number]) < limit:
            open_packs[space - lengths[sample]].append(number)
    return packs


def first_fit(lengths: list[int], capacity: int, limit: int, order: list[int], *, only_last: bool = False) -> Packs:
    """The oldest pack with enough space, or the last pack only."""
    packs: Packs = []
    for sample in order:
        for pack in packs[-1:] if only_last else packs:
            if len(pack) < limit and sum(lengths[i] for i in pack) + lengths[sample] <= capacity:
                pack.append(sample)
                break
        else:
            packs.append([sample])
    return packs


@pytest.mark.parametrize(("seed", "limit"), CASES)
def test_packs_are_those_of_the_textbook(seed: int, limit: int | None) -> None:
    lengths, capacity = problem(seed)
    most, order = limit or len(lengths), descending(lengths, capacity)
    kept = sorted(order)
    windows = [[i for i in order if i // 7 == window] for window in range(len(lengths) // 7 + 1)]
    expected = {
        "bfd": best_fit(lengths, capacity, most, order),
        "ffd": first_fit(lengths, capacity, most, order),
        "sequential": first_fit(lengths, capacity, most, kept, only_last=True),
        "window_7": [pack for window in windows for pack in best_fit(lengths, capacity, most, window)],
    }
    for name, packs in expected.items():
        found = [pack.tolist() for pack in pack_lengths(lengths, capacity, algorithm=name, max_samples=limit)]
        assert found == packs, name


@pytest.mark.parametrize("seed", range(8))
def test_samples_are_placed_by_descending_length(seed: int) -> None:
    lengths, capacity = problem(seed)
    order, placed = kernels.descending_order(np.array(lengths, dtype=np.int32), capacity)
    assert order.tolist() == descending(lengths, capacity)
    assert placed.tolist() == [lengths[i] for i in order]


def test_neighbours_at_the_ends_of_words() -> None:
    levels = bitset.bitset_levels(300)
    words = np.zeros(levels[-1], dtype=np.uint64)
    for member in (0, 128, 191):
        bitset.bitset_add(words, levels, member)
    found = {key: bitset.bitset_next(words, levels, key) for key in (0, 1, 63, 64, 127, 128, 129, 191, 192, 299)}
    assert found == {0: 0, 1: 128, 63: 128, 64: 128, 127: 128, 128: 128, 129: 191, 191: 191, 192: -1, 299: -1}


@pytest.mark.parametrize("size", [1, 64, 65, 300, 4097])
def test_neighbours_of_every_key(size: int) -> None:
    rng = np.random.default_rng(size)
    levels = bitset.bitset_levels(size)
    words = np.zeros(levels[-1], dtype=np.uint64)
    members: set[int] = set()
    for _ in range(3):
        for key in rng.integers(0, size, 9).tolist():
            change = bitset.bitset_remove if key in members else bitset.bitset_add
            change(words, levels, key)
            members ^= {key}
        for key in [*range(min(size, 200)), *range(max(0, size - 80), size)]:
            assert bitset.bitset_next(words, levels, key) == min((m for m in members if m >= key), default=-1)
