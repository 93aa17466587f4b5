"""MapDistributor: items of a map-style dataset, in one global order in every epoch."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.order import Order, Segment
from energon_packed.dataflow.share import Share
from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.packing.balance import CostModel

Balance = Literal["attention"]


class MapDistributor(Distributor):
    """Gives the items of a dataset with `__len__` and `__getitem__`.

        MapDistributor(PackedDataset("out", encoder))          # each item a pack
        MapDistributor([{"input_ids": [...]}, ...])            # any list

    Where each item is a row, or `batch_size` items are, DataflowLoader reads the items of each step in the order of
    `order`, whatever the number of ranks and workers. With another packer, each worker packs every n-th item.

    Args:
        dataset: with a length and random access; `set_epoch`, if it has that method, is called with each epoch.
        shuffle: a permutation by seed and epoch; False keeps the order.
        balance: `attention` gives the ranks of one step packs of similar cost, as BalancedSampler; None does not.
        cost: of a pack, with `balance`.
        repeat: one epoch after the other without end, so that every rank has an item at every step.

    Attributes:
        order: the global order of the items.

    Raises:
        ConfigError: `balance` is unknown, or the dataset has no `row_sizes()`; `repeat` with an empty dataset.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        balance: Balance | None = None,
        cost: CostModel | None = None,
        repeat: bool = False,
    ) -> None:
        if balance is not None:
            check_balance(balance)
        self.order = Order(
            dataset, shuffle=shuffle, cost=None if balance is None else cost or CostModel(), repeat=repeat
        )
        self.endless = repeat

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self.order.dataset

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Every `share.count`-th item of the epoch's order.

        Raises:
            ConfigError: `balance` aligns the rows of a step, and a packer or a mixture decides these.
        """
        if self.order.cost is not None:
            raise ConfigError(
                "`balance` aligns finished rows, and a packer or a mixture makes other rows of these items. Drop "
                "`balance`, use PlannedPacker or `batch_size`, or BalancedPoolPacker."
            )
        number = int(start)
        while self.endless or share.index + number * share.count < len(self.order):
            yield Item(number, self._value(share, number))
            number += 1

    def again(self, share: Share, keys: Sequence[Any]) -> list[Any]:
        """Read items again, by their numbers in the share."""
        return [self.order.item(self._number(share, int(key))) for key in keys]

    def read_item(self, number: int) -> Any:
        """The item, or why it cannot be read: `max_failures` decides what that costs."""
        try:
            return self.order.item(number)
        except (FormatError, RecordError) as error:
            return error

    def count(self, share: Share) -> int | None:
        """Items of a share; None with `repeat`."""
        return None if self.endless else len(share.part(len(self.order)))

    def identity(self) -> dict[str, Any]:
        """Length and order; a dataset's own `fingerprint()`, if it has one."""
        order = self.order
        found = getattr(self.dataset, "fingerprint", None)
        content = found() if callable(found) else None
        identity = super().identity() | {"items": len(order), "shuffle": order.shuffle, "content": content}
        if order.weights is not None:
            identity["blend_weights"] = list(order.weights)
        if order.cost is not None:
            identity["balance"] = [order.cost.token, order.cost.square, order.cost.patch]
        return identity | ({"repeat": True} if order.repeat else {})

    def _value(self, share: Share, number: int) -> Any:
        return self.read_item(self._number(share, number))

    def _number(self, share: Share, number: int) -> int:
        """Number in the dataset of an item of a share."""
        whole = Segment(ranks=1, rows=1, weights=self.order.weights)
        place = share.index + number * share.count
        return self.order.numbers([place], share.epoch, share.seed, [whole])[0]


def check_balance(balance: Any) -> None:
    """Refuse an unknown value of `balance`.

    Raises:
        ConfigError: the message names the value.
    """
    if balance != "attention":
        raise ConfigError(f"`balance` must be 'attention' or None, got {balance!r}.")
