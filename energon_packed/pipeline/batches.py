"""Batches of items that are in memory at the same time, as records and their media.

The objects of a batch are requested together: with 20 ms for a request, a worker could send only 50 in a second, one
after the other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], most: int, size_of: Callable[[T], int], most_size: int) -> Iterator[list[T]]:
    """Divide items into batches, in order. A full batch is used before the next item is read.

    Args:
        items: the items.
        most: the largest number of items of a batch.
        size_of: size of an item.
        most_size: the largest size of a batch of several items.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > most_size:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
        if len(batch) == most or total >= most_size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
