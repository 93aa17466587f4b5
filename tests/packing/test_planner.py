"""The planner: every sample in exactly one pack, no pack over capacity, and known packs for small input."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_packed import ConfigError, pack_lengths

ALGORITHMS = ["bfd", "ffd", "sequential", "window_7"]


def reference_best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook loop, O(n * packs)."""
    packs: list[list[int]] = []
    space: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [p for p in range(len(packs)) if space[p] >= lengths[sample]]
        if fits:
            best = min(fits, key=lambda p: space[p])
        else:
            packs.append([])
            space.append(capacity)
            best = len(packs) - 1
        packs[best].append(sample)
        space[best] -= lengths[sample]
    return packs


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("bfd", [[0, 1], [2, 3]]),
        ("ffd", [[0, 1], [2, 3]]),
        ("sequential", [[0, 1], [2, 3]]),
        ("window_2", [[0, 1], [2, 3]]),
    ],
)
def test_golden_packs(algorithm: str, expected: list[list[int]]) -> None:
    plan = pack_lengths([5, 3, 3, 2, 9], 8, algorithm=algorithm)
    assert [pack.tolist() for pack in plan] == expected
    assert plan.overlong.tolist() == [4]
    assert (plan.num_packs, plan.tokens, plan.utilization) == (2, 13, 13 / 16)


def test_best_fit_takes_the_fullest_pack_and_first_fit_the_oldest() -> None:
    # Packs [6] with 4 left and [5, 4] with 1 left; the sample of 1 completes the second, or enters the first.
    lengths = [6, 5, 5, 1]
    assert [p.tolist() for p in pack_lengths(lengths, 11, algorithm="bfd")] == [[0, 1], [2, 3]]
    lengths = [7, 6, 3, 1]
    assert [p.tolist() for p in pack_lengths(lengths, 10, algorithm="bfd")] == [[0, 2], [1, 3]]
    assert [p.tolist() for p in pack_lengths([6, 7, 1], 10, algorithm="bfd")] == [[1, 2], [0]]
    assert [p.tolist() for p in pack_lengths([7, 8, 1, 2], 10, algorithm="ffd")] == [[1, 3], [0, 2]]


RUNS = st.tuples(st.integers(1, 130), st.integers(1, 12))
"""A length, and how many samples have it: best fit places equal lengths together, by a loop of their own."""


@given(
    lengths=st.lists(RUNS, max_size=40).map(lambda runs: [length for length, count in runs for _ in range(count)]),
    capacity=st.integers(1, 128),
    algorithm=st.sampled_from(ALGORITHMS),
    max_samples=st.none() | st.integers(1, 5),
    multiple=st.integers(1, 9),
    seed=st.none() | st.integers(0, 3),
)
@example([3] * 10, 30, "bfd", 2, 1, None)
@example([3] * 10, 30, "window_7", 2, 1, None)
@example([3] * 10, 30, "ffd", 2, 1, None)
@example([3] * 10, 30, "sequential", 2, 1, None)
@example([9, 9, 3, 3, 3, 3, 1], 30, "bfd", 3, 1, None)  # a pack that is opened with one length and filled with others
def test_every_sample_is_in_one_pack_that_fits(
    lengths: list[int], capacity: int, algorithm: str, max_samples: int | None, multiple: int, seed: int | None
) -> None:
    plan = pack_lengths(lengths, capacity, algorithm=algorithm, max_samples=max_samples, multiple=multiple, seed=seed)
    placed = np.concatenate([plan.indices, plan.overlong])
    assert sorted(placed.tolist()) == list(range(len(lengths)))
    padded = [-(-length // multiple) * multiple for length in lengths]
    assert plan.overlong.tolist() == [i for i, length in enumerate(padded) if length > capacity]
    for pack in plan:
        assert 1 <= len(pack) <= (max_samples or len(lengths))
        assert sum(padded[i] for i in pack) <= capacity
    assert plan.tokens == sum(lengths[i] for i in plan.indices)
    assert (plan.indices.dtype, plan.offsets.dtype, plan.overlong.dtype) == (np.int64,) * 3


@given(lengths=st.lists(st.integers(1, 64), max_size=60), capacity=st.integers(64, 200))
def test_best_fit_decreasing_equals_the_textbook_loop(lengths: list[int], capacity: int) -> None:
    plan = pack_lengths(lengths, capacity)
    expected = reference_best_fit_decreasing(lengths, capacity)
    assert plan.num_packs == len(expected)
    # Packs of equal free space are interchangeable, so the fill of the packs is the same, whichever was taken.
    assert sorted(sum(lengths[i] for i in p) for p in plan) == sorted(sum(lengths[i] for i in p) for p in expected)


def test_best_fit_of_large_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 300_000, 400)
    plan = pack_lengths(lengths, 300_000)
    assert plan.num_packs == len(reference_best_fit_decreasing(lengths.tolist(), 300_000))


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_sequential_keeps_the_order(lengths: list[int]) -> None:
    assert pack_lengths(lengths, 20, algorithm="sequential").indices.tolist() == list(range(len(lengths)))


def test_windows_do_not_mix() -> None:
    for window, packs in ((5, 8), (10, 6)):
        plan = pack_lengths(np.full(20, 3, dtype=np.int32), 12, algorithm=f"window_{window}")
        assert all(len({i // window for i in pack.tolist()}) == 1 for pack in plan)
        assert plan.num_packs == packs


def test_seed_shuffles_packs_and_nothing_else() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 300)
    plain, shuffled, again = (pack_lengths(lengths, 64, seed=seed) for seed in (None, 5, 5))
    as_sets = [{tuple(p.tolist()) for p in plan} for plan in (plain, shuffled)]
    assert as_sets[0] == as_sets[1]
    assert [p.tolist() for p in shuffled] == [p.tolist() for p in again]
    assert shuffled.indices.tolist() != plain.indices.tolist()


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1], {"capacity": 0}, "`capacity` must be at least 1, got 0"),
        ([1], {"capacity": 2**31}, r"a row must have at most 2147483647 tokens \(int32\), got 2147483648"),
        ([1], {"capacity": True}, "`capacity` must be an integer, got True"),
        ([1], {"capacity": 8.0}, "`capacity` must be an integer, got 8.0"),
        ([1], {"capacity": 8, "multiple": 0}, "`multiple` must be at least 1, got 0"),
        ([1], {"capacity": 8, "max_samples": 0}, "`max_samples` must be at least 1, got 0"),
        (
            [1],
            {"capacity": 8, "algorithm": "magic"},
            "unknown algorithm 'magic'; .* sequential, window_N$",
        ),
        ([1], {"capacity": 8, "algorithm": "window_0"}, "unknown algorithm"),
        ([3, 0], {"capacity": 8}, r"`lengths\[1\]` must be at least 1, got 0"),
        ([3, -2], {"capacity": 8}, r"`lengths\[1\]` must be at least 1, got -2"),
        ([1.5], {"capacity": 8}, "`lengths` must be integers, got float64"),
        ([[1, 2]], {"capacity": 8}, "one dimension"),
        ([1, 2**31], {"capacity": 8}, r"`lengths\[1\]` must be at most 2147483647 \(int32\), got 2147483648"),
    ],
)
def test_bad_input_names_the_value(lengths: object, options: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        pack_lengths(lengths, **options)  # type: ignore[arg-type]


def test_the_longest_lengths_are_overlong_and_nothing_overflows() -> None:
    plan = pack_lengths([2**31 - 1, 5, 2**31 - 8], 64, multiple=16)
    assert ([pack.tolist() for pack in plan], plan.overlong.tolist(), plan.tokens) == ([[1]], [0, 2], 5)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    algorithm=st.sampled_from(ALGORITHMS),
    max_samples=st.none() | st.integers(1, 5),
)
def test_a_row_of_any_size_takes_the_memory_of_what_it_holds(
    lengths: list[int], algorithm: str, max_samples: int | None
) -> None:
    total = max(sum(lengths), 1)
    plan, small = (
        pack_lengths([*lengths, 2**31 - 1], size, algorithm=algorithm, max_samples=max_samples)
        for size in (2**31 - 2, total)
    )
    assert [pack.tolist() for pack in plan] == [pack.tolist() for pack in small]
    assert plan.overlong.tolist() == small.overlong.tolist() == [len(lengths)]


def test_a_window_may_be_larger_than_any_number_of_samples() -> None:
    for window in ("1" + 30 * "0", 5000 * "9"):  # Python converts at most 4,300 digits
        assert pack_lengths([5, 3, 3, 2], 8, algorithm=f"window_{window}").num_packs == 2


def test_a_sample_may_fill_a_large_row() -> None:
    """Above 2**20 tokens, the memory follows the samples and not the row; 2**31 - 1 is the largest row."""
    large = 2**20 + 1
    plan = pack_lengths([large, 5, large, large + 1], large, seed=1)
    assert sorted(pack.tolist() for pack in plan) == [[0], [1], [2]]
    assert (plan.capacity, plan.overlong.tolist(), plan.tokens) == (large, [3], 2 * large + 5)
    assert plan.utilization == plan.tokens / (3 * large)
    assert pack_lengths([5, 3], 2**31 - 1).num_packs == 1


def test_lengths_are_rounded_up_to_a_multiple() -> None:
    plan = pack_lengths([3, 3, 2, 7], 7, multiple=2)
    assert ([pack.tolist() for pack in plan], plan.overlong.tolist()) == ([[0], [1, 2]], [3])
    assert [pack.tolist() for pack in pack_lengths([3, 3, 1], 7)] == [[0, 1, 2]]


@given(
    samples=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=60),
    algorithm=st.sampled_from(ALGORITHMS),
    multiple=st.integers(1, 5),
    max_samples=st.none() | st.integers(1, 5),
    is_sorted=st.booleans(),
)
def test_groups_are_whole_and_in_order_in_one_pack_or_overlong(
    samples: list[tuple[int, int]], algorithm: str, multiple: int, max_samples: int | None, is_sorted: bool
) -> None:
    samples = sorted(samples, key=lambda sample: sample[1]) if is_sorted else samples
    lengths, keys = [length for length, _ in samples], np.array([key for _, key in samples], dtype=np.int64)
    plan = pack_lengths(lengths, 40, algorithm=algorithm, multiple=multiple, max_samples=max_samples, groups=keys)
    padded = np.array([-(-length // multiple) * multiple for length in lengths], dtype=np.int64)
    placed = []
    for pack in [*plan, plan.overlong]:
        for key in dict.fromkeys(keys[pack].tolist()):
            members = pack[keys[pack] == key]
            assert members.tolist() == np.flatnonzero(keys == key).tolist()
            fits = padded[members].sum() <= 40 // multiple * multiple and len(members) <= (max_samples or 60)
            assert fits == (pack is not plan.overlong)
        placed += pack.tolist()
    assert sorted(placed) == list(range(len(samples)))
    for pack in plan:
        assert padded[pack].sum() <= 40
        assert len(pack) <= (max_samples or 60)
        runs = [key for place, key in enumerate(keys[pack]) if place == 0 or keys[pack][place - 1] != key]
        assert len(runs) == len(set(runs))  # adjacent
    assert plan.tokens == sum(lengths) - sum(lengths[i] for i in plan.overlong)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_of_one_sample_change_nothing(algorithm: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 120, 500)
    for keys in (np.arange(500), np.arange(500)[::-1]):
        for options in ({}, {"max_samples": 3}, {"multiple": 8}):
            plain = pack_lengths(lengths, 100, algorithm=algorithm, **options)
            grouped = pack_lengths(lengths, 100, algorithm=algorithm, groups=keys, **options)
            assert np.array_equal(plain.indices, grouped.indices)
            assert np.array_equal(plain.offsets, grouped.offsets)
            assert np.array_equal(plain.overlong, grouped.overlong)


def test_groups_of_another_shape_are_refused() -> None:
    for groups in ([0], [0.5, 1.0], [[0, 1]]):
        with pytest.raises(ValueError, match=r"`groups` must be integers of shape \(2,\)"):
            pack_lengths([1, 2], 4, groups=groups)


def test_empty_input_gives_an_empty_plan() -> None:
    plan = pack_lengths([], 8)
    assert (plan.num_packs, plan.tokens, plan.utilization, list(plan)) == (0, 0, 1.0, [])


def test_packs_by_number() -> None:
    plan = pack_lengths([5, 3, 3, 2], 8)
    assert plan[-1].tolist() == plan[1].tolist()
    assert plan[-2].tolist() == plan[0].tolist()
    with pytest.raises(IndexError, match="pack 2 is out of range for a plan of 2 packs"):
        plan[2]
