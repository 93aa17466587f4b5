"""MixtureDistributor: items of several distributors by ratio, in a sequence that the seed decides."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.share import Share
from energon_packed.errors import ConfigError

_BLOCK = 4096  # random numbers that are drawn together


class MixtureDistributor(Distributor):
    """Draws the next item from one of several distributors, with probability proportional to its weight.

    The draws depend on seed, epoch and number of the item alone, so the k-th item of every share comes from the same
    distributor, as long as none of them has ended.

    Args:
        distributors: what is mixed.
        weights: one number above 0 for each.
        repeat: True draws indefinitely: a distributor that ends begins its next epoch, and the shares of the weights
            hold. False gives every item once: one that ends leaves the draw, and the epoch ends with the last one.

    Raises:
        ConfigError: weights that do not fit.
    """

    def __init__(self, distributors: Sequence[Distributor], weights: Sequence[float], *, repeat: bool = False) -> None:
        if not distributors or len(distributors) != len(weights):
            raise ConfigError(
                f"{len(distributors)} distributors have {len(weights)} `weights`; pass one weight for each"
            )
        if bad := [one for one in weights if not (one > 0 and np.isfinite(one))]:
            raise ConfigError(f"`weights` has {bad[0]}; each must be above 0, leave out what is not read")
        self.distributors = list(distributors)
        self.weights = [float(one) for one in weights]
        self.repeat = repeat
        self.can_seek = all(one.can_seek for one in distributors)
        self.endless = repeat or any(one.endless for one in distributors)
        self.read_ahead = min(one.read_ahead for one in distributors)

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Items by draw; a cursor holds, of each distributor, its epoch, cursor, number, and whether it ended."""
        return self.chosen(share, start, lambda number: True)

    def chosen(self, share: Share, start: Any, wanted: Callable[[int], bool]) -> Iterator[Item]:
        """Distributors skip what they can."""
        state = start or {"number": 0, "of": [[share.epoch, 0, 0, False] for _ in self.distributors]}
        number, of = int(state["number"]), [list(one) for one in state["of"]]
        streams: list[Iterator[Item] | None] = [None] * len(of)
        draws: Any = None
        now = [True]  # whether the item that is read is wanted
        while not all(one[3] for one in of):
            if draws is None or number % _BLOCK == 0:
                draws = share.rng(number // _BLOCK, 2).random(_BLOCK)
            child = self._drawn(float(draws[number % _BLOCK]), [one[3] for one in of])
            now[0] = wanted(number)
            item = self._next(child, share, of, streams, lambda _: now[0])
            if item is None:
                of[child][3] = True
                continue
            epoch = of[child][0]
            of[child] = [epoch, item.cursor, item.number + 1, False]
            cursor = {"number": number + 1, "of": [list(one) for one in of]}
            yield Item(number, item.value, key=[child, epoch, item.key], cursor=cursor)
            number += 1

    def again(self, share: Share, keys: Sequence[Any]) -> list[Any]:
        """By distributor, its epoch and its key."""
        found: dict[int, Any] = {}
        for child, epoch in dict.fromkeys((key[0], key[1]) for key in keys):
            places = [i for i, key in enumerate(keys) if (key[0], key[1]) == (child, epoch)]
            wanted = [keys[i][2] for i in places]
            found |= zip(places, self.distributors[child].again(replace(share, epoch=epoch), wanted), strict=True)
        return [found[place] for place in range(len(keys))]

    def count(self, share: Share) -> int | None:
        """The sum over all distributors; None where one does not know, or with `repeat`."""
        counts = [one.count(share) for one in self.distributors]
        return None if self.repeat or None in counts else sum(one for one in counts if one is not None)

    def identity(self) -> dict[str, Any]:
        """Weights, and the identity of each."""
        inner = [one.identity() for one in self.distributors]
        return super().identity() | {"weights": self.weights, "repeat": self.repeat, "of": inner}

    def _drawn(self, draw: float, ended: list[bool]) -> int:
        """The distributor for a random number in [0, 1), among those that have not ended."""
        left = np.cumsum([0.0 if end else weight for weight, end in zip(self.weights, ended, strict=True)])
        last = max(place for place, end in enumerate(ended) if not end)  # where rounding reaches the end
        return min(int(np.searchsorted(left, draw * left[-1], side="right")), last)

    def _next(
        self, child: int, share: Share, of: list[Any], streams: list[Any], wanted: Callable[[int], bool]
    ) -> Item | None:
        """The next item of a distributor; None where it ended, and has nothing to repeat."""
        epoch, cursor, number, _ = of[child]
        if streams[child] is None:
            streams[child] = self.distributors[child].read(replace(share, epoch=epoch), cursor, number, wanted)
        item: Item | None = next(streams[child], None)
        if item is None and self.repeat and of[child][2] > 0:
            of[child] = [epoch + 1, 0, 0, False]
            streams[child] = None
            return self._next(child, share, of, streams, wanted)
        return item
