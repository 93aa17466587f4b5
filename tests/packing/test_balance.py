"""Balanced steps hold every row once, cost alike on all ranks, and costs can be measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packed import ConfigError, CostModel, RowSizes
from tests.internals import balanced_steps, imbalance


def steps_of(costs: np.ndarray, ranks: int, rows: int, seed: int = 0, window: int = 32) -> tuple[np.ndarray, ...]:
    order = np.random.default_rng(seed).permutation(len(costs))
    rng = np.random.default_rng([seed, 1])
    steps, rest = balanced_steps(costs, order, ranks=ranks, rows=rows, window=window, rng=rng)
    return order[: steps.size].reshape(steps.shape), steps, rest


@given(
    costs=st.lists(st.floats(0, 1e9), max_size=200),
    ranks=st.integers(1, 9),
    rows=st.integers(1, 4),
    window=st.integers(1, 9),
)
def test_every_row_is_there_once(costs: list[float], ranks: int, rows: int, window: int) -> None:
    values = np.array(costs)
    _, steps, rest = steps_of(values, ranks, rows, window=window)
    assert steps.shape == (len(costs) // (ranks * rows), ranks, rows)
    assert sorted([*steps.reshape(-1).tolist(), *rest.tolist()]) == list(range(len(costs)))
    again = steps_of(values, ranks, rows, window=window)
    assert np.array_equal(again[1], steps)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_tail_is_balanced_and_mixed(rows: int) -> None:
    costs = np.random.default_rng(1).lognormal(0, 1, 8 * rows * 200)
    before, after, rest = steps_of(costs, 8, rows, window=128)
    assert len(rest) == 0
    assert imbalance(costs, before) > 1.6
    assert imbalance(costs, after) < 1.15
    sums = costs[after].sum(axis=(1, 2))
    order = np.argsort(sums)
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.3  # steps are not in order of cost
    slowest = np.bincount(costs[after].sum(axis=2).argmax(axis=1), minlength=8)
    assert slowest.max() < 0.3 * len(after)  # no rank is the slow one
    assert not np.array_equal(steps_of(costs, 8, rows, seed=1)[1], after)
    assert imbalance(costs, after[:0]) == 1.0


def test_the_rows_of_a_step_are_dealt_from_the_largest_to_the_least_loaded_rank() -> None:
    costs = np.array([3.0, 8.0, 5.0, 4.0])
    steps, _ = balanced_steps(costs, np.arange(4), ranks=2, rows=2, window=1, rng=np.random.default_rng(0))
    assert sorted(map(sorted, costs[steps[0]].tolist())) == [[3, 8], [4, 5]]
    assert imbalance(costs, steps) == 1.1
    assert imbalance(costs / 100, steps) == pytest.approx(1.1)


def test_costs_of_any_type_are_dealt_alike() -> None:
    costs = np.array([7, 1, 5, 3, 0, 9, 2, 8])
    for rows in (1, 2):
        steps = [steps_of(costs.astype(kind), 2, rows)[1].tolist() for kind in (np.float64, np.uint8, np.int64)]
        assert steps[0] == steps[1] == steps[2]
    order, rng = np.random.default_rng(3).permutation(200), np.random.default_rng(4)
    alike, _ = balanced_steps(np.ones(200), order, ranks=2, rows=1, window=100, rng=rng)
    assert {tuple(sorted(step)) for step in alike[:, :, 0].tolist()} == {  # equal costs stay in the order of the seed
        tuple(sorted(pair)) for pair in order.reshape(100, 2).tolist()
    }
    sizes = RowSizes(tokens=np.array([4]), squares=np.array([16]), patches=np.array([0]))
    assert CostModel(token=1, square=0, patch=0).costs(sizes).dtype == np.float64


def test_constants_are_measured() -> None:
    rng = np.random.default_rng(0)
    tokens, patches = rng.integers(100, 9000, 40), rng.integers(0, 5000, 40)
    sizes = RowSizes(tokens=tokens, squares=tokens * rng.integers(50, 9000, 40), patches=patches)
    truth = CostModel(token=2e-6, square=3e-11, patch=5e-7)
    found = CostModel.fit(sizes, truth.costs(sizes) * rng.uniform(0.98, 1.02, 40))
    for name in ("token", "square", "patch"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.15)
    alone = CostModel.fit(sizes, 1e-6 * tokens)
    assert (alone.token, alone.square, alone.patch) == pytest.approx((1e-6, 0, 0), abs=1e-12)
    with pytest.raises(ConfigError, match=r"`seconds` must be a time above 0 .*, got \[1\. 2\.\] for 40 rows"):
        CostModel.fit(sizes, [1.0, 2.0])
    for wrong in ([1.0, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(ConfigError, match="must be a time above 0 for each of 3 or more rows"):
            CostModel.fit(sizes[np.arange(3)], wrong)
    assert CostModel.fit(sizes[np.arange(3)], 1e-6 * tokens[:3]).token == pytest.approx(1e-6)
    with pytest.raises(ConfigError, match="`patch` must be a number >= 0, got -1"):
        CostModel(patch=-1)
    with pytest.raises(ConfigError, match="`square` must be a number >= 0, got -1"):
        CostModel(square=-1)
    with pytest.raises(ConfigError, match="`token` must be a number >= 0, got nan"):
        CostModel(token=float("nan"))
    with pytest.raises(ConfigError, match="`token`, `square` and `patch` must not all be 0"):
        CostModel(token=0, square=0, patch=0)
