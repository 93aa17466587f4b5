"""A dataset, an iterable or a list of files to the items of each loader worker.

| class | data | assignment of items to workers |
|---|---|---|
| MapDistributor | map-style dataset | one global order per epoch |
| IterableDistributor | any iterable | every worker reads the stream and keeps every n-th item |
| FileShardDistributor | files, shards, ranges | each file is read by exactly one worker |
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from energon_packed.errors import BatchError, ConfigError
from energon_packed.loading.costs.model import Balance, cost_model
from energon_packed.loading.datasets.map_data import map_data
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.order import Order, Segment
from energon_packed.loading.permutation import Permutation
from energon_packed.loading.ranks import ShardSpec
from energon_packed.options import short


class MapDistributor(Distributor):
    """Shard a map-style dataset over ranks and workers, with a seeded permutation per epoch.

        MapDistributor(PackedDataset("out", encoder))          # each item a pack
        MapDistributor([{"input_ids": [...]}, ...])            # any list

    If each item is a row, or `batch_size` items are, DataflowLoader reads the items of each step in the order of
    `order`, with any number of ranks and workers. With another packer, each worker packs every n-th item.

    Args:
        dataset: with a length and random access; `set_epoch`, if it has that method, is called with each epoch.
        shuffle: a permutation by seed and epoch; False keeps the order.
        balance: assigns packs of similar cost to the ranks in each step: a CostModel, `attention` for its default
            constants, or `tokens`; None does not align.
        accumulation: steps whose gradients the trainer accumulates, which are aligned together; for `balance`.
        repeat: one epoch after the other without end, so that every rank has an item at every step.

    Raises:
        ConfigError: `balance` is unknown, the dataset has no `row_sizes()`, `accumulation` is below 1, or `repeat` is
            set for an empty dataset.

    Examples:
        >>> distributor = MapDistributor(["a", "b", "c"], shuffle=False)
        >>> [item.value for item in distributor.items(ShardSpec(index=0, num_shards=2), 0)]
        ['a', 'c']
    """

    order: Order

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        balance: Balance | None = None,
        accumulation: int = 1,
        repeat: bool = False,
    ) -> None:
        if isinstance(dataset, str | Path):  # a string has a length and items, too
            raise ConfigError(
                f"`dataset` must be a map-style dataset, got {short(dataset)}. Pass PackedDataset(path)."
            )
        cost = None if balance is None else cost_model(balance)
        self.dataset, data = dataset, map_data(dataset)
        self.order = Order(data, shuffle=shuffle, cost=cost, accumulation=accumulation, repeat=repeat)
        self.infinite = repeat
        self.repeats = repeat or data.repeats

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield every `shard.num_shards`-th item of the epoch's order.

        Raises:
            ConfigError: `balance` aligns finished rows, but a packer or a mixture decides the rows.
        """
        if self.order.cost is not None:
            raise ConfigError(
                "`balance` aligns finished rows, and a packer or a mixture makes other rows of these items. Drop "
                "`balance`, use PlannedPacker or `batch_size`, or BalancedPoolPacker."
            )
        number = int(start)
        while self.infinite or shard.index + number * shard.num_shards < len(self.order):
            yield Item(number, self.order.item_or_error(self._index(shard, number)))
            number += 1

    def read_many(self, shard: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read items again by their indices in the shard."""
        return [self.order.data.item(self._index(shard, int(key))) for key in keys]

    def count(self, shard: ShardSpec) -> int | None:
        """Return the number of items of a shard; None with `repeat`."""
        return None if self.infinite else len(shard.shard_indices(len(self.order)))

    def identity(self) -> dict[str, Any]:
        """Return length and order, and the `fingerprint()` of the dataset if it has that method."""
        order = self.order
        return super().identity() | {
            "items": len(order),
            "shuffle": order.shuffle,
            "content": order.data.fingerprint(),
            "blend_weights": None if order.weights is None else list(order.weights),
            "balance": None if order.cost is None else order.cost.constants(),
            "repeat": order.repeat,
        }

    def _index(self, shard: ShardSpec, number: int) -> int:
        """Return the dataset index of an item of a shard."""
        # The whole epoch as one segment: the order of items does not depend on ranks if `balance` is None.
        whole = Segment(ranks=1, rows=1, weights=self.order.weights)
        place = shard.index + number * shard.num_shards
        return self.order.numbers([place], shard.epoch, shard.seed, [whole])[0]


class IterableDistributor(Distributor):
    """Shard an iterable over ranks and workers: each worker reads all of it and keeps every n-th item.

    A stream that can be read again (a list, a dataset, a function that returns an iterator) resumes by skipping the
    used items. A one-shot iterator lasts one epoch. Its state can be saved as long as no packer buffers samples out of
    order, and a resumed run must pass the iterator from its start.

    Args:
        source: an iterable, or a function that returns a new one with each call.

    Examples:
        >>> distributor = IterableDistributor(range(5))
        >>> [item.value for item in distributor.items(ShardSpec(index=1, num_shards=2), 0)]
        [1, 3]
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.source = source
        self.can_seek = callable(source) or iter(source) is not source
        self._used = False

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield every `shard.num_shards`-th item after the first `start` of them."""
        for number, value in enumerate(self._mine(shard, start), start):
            yield Item(number, value)

    def read_many(self, shard: ShardSpec, keys: Sequence[int]) -> list[Any]:
        """Read items again by their indices, in one pass from the start."""
        wanted = dict.fromkeys(keys)
        last = max(wanted, default=-1)
        for number, value in enumerate(islice(self._mine(shard, 0), last + 1)):
            if number in wanted:
                wanted[number] = value
        return [wanted[key] for key in keys]

    def _mine(self, shard: ShardSpec, start: int) -> Iterator[Any]:
        if not self.can_seek:
            if self._used:
                raise BatchError(
                    f"the {type(self.source).__name__} was read once and cannot be read again. Pass a function that "
                    "returns a new iterator, or a list or dataset."
                )
            self._used = True
        stream = self.source() if callable(self.source) else self.source
        return islice(stream, shard.index + start * shard.num_shards, None, shard.num_shards)


class FileShardDistributor(Distributor):
    """Assign whole files (or other parts) to workers, so that each file is read by exactly one worker.

        FileShardDistributor(sorted(Path("data").glob("*.jsonl")), lambda path: map(json.loads, path.open()))

    Resuming reads the current file from its start, and skips the used items. A worker without a file has no items.

    Args:
        parts: paths, shards or ranges, each read by a single worker.
        read: returns the items of a part, in the same order at every call.
        shuffle: parts in a new order every epoch, by seed.
        shuffle_within: also shuffle the items of each part, which is then kept in memory.

    Examples:
        >>> distributor = FileShardDistributor(["ab", "cd"], list, shuffle=False)
        >>> [item.value for item in distributor.items(ShardSpec(index=1, num_shards=2), 0)]
        ['c', 'd']
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

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield the items of the shard's parts; a position is [position of the part, its used items, number]."""
        place, used, number = start or (0, 0, 0)
        mine = self._mine(shard)
        for at in range(place, len(mine)):
            skip = used if at == place else 0
            for row, value in enumerate(self._rows(shard, int(mine[at]))):
                if row >= skip:
                    yield Item(number, value, key=[at, row], position=[at, row + 1, number + 1])
                    number += 1

    def read_many(self, shard: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read items again by part and row; each part is read once."""
        mine, values = self._mine(shard), {}
        for place in dict.fromkeys(key[0] for key in keys):
            wanted = {key[1] for key in keys if key[0] == place}
            for row, value in enumerate(self._rows(shard, int(mine[place]))):
                if row in wanted:
                    values[place, row] = value
                if row >= max(wanted):
                    break
        return [values[key[0], key[1]] for key in keys]

    def identity(self) -> dict[str, Any]:
        """Return number and order of the parts."""
        order = {"shuffle": self.shuffle, "shuffle_within": self.shuffle_within}
        return super().identity() | {"parts": len(self.parts)} | order

    def _mine(self, shard: ShardSpec) -> Any:
        places = np.asarray(shard.shard_indices(len(self.parts)), dtype=np.int64)
        return Permutation(len(self.parts), [shard.seed, shard.epoch])(places) if self.shuffle else places

    def _rows(self, shard: ShardSpec, part: int) -> Iterable[Any]:
        rows = self.part_items(self.parts[part])
        if not self.shuffle_within:
            return rows
        loaded = list(rows)
        # (part, 1): each part has another order, also than the parts.
        rows_in_order = Permutation(len(loaded), [shard.seed, shard.epoch, part, 1])(np.arange(len(loaded)))
        return [loaded[row] for row in rows_in_order]
