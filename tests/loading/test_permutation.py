"""A permutation by function has each number once, and all orders are equally frequent."""

from collections import Counter
from itertools import permutations, product
from math import factorial

import numpy as np
import pytest

from tests.internals import Permutation

LARGE = 100_000_000


def test_each_number_is_there_once() -> None:
    for size in [*range(3001), 4096, 65_537, 100_003, 1 << 17]:
        assert np.array_equal(np.sort(Permutation(size, [size % 7, 1])(np.arange(size))), np.arange(size))
    rng = np.random.default_rng(0)
    for size in rng.integers(3001, 300_000, 20).tolist():
        assert np.array_equal(np.sort(Permutation(size, [1, size])(np.arange(size))), np.arange(size))


@pytest.mark.parametrize("size", [LARGE, 2**31 - 1, 2**32 + 1, 2**62])
def test_numbers_of_a_large_permutation_differ_and_are_in_range(size: int) -> None:
    positions = np.random.default_rng(1).integers(0, size, 100_000)
    numbers = Permutation(size, [3])(np.append(positions, size - 1))
    assert numbers.dtype == np.int64
    assert numbers.min() >= 0
    assert numbers.max() < size
    assert len(np.unique(numbers)) == len(np.unique(np.append(positions, size - 1)))


def test_a_number_depends_on_its_position_alone() -> None:
    order, positions = Permutation(LARGE, [5, 1]), np.random.default_rng(2).integers(0, LARGE, 300)
    whole = order(positions)
    assert [int(order(positions[i : i + 1])[0]) for i in range(300)] == whole.tolist()
    keys = [[5, 1], [5, 2], [6, 1], [5, 1, 3], [5], [5, 0, 1]]
    assert len({tuple(Permutation(LARGE, key)(positions).tolist()) for key in keys}) == len(keys)
    # A state continues with the same items, whatever changed in the code since it was saved.
    assert Permutation(1000, [7, 2])(np.arange(8)).tolist() == [712, 401, 733, 121, 711, 339, 424, 170]
    assert Permutation(LARGE, [7, 2])(np.arange(4)).tolist() == [2767202, 57649140, 20388768, 580796]


def excess(counts: np.ndarray) -> float:
    """Chi-square of equally likely counts, in standard deviations from its mean."""
    expected = counts.mean()
    return float((((counts - expected) ** 2).sum() / expected - len(counts) + 1) / np.sqrt(2 * (len(counts) - 1)))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_few_numbers_are_equally_frequent(size: int) -> None:
    keys = range(60 * factorial(size))
    found = Counter(tuple(Permutation(size, [key])(np.arange(size)).tolist()) for key in keys)
    assert excess(np.array([found[order] for order in permutations(range(size))])) < 4


@pytest.mark.parametrize("size", [7, 9, 16, 25, 97])
def test_each_number_and_each_pair_is_equally_frequent_at_each_place(size: int) -> None:
    orders = np.array([Permutation(size, [key, 4])(np.arange(size)) for key in range(1000)])
    places = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    assert abs(excess(places.ravel())) < 5
    steps = (orders[:, 1:] - orders[:, :-1]) % size
    assert abs(excess(np.bincount(steps.ravel(), minlength=size)[1:])) < 5
    fixed = (orders == np.arange(size)).sum(axis=1)  # 1 in the mean, with variance 1
    assert abs(fixed.mean() - 1) < 5 / np.sqrt(len(orders))
    odd = sum(parity(order) for order in orders.tolist())
    assert abs(odd - 500) < 5 * np.sqrt(250)


def parity(order: list[int]) -> int:
    """0 for an even permutation, 1 for an odd permutation."""
    cycles, seen = 0, set[int]()
    for start in order:
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = order[start]
    return (len(order) - cycles) % 2


@pytest.mark.parametrize(("size", "seed"), product([1 << 20, 1_000_003, LARGE, 1 << 27], range(3)))
def test_a_large_order_is_uniform(size: int, seed: int) -> None:
    numbers = Permutation(size, [seed, 7])(np.arange(200_000))
    assert abs(excess(np.bincount(numbers * 97 // size, minlength=97))) < 5
    assert abs(excess(np.bincount((np.diff(numbers) % size) * 97 // size, minlength=97))) < 5
    pairs = numbers[:-1] * 16 // size * 16 + numbers[1:] * 16 // size
    assert abs(excess(np.bincount(pairs, minlength=256))) < 5
    assert abs(excess(np.bincount(numbers % 64, minlength=64))) < 5
    # No part of the order has more of a shard than other parts.
    of_parts = np.stack([np.bincount(part, minlength=20) for part in numbers.reshape(-1, 1000) * 20 // size])
    assert abs(excess(of_parts.ravel())) < 5
    assert (numbers == np.arange(200_000)).sum() < 6
