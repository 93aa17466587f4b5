"""MapDistributor: items of a map-style dataset, in a new seeded order every epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.share import Share, shuffled


class MapDistributor(Distributor):
    """Deals the numbers of a dataset with `__len__` and `__getitem__` to shares, one by one.

        MapDistributor(PackedDataset("out", encoder))          # each item a pack
        MapDistributor([{"input_ids": [...]}, ...])            # any list

    Args:
        dataset: with a length and random access; a `set_epoch` is called with each epoch.
        shuffle: a permutation by seed and epoch; False keeps the order.
    """

    def __init__(self, dataset: Any, *, shuffle: bool = True) -> None:
        self.dataset = dataset
        self.shuffle = shuffle

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Every `share.count`-th number of the epoch's order."""
        return self.chosen(share, start, lambda number: True)

    def chosen(self, share: Share, start: Any, wanted: Callable[[int], bool]) -> Iterator[Item]:
        """Reads what is wanted."""
        order = self.order(share)
        for number in range(start, len(order)):
            yield Item(number, self.dataset[int(order[number])] if wanted(number) else None)

    def again(self, share: Share, keys: Any) -> list[Any]:
        """By numbers, in one order."""
        order = self.order(share)
        return [self.dataset[int(order[key])] for key in keys]

    def count(self, share: Share) -> int:
        """Numbers dealt to a share."""
        return len(share.part(len(self.dataset)))

    def identity(self) -> dict[str, Any]:
        """Length and order; a dataset's own `fingerprint()`, where it has one."""
        found = getattr(self.dataset, "fingerprint", None)
        content = found() if callable(found) else None
        identity = super().identity() | {"items": len(self.dataset), "shuffle": self.shuffle, "content": content}
        weights = getattr(self.dataset, "weights", None)
        return identity if weights is None else identity | {"blend_weights": weights}

    def order(self, share: Share) -> Any:
        """Numbers that a share gets, in order, int64 (n,)."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(share.epoch)
        return shuffled(len(self.dataset), share, shuffle=self.shuffle)[share.index :: share.count]
