"""MapDistributor: items of a map-style dataset, in one global order in every epoch.

IterableDistributor: items of any iterable; every share takes its part of the same stream.

FileShardDistributor: files, shards or other parts of the data, each read by one share alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from energon_packed.errors import BatchError, ConfigError, FormatError, RecordError
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.order import Order, Segment
from energon_packed.loading.ranks import ShardSpec, shuffled
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
        self.infinite = repeat

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self.order.dataset

    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
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
        while self.infinite or share.index + number * share.count < len(self.order):
            yield Item(number, self._value(share, number))
            number += 1

    def read_many(self, share: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read items again, by their numbers in the share."""
        return [self.order.item(self._number(share, int(key))) for key in keys]

    def read_item(self, number: int) -> Any:
        """The item, or why it cannot be read: `max_failures` decides what that costs."""
        try:
            return self.order.item(number)
        except (FormatError, RecordError) as error:
            return error

    def count(self, share: ShardSpec) -> int | None:
        """Items of a share; None with `repeat`."""
        return None if self.infinite else len(share.part(len(self.order)))

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

    def _value(self, share: ShardSpec, number: int) -> Any:
        return self.read_item(self._number(share, number))

    def _number(self, share: ShardSpec, number: int) -> int:
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

    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
        """Every `share.count`-th item; `start` of them are skipped."""
        for number, value in enumerate(self._mine(share, start), start):
            yield Item(number, value)

    def read_many(self, share: ShardSpec, keys: Sequence[int]) -> list[Any]:
        """By numbers, in one pass from the beginning."""
        wanted = dict.fromkeys(keys)
        last = max(wanted, default=-1)
        for number, value in enumerate(islice(self._mine(share, 0), last + 1)):
            if number in wanted:
                wanted[number] = value
        return [wanted[key] for key in keys]

    def _mine(self, share: ShardSpec, start: int) -> Iterator[Any]:
        if not self.can_seek:
            if self._used:
                raise BatchError(
                    f"the {type(self.source).__name__} was read once and cannot be read again; pass a function that "
                    "returns a new iterator, or a list or dataset"
                )
            self._used = True
        stream = self.source() if callable(self.source) else self.source
        return islice(stream, share.index + start * share.count, None, share.count)


class FileShardDistributor(Distributor):
    """Deals parts to shares, so that no part is opened by two workers. A share without a part ends at once.

        FileShardDistributor(sorted(Path("data").glob("*.jsonl")), lambda path: map(json.loads, path.open()))

    Resuming reads the current part from its start, and skips what was used of it.

    Args:
        parts: what is dealt: paths, shards, ranges.
        read: the items of one part, in the same order whenever it is called.
        shuffle: parts in a new order every epoch, by seed.
        shuffle_within: the items of each part too; a part is then held in memory.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        *,
        shuffle: bool = True,
        shuffle_within: bool = False,
    ) -> None:
        self.parts = parts
        self.part_items = read
        self.shuffle = shuffle
        self.shuffle_within = shuffle_within

    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
        """The items of the share's parts; a cursor is [place of the part, items used of it, number]."""
        place, used, number = start or (0, 0, 0)
        mine = self._mine(share)
        for at in range(place, len(mine)):
            skip = used if at == place else 0
            for row, value in enumerate(self._rows(share, int(mine[at]))):
                if row >= skip:
                    yield Item(number, value, key=[at, row], resume_state=[at, row + 1, number + 1])
                    number += 1

    def read_many(self, share: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """By place and row; each part is read once."""
        mine, found = self._mine(share), {}
        for place in dict.fromkeys(key[0] for key in keys):
            wanted = {key[1] for key in keys if key[0] == place}
            for row, value in enumerate(self._rows(share, int(mine[place]))):
                if row in wanted:
                    found[place, row] = value
                if row >= max(wanted):
                    break
        return [found[key[0], key[1]] for key in keys]

    def identity(self) -> dict[str, Any]:
        """Number and order of the parts."""
        order = {"shuffle": self.shuffle, "shuffle_within": self.shuffle_within}
        return super().identity() | {"parts": len(self.parts)} | order

    def _mine(self, share: ShardSpec) -> Any:
        return shuffled(len(self.parts), share, shuffle=self.shuffle)[share.index :: share.count]

    def _rows(self, share: ShardSpec, part: int) -> Iterable[Any]:
        rows = self.part_items(self.parts[part])
        if not self.shuffle_within:
            return rows
        held = list(rows)
        return [held[row] for row in shuffled(len(held), share, part, 1)]
