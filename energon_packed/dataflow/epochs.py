"""Where an epoch ends: at its last batch, whether a loop meets the end of the iterator or counts steps."""

from collections.abc import Callable, Iterator
from typing import Any

from energon_packed.errors import BatchError


def until_the_end(rest: Callable[[], Iterator[Any]], *, empty: int) -> Iterator[Any]:
    """The rest of an epoch, or the next epoch where nothing is left of one that was begun.

    A loop that counts its steps leaves the iterator after the last batch, and so does a state saved there: what
    follows is the next epoch, as after a loop that met the end.

    Args:
        rest: batches of the current epoch that were not returned; at its end the next epoch is the current one.
        empty: how often `rest` may return nothing: 1 in an epoch that was begun, 0 in a new one.
    """
    given = False
    while not given and empty >= 0:
        for batch in rest():
            given = True
            yield batch
        empty -= 1


def is_left(began: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether the epoch of an iterator has ended meanwhile, by another iterator of its loader.

    Args:
        began: number of the epoch, and of states that were loaded, when the iterator began.
        now: the same at present.

    Raises:
        BatchError: a state was loaded meanwhile: what the iterator would give next is of another place.
    """
    if began[1] != now[1]:
        raise BatchError("a state was loaded while this loop ran; leave the loop, and iterate the loader again")
    return began[0] != now[0]
