"""IterableDistributor: items of any iterable; every share takes its part of the same stream."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.share import Share
from energon_packed.errors import BatchError


class IterableDistributor(Distributor):
    """Deals the items of a stream to shares, one by one; each share reads the stream and skips the rest.

    A stream that can be read again (a list, a dataset, a function that returns an iterator) resumes by skipping what
    was used. A one-shot iterator lasts one epoch; its state can be saved as long as no packer holds samples out of
    order, and a resumed run must begin it from its start.

    Args:
        source: an iterable, or a function that returns a new one with each call.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.source = source
        self.can_seek = callable(source) or iter(source) is not source
        self._used = False

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Every `share.count`-th item; `start` of them are skipped."""
        for number, value in enumerate(self._mine(share, start), start):
            yield Item(number, value)

    def again(self, share: Share, keys: Sequence[int]) -> list[Any]:
        """By numbers, in one pass from the beginning."""
        wanted = dict.fromkeys(keys)
        last = max(wanted, default=-1)
        for number, value in enumerate(islice(self._mine(share, 0), last + 1)):
            if number in wanted:
                wanted[number] = value
        return [wanted[key] for key in keys]

    def _mine(self, share: Share, start: int) -> Iterator[Any]:
        if not self.can_seek:
            if self._used:
                raise BatchError(
                    f"the {type(self.source).__name__} was read once and cannot be read again; pass a function that "
                    "returns a new iterator, or a list or dataset"
                )
            self._used = True
        stream = self.source() if callable(self.source) else self.source
        return islice(stream, share.index + start * share.count, None, share.count)
