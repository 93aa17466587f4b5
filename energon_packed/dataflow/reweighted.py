"""What is left of an epoch of a blend whose weights changed in it.

The epoch keeps its length. What is left of it is divided by the new weights, and each dataset goes on where it is: its
packs that were used least come first, so that none comes again before the others came.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.blend import by_weight
from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.elastic import Rest
from energon_packed.dataflow.share import Share

Int64 = npt.NDArray[np.int64]


class ReweightedRest(Distributor):
    """Deals what is left of an epoch, by the weights that the dataset has now.

    Args:
        distributor: over a PackedDataset that blends by weight.
        rest: of the epoch under the old weights, `rest.weights`.
    """

    def __init__(self, distributor: MapDistributor, rest: Rest) -> None:
        self.dataset = distributor.dataset
        self.read_ahead = distributor.read_ahead
        self._distributor = distributor
        self._rest = rest
        self._left: Int64 | None = None

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Packs; a key is its dataset in the blend and its number there."""
        left = self._of_share(share)
        for number in range(start, len(left)):
            member, pack = left[number].tolist()
            yield Item(number, self.dataset.pack_of(member, pack), key=[member, pack])

    def again(self, share: Share, keys: Sequence[Any]) -> list[Any]:
        """By dataset and number."""
        return [self.dataset.pack_of(member, pack) for member, pack in keys]

    def _of_share(self, share: Share) -> Int64:
        if self._left is None:
            epochs = sorted({piece.epoch for piece in self._rest.pieces})
            self._left = np.concatenate([self._left_of(epoch, share.seed) for epoch in epochs])
        order = share.rng(3).permutation(len(self._left)) if self._distributor.shuffle else np.arange(len(self._left))
        return self._left[order[share.index :: share.count]]

    def _left_of(self, epoch: int, seed: int) -> Int64:
        """(dataset, pack) of what an epoch has left, int64 (n, 2)."""
        old = self.dataset.packs_of_members(epoch, self._rest.weights)
        unused = np.zeros(sum(map(len, old)), dtype=bool)
        for number, piece in enumerate(self._rest.pieces):
            if piece.epoch == epoch:
                places = self._distributor.order(piece.share(seed))
                rest = [n for n in range(piece.number, len(places)) if not piece.is_used(number, n)]
                rest += [held.number for held in self._rest.held if held.piece == number]
                unused[places[rest]] = True
        counts = by_weight(self.dataset.weights, int(unused.sum()))
        left, start = [], 0
        for member, (packs, planned) in enumerate(zip(self.dataset.packs, old, strict=True)):
            stop = start + len(planned)
            used = np.bincount(planned[~unused[start:stop]], minlength=packs)
            found = least_used(used, counts[member], np.random.default_rng([seed, epoch, member, 4]))
            left.append(np.stack([np.full(len(found), member), found], axis=1))
            start = stop
        return np.concatenate(left)


def least_used(used: Int64, count: int, rng: np.random.Generator) -> Int64:
    """Numbers of `count` packs, int64 (count,), of which each comes when it is among those that came least.

    Args:
        used: int64 (P,), how often each pack was used.
        count: packs to choose; a pack is chosen repeatedly where there are fewer.
        rng: chooses among packs that were used equally often.
    """
    found, level = [np.zeros(0, dtype=np.int64)], int(used.min())
    while count > 0:
        ready = np.flatnonzero(used <= level)  # with those of the rounds before, which came once more in each
        chosen = ready if len(ready) <= count else rng.choice(ready, count, replace=False)
        found.append(chosen)
        count, level = count - len(chosen), level + 1
    return np.concatenate(found)
