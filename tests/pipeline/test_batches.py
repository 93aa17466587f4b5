"""Batches of items with limits of their number and size."""

import pytest

from tests.internals import batches


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1, 2, 3, 4], [[1, 2, 3], [4]]),
        ([5, 5, 1], [[5, 5], [1]]),
        ([5, 6, 4], [[5], [6, 4]]),
        ([4, 11, 4], [[4], [11], [4]]),
        ([11, 0, 1], [[11], [0, 1]]),
        ([9, 2, 9, 0, 1], [[9], [2], [9, 0, 1]]),
        ([0, 0, 0, 0], [[0, 0, 0], [0]]),
        ([], []),
    ],
)
def test_batches_have_at_most_three_items_of_size_ten(sizes: list[int], expected: list[list[int]]) -> None:
    assert list(batches(sizes, 3, int, 10)) == expected


def test_a_full_batch_is_used_before_the_next_item_is_read() -> None:
    """The next item may be the first of which more objects are requested."""
    items = iter(range(100))
    by_number, by_size = batches(items, 4, lambda item: 0, 1), batches(items, 100, lambda item: 2, 4)
    assert next(by_number) == [0, 1, 2, 3]
    assert next(by_size) == [4, 5]
    assert next(items) == 6
