"""Plans of counts: the packs of best fit decreasing, in memory that does not depend on the number of samples."""

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_packed import ConfigError, pack_lengths
from tests.internals import plan_counts


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), max_size=30).map(
        lambda runs: [length for length, count in runs for _ in range(count)]
    ),
    capacity=st.integers(1, 60),
    max_samples=st.none() | st.integers(1, 5),
    multiple=st.integers(1, 9),
)
@example([9, 9, 3, 3, 3, 3, 1], 30, 3, 1)
@example([7, 7], 7, None, 4)  # too long after rounding
def test_the_packs_are_those_of_the_samples(
    lengths: list[int], capacity: int, max_samples: int | None, multiple: int
) -> None:
    lengths = [length for length in lengths if length <= capacity]
    expected = pack_lengths(lengths, capacity, max_samples=max_samples, multiple=multiple)
    plan = plan_counts(
        np.bincount(lengths, minlength=capacity + 1), capacity, max_samples=max_samples, multiple=multiple
    )
    padded = [-(-length // multiple) * multiple for length in lengths]
    patterns = Counter(tuple(sorted((padded[i] for i in pack), reverse=True)) for pack in expected)
    assert {tuple(pattern.tolist()): times for pattern, times in plan} == patterns
    assert (plan.num_packs, plan.tokens, plan.overlong) == (
        expected.num_packs, expected.tokens, len(expected.overlong)
    )  # fmt: skip
    assert plan.utilization == expected.utilization
    order = [pattern.tolist() for pattern, _ in plan]
    assert order == sorted(order, reverse=True)
    assert len(plan) == len(patterns)


def test_a_billion_samples_are_planned_in_little_memory() -> None:
    sizes = np.arange(1, 4097)
    counts = np.concatenate([[0], (1e9 * np.exp(-((np.log(sizes) - 6) ** 2) / 3) / sizes).astype(np.int64) + 1])
    tracemalloc.start()
    try:
        plan = plan_counts(counts, 4096)
        memory = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counts.sum() > 1e9
    assert sum(len(pattern) * times for pattern, times in plan) == counts.sum()
    assert plan.tokens == (counts * np.arange(4097)).sum()
    assert plan.utilization > 0.999
    assert memory < 50e6  # it needs 6 MB


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([0, 1], {"capacity": 0}, "`capacity` must be at least 1, got 0"),
        ([0, 1], {"capacity": 8, "multiple": 0}, "`multiple` must be at least 1, got 0"),
        ([0, 1], {"capacity": 8, "max_samples": 1.5}, "`max_samples` must be an integer, got 1.5"),
        ([0] * 10, {"capacity": 8}, r"`counts` must have at most 9 entries \(capacity \+ 1\), got shape \(10,\)"),
        ([[0, 1]], {"capacity": 8}, r"`counts` must have at most 9 entries .* got shape \(1, 2\)"),
        ([0, 0.5], {"capacity": 8}, "`counts` must be integers, got float64"),
        ([0, 2, -1], {"capacity": 8}, r"`counts\[2\]` must be at least 0, got -1"),
        ([3, 1], {"capacity": 8}, r"`counts\[0\]` must be 0, as no sample has 0 tokens, got 3"),
    ],
)
def test_bad_input_names_the_value(counts: Any, options: dict[str, Any], message: str) -> None:
    error = ConfigError if "counts" not in message else ValueError
    with pytest.raises(error, match=message):
        plan_counts(counts, **options)


def test_nothing_gives_an_empty_plan() -> None:
    for counts in ([], [0], np.zeros(9, np.int64)):
        plan = plan_counts(counts, 8)
        assert (plan.num_packs, plan.tokens, plan.overlong, plan.utilization, list(plan)) == (0, 0, 0, 1.0, [])
