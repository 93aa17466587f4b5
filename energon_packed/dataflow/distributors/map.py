"""MapDistributor: items of a map-style dataset, in a new seeded order every epoch."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from energon_packed.dataflow.balance import Balance, BalancedOrder, check_balance
from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.share import Share, shuffled
from energon_packed.errors import FormatError, RecordError
from energon_packed.packing.balance import CostModel


class MapDistributor(Distributor):
    """Deals the numbers of a dataset with `__len__` and `__getitem__` to shares, one by one.

        MapDistributor(PackedDataset("out", encoder))          # each item a pack
        MapDistributor([{"input_ids": [...]}, ...])            # any list

    Args:
        dataset: with a length and random access; a `set_epoch` is called with each epoch.
        shuffle: a permutation by seed and epoch; False keeps the order.
        balance: `attention` gives the ranks of one step packs of similar cost, as BalancedSampler; None does not.
        batch_size: items of one step, with `balance`: that of the loader.
        cost: of a pack, with `balance`.

    Raises:
        ConfigError: `balance` is unknown, or the dataset does not know the sizes of its rows.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        balance: Balance | None = None,
        batch_size: int = 1,
        cost: CostModel | None = None,
    ) -> None:
        # Its epoch is set by each loader: a copy, with the same open files, keeps it apart from that of others.
        self.dataset = copy.copy(dataset) if callable(getattr(dataset, "set_epoch", None)) else dataset
        self.shuffle = shuffle
        self._balanced: BalancedOrder | None = None
        if balance is not None:
            check_balance(balance)
            self._balanced = BalancedOrder(self.dataset, ranks=1, rows=batch_size, shuffle=shuffle, cost=cost)

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Every `share.count`-th number of the epoch's order."""
        return self.chosen(share, start, lambda number: True)

    def chosen(self, share: Share, start: Any, wanted: Callable[[int], bool]) -> Iterator[Item]:
        """Reads what is wanted."""
        order = self.order(share)
        for number in range(start, len(order)):
            yield Item(number, self._value(int(order[number])) if wanted(number) else None)

    def _value(self, place: int) -> Any:
        """The item, or why it cannot be read: `max_failures` decides what that costs."""
        try:
            return self.dataset[place]
        except (FormatError, RecordError) as error:
            return error

    def again(self, share: Share, keys: Any) -> list[Any]:
        """By numbers, in one order."""
        order = self.order(share)
        return [self.dataset[int(order[key])] for key in keys]

    def count(self, share: Share) -> int:
        """Numbers dealt to a share."""
        return len(share.part(len(self.dataset)) if self._balanced is None else self.order(share))

    def identity(self) -> dict[str, Any]:
        """Length and order; a dataset's own `fingerprint()`, where it has one."""
        found = getattr(self.dataset, "fingerprint", None)
        content = found() if callable(found) else None
        identity = super().identity() | {"items": len(self.dataset), "shuffle": self.shuffle, "content": content}
        weights = getattr(self.dataset, "weights", None)
        if weights is not None:
            identity["blend_weights"] = weights
        if self._balanced is not None:
            cost = self._balanced.cost
            identity["balance"] = [self._balanced.rows, cost.token, cost.square, cost.patch]
        return identity

    def order(self, share: Share) -> Any:
        """Numbers that a share gets, in order, int64 (n,)."""
        if self._balanced is not None:
            self._balanced.ranks = share.world_size
            return self._balanced.of_share(share)
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(share.epoch)
        return shuffled(len(self.dataset), share, shuffle=self.shuffle)[share.index :: share.count]
