"""Each algorithm gives exactly the packs of its textbook loop; lists in place of trees and bit sets."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from energon_packed import pack_lengths
from tests.internals import Placement, bitset, kernels, search

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


@pytest.mark.parametrize(("seed", "limit"), CASES)
def test_packs_filled_one_by_one_hold_the_longest_that_fit(seed: int, limit: int | None) -> None:
    lengths, capacity = problem(seed)
    array, most = np.array(lengths, dtype=np.int32), limit or len(lengths)
    order, placed = kernels.descending_order(array, capacity)
    assert order.tolist() == descending(lengths, capacity)
    assert placed.tolist() == [lengths[i] for i in order]
    places, pack_at, packs = search._fill_exactly(placed, capacity, most, 64)
    assert sorted(places.tolist()) == list(range(len(placed)))
    assert sorted(set(pack_at.tolist())) == list(range(packs))
    left = sorted(placed.tolist())
    for pack in range(packs):
        held = placed[places[pack_at == pack]].tolist()
        assert sum(held) <= capacity
        assert len(held) <= most
        assert held[0] == left[-1]  # the longest that is left opens it
        for one in held:
            left.remove(one)
        assert len(held) == most or not left or left[0] > capacity - sum(held)  # nothing that is left fits


def test_two_samples_that_fill_a_pack_are_found() -> None:
    # 10 opens; 6 and 2 leave a gap of 2, 5 and 5 leave none.
    assert packed_exactly([10, 6, 5, 5, 2], 20, 5) == [[10, 5, 5], [6, 2]]
    assert packed_exactly([10, 6, 5, 5, 2], 20, 3) == [[10, 5, 5], [6, 2]]
    # A filler of the same length needs a second sample of it.
    assert packed_exactly([10, 6, 5, 2], 20, 5) == [[10, 6, 2], [5]]
    # With room for one more, the longest that fits is taken; so it is where nothing would fit beside it.
    assert packed_exactly([10, 6, 5, 5, 2], 20, 2) == [[10, 6], [5, 5], [2]]
    assert packed_exactly([10, 6, 5, 5], 20, 5) == [[10, 6], [5, 5]]


def packed_exactly(lengths: list[int], capacity: int, most: int) -> list[list[int]]:
    placed = np.array(lengths, dtype=np.int32)
    places, pack_at, packs = search._fill_exactly(placed, capacity, most, 64)
    return [placed[places[pack_at == pack]].tolist() for pack in range(packs)]


def test_a_plan_of_best_is_the_same_in_every_run() -> None:
    lengths = np.random.default_rng(106).integers(15, 61, 60)  # only perturbed orders give 20 packs here
    plan = pack_lengths(lengths, 100, algorithm="best")
    assert (plan.num_packs, pack_lengths(lengths, 100).num_packs) == (20, 21)
    digest = hashlib.sha256(plan.indices.tobytes() + plan.offsets.tobytes()).hexdigest()
    assert digest[:16] == "67d6b95504a6c09d"


@pytest.mark.parametrize(
    ("lengths", "limit", "bound"),
    [([], 9, 0), ([200], 9, 0), ([60, 60], 9, 2), ([50, 50], 9, 1), ([1, 1, 1], 2, 2), ([40, 40, 40], 9, 2)],
)
def test_no_plan_has_fewer_packs_than_the_bound(lengths: list[int], limit: int, bound: int) -> None:
    assert search._lower_bound(np.array(lengths, dtype=np.int32), 100, limit) == bound


def test_neighbours_at_the_ends_of_words() -> None:
    levels = bitset.bitset_levels(300)
    words = np.zeros(levels[-1], dtype=np.uint64)
    for member in (0, 128, 191):
        bitset.bitset_add(words, levels, member)
    found = {key: bitset.bitset_previous(words, levels, key) for key in (0, 63, 64, 127, 128, 190, 191, 192, 299)}
    assert found == {0: 0, 63: 0, 64: 0, 127: 0, 128: 128, 190: 128, 191: 191, 192: 191, 299: 191}


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
            assert bitset.bitset_previous(words, levels, key) == max((m for m in members if m <= key), default=-1)


@pytest.mark.parametrize(
    ("packs", "budget", "tried", "chosen"),
    [
        ([2, 2, 2], 99, 1, 0),  # as few as the bound
        ([4, 3, 2, 2], 99, 3, 2),
        ([3, 3, 4, 3], 99, 4, 0),  # of equal ones the first
        ([4, 3, 3, 2], 12, 3, 1),  # 4 samples each
        ([4, 3, 3, 2], 13, 4, 3),
    ],
)
def test_the_search_ends_at_the_bound_or_the_budget(
    monkeypatch: pytest.MonkeyPatch, packs: list[int], budget: int, tried: int, chosen: int
) -> None:
    plans = [Placement(np.arange(4, dtype=np.int32), np.zeros(4, dtype=np.int32), number) for number in packs]
    seen: list[Placement] = []

    def candidates(*_: object) -> Iterator[Placement]:
        for plan in plans:
            seen.append(plan)
            yield plan

    monkeypatch.setattr(search, "_candidates", candidates)
    monkeypatch.setattr(search, "BUDGET", budget)
    found = search.best(np.full(4, 50, dtype=np.int32), 100, 9)
    assert (found is plans[chosen], len(seen)) == (True, tried)
