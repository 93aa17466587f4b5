"""Each algorithm gives exactly the packs of its textbook loop; lists in place of trees and bit sets."""

import tracemalloc
from collections import defaultdict

import numpy as np
import pytest

from energon_packed import pack_lengths
from tests.internals import arrays, placing, planner

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


def test_first_fit_over_many_lists_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_BLOCK", 2)
    for seed in range(40):
        lengths, capacity = problem(seed)
        for limit in (None, 3):
            most, order = limit or len(lengths), descending(lengths, capacity)
            found = pack_lengths(lengths, capacity, algorithm="ffd", max_samples=limit)
            assert [pack.tolist() for pack in found] == first_fit(lengths, capacity, most, order), seed


def textbook(name: str, lengths: list[int], capacity: int, most: int) -> Packs:
    order = descending(lengths, capacity)
    if name == "ffd":
        return first_fit(lengths, capacity, most, order)
    if name == "sequential":
        return first_fit(lengths, capacity, most, sorted(order), only_last=True)
    window = 7 if name == "window_7" else max(len(lengths), 1)
    windows = [[i for i in order if i // window == number] for number in range(len(lengths) // window + 1)]
    return [pack for own in windows for pack in best_fit(lengths, capacity, most, own)]


@pytest.mark.parametrize("block", [None, 1, 5])
@pytest.mark.parametrize("name", ["bfd", "ffd", "sequential", "window_7"])
@pytest.mark.parametrize("limit", [None, 1, 3, 1000])
def test_packs_of_groups_are_those_of_the_textbook(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int | None, block: int | None
) -> None:
    """Groups are placed as samples of their sum, in the order of their first samples; with a limit, by size."""
    if block is not None:
        monkeypatch.setattr(arrays, "BLOCK", block)
    for seed in range(12):
        lengths, capacity = problem(seed)
        rng = np.random.default_rng(seed)
        keys = rng.integers(-(2**63), 2**63, max(len(lengths) // (1 + seed % 4), 1))[
            rng.integers(0, max(len(lengths) // (1 + seed % 4), 1), len(lengths))
        ]
        members: dict[int, list[int]] = defaultdict(list)
        for sample, key in enumerate(keys.tolist()):
            members[key].append(sample)
        units = list(members.values())
        classes = [(units, len(lengths))]
        if limit is not None and limit < len(lengths):
            classes = [([u for u in units if len(u) == size], limit // size) for size in range(1, limit + 1)]
        expected = []
        for own, most in classes:
            tokens = [sum(lengths[i] for i in unit) for unit in own]
            expected += [[i for unit in pack for i in own[unit]] for pack in textbook(name, tokens, capacity, most)]
        plan = pack_lengths(lengths, capacity, algorithm=name, max_samples=limit, groups=keys)
        assert [pack.tolist() for pack in plan] == expected, seed
        assert plan.overlong.tolist() == sorted(set(range(len(lengths))) - {i for pack in expected for i in pack})


@pytest.mark.parametrize("name", ["bfd", "ffd", "sequential", "window_1", "window_7"])
def test_packs_are_counted_without_a_plan(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(arrays, "BLOCK", 8)
    for seed in range(12):
        lengths, capacity = problem(seed)
        for limit, multiple in ((None, 1), (1, 1), (3, 4)):
            plan = pack_lengths(lengths, capacity, algorithm=name, max_samples=limit, multiple=multiple)
            assert planner.count_packs(np.array(lengths), capacity, name, limit, multiple) == plan.num_packs


@pytest.mark.parametrize("block", [1, 3])
def test_plans_in_small_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    algorithms = ("bfd", "ffd", "sequential", "window_2", "window_7")
    problems = [(*problem(seed), name, limit) for seed in range(20) for name in algorithms for limit in (None, 3)]

    def plans() -> list[list[list[int]]]:
        return [
            [pack.tolist() for pack in pack_lengths(lengths, capacity, algorithm=name, max_samples=limit, seed=2)]
            for lengths, capacity, name, limit in problems
        ]

    expected = plans()
    for module, name in ((arrays, "BLOCK"), (planner, "_PACKS")):
        monkeypatch.setattr(module, name, block)
    assert plans() == expected


@pytest.mark.parametrize(
    ("algorithm", "count"),
    [("bfd", 800_000), ("ffd", 800_000), ("sequential", 800_000), ("window_4096", 400_000)],
)
def test_memory_per_sample(monkeypatch: pytest.MonkeyPatch, algorithm: str, count: int) -> None:
    for module, name in ((arrays, "BLOCK"), (planner, "_PACKS")):
        monkeypatch.setattr(module, name, 1 << 12)
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.8, count), 1, 4096).astype(np.int32)
    tracemalloc.start()
    try:
        pack_lengths(lengths, 4096, algorithm=algorithm)
        assert tracemalloc.get_traced_memory()[1] < 20 * count
    finally:
        tracemalloc.stop()
