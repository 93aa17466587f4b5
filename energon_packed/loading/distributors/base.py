"""A shard of an epoch to a resumable stream of its items.

Item is an index, a value and the position after it; Distributor is the base class. A subclass implements `items`.

`items(shard, start)` is called with `start=0` for a new epoch, and later with values of its own items:

| call | `start` | default |
|---|---|---|
| a resumed run continues after an item | `position` of the item | its number + 1 |
| a resumed packer reads a waiting item again (`item`) | `key` of the item | its number |

The defaults are correct if `start` is the number of the first item to yield. Positions of another kind, such as
offsets of a file or of a message queue, contain the number too, because the items of a shard are numbered from 0. A
distributor that sets `position` also sets `key` to the position of the item itself, or implements `read_many` for its
keys:

    number, offset = start or (0, 0)
    for offset, value in messages(offset):
        yield Item(number, value, key=[number, offset], position=[number + 1, offset + 1])
        number += 1

`can_seek = False` refuses to save states while a packer buffers samples out of order, if items cannot be read again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from energon_packed.errors import BatchError
from energon_packed.loading.distributors.schedule import WeightSchedule
from energon_packed.loading.epoch_end import EpochEnd
from energon_packed.loading.order import Order
from energon_packed.loading.ranks import ShardSpec
from energon_packed.pipeline.reader import RecordReader


class Item(NamedTuple):
    """One item of a shard.

    Attributes:
        number: index in the shard, from 0 in each epoch.
        value: input of a Processor: a record, a Conversation, a pack, or encoded samples.
        key: argument of `Distributor.item` that reads it again; by default the argument of `Distributor.items` that
            starts with it: the position of the item before.
        position: argument of `Distributor.items` that continues after it; by default the next number.

    Examples:
        >>> Item(0, {"text": "A document."}).value
        {'text': 'A document.'}
    """

    number: int
    value: Any
    key: Any = None
    position: Any = None


class LoaderLayout(NamedTuple):
    """Ranks, workers and rows of a loader.

    Attributes:
        rank, world_size: data-parallel rank and world size.
        num_workers: workers of a rank, at least 1: without worker processes, the main process is the worker.
        rows: items of a step on a rank; None if a packer decides.
    """

    rank: int = 0
    world_size: int = 1
    num_workers: int = 1
    rows: int | None = 1


class Distributor(ABC):
    """Base class that assigns the items of an epoch to ranks and workers; implement `items(shard, start)`.

    Every item of an epoch belongs to exactly one shard, in an order that a seed decides. Keys and positions are plain
    (numbers, strings, lists, dicts with string keys), as loader states contain them.

    Attributes:
        can_seek: items after the current item can be read again. False for one-shot iterators: such a stream cannot
            be saved while a packer buffers samples out of order.
        infinite: the items of a shard never end.
        repeats: an epoch may have an item several times, by weights or `repeat`; then the order log compares no ids.
        read_ahead: items that are read and encoded together.
        readers: readers of its records, for reports of rejected records; () for other items.
        schedule: weights that may change during an epoch; None if they do not change.
        order: global order of its items. If a packer makes rows by the number of items alone, DataflowLoader computes
            the items of each step from it; otherwise, and without an order, each worker packs the stream of its shard.
        complete_epochs: a loader repeats epochs without end, each complete.
        has_packs: its items are packs; the order log has their keys, if they are rows.

    Examples:
        >>> class Squares(Distributor):
        ...     def items(self, shard, start):
        ...         for number, index in enumerate(shard.shard_indices(6)[start:], start):
        ...             yield Item(number, index**2)
        >>> [item.value for item in Squares().items(ShardSpec(index=1, num_shards=2), 0)]
        [1, 9, 25]
    """

    can_seek: bool = True
    infinite: bool = False
    repeats: bool = False
    read_ahead: int = 32
    readers: Sequence[RecordReader] = ()
    schedule: WeightSchedule | None = None
    order: Order | None = None
    complete_epochs: bool = False
    has_packs: bool = False

    @abstractmethod
    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield the items of a shard, numbered without a gap.

        Args:
            shard: index, epoch and seed.
            start: 0 for the start of the epoch, else the `position` of the item before the first item to yield.
        """

    def item(self, shard: ShardSpec, key: Any) -> Any:
        """Read the value of an item again, by its key; the default is the first item of `items(shard, key)`."""
        return next(self.items(shard, key)).value

    def read_many(self, shard: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read the values of several items again, by their keys; overridden if a single pass is faster."""
        return [self.item(shard, key) for key in keys]

    def count(self, shard: ShardSpec) -> int | None:
        """Return the number of items of a shard in one epoch, or None if it is not known."""
        return None

    def steps_of_epoch(self, layout: LoaderLayout, epoch_end: EpochEnd) -> int | None:
        """Return the steps of an epoch, the same on all ranks; None if they are not known in advance.

        Args:
            layout: ranks, workers and rows of the loader.
            epoch_end: items that do not fill the last step of all ranks.

        Raises:
            ConfigError: `epoch_end` is `error`, and the items do not fill the last step; or a rank has no item.
        """
        return None

    def identity(self) -> dict[str, Any]:
        """Return what a saved state and the distributor that continues from it must share, in plain types."""
        return {"distributor": type(self).__name__}

    def read(self, shard: ShardSpec, start: Any = 0, number: int = 0) -> Iterator[Item]:
        """Yield `items` with keys and positions filled in, and check their numbers.

        Args:
            shard, start: as for `items`.
            number: expected number of the first item.

        Raises:
            BatchError: an item is missing or repeated.
        """
        for item in self.items(shard, start):
            if item.number != number:
                raise BatchError(
                    f"{type(self).__name__}.items must yield item {number} next, got item {item.number}: data would "
                    f"be {'repeated' if item.number < number else 'lost'}. Number the items of a shard from 0 without "
                    "gaps, and start at `start`."
                )
            number += 1
            key, start = start if item.key is None else item.key, number if item.position is None else item.position
            yield Item(item.number, item.value, key, start)
