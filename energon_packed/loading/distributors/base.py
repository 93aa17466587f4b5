"""A shard of an epoch to a resumable stream of its items.

Item is an index, a value and where to continue; Distributor is the base class. A subclass implements `items`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from energon_packed.errors import BatchError
from energon_packed.loading.distributors.schedule import WeightSchedule
from energon_packed.loading.ranks import ShardSpec
from energon_packed.pipeline.reader import RecordReader


class Item(NamedTuple):
    """One item of a shard.

    Attributes:
        number: index in the shard, from 0 in each epoch.
        value: input of a Processor: a record, a Conversation, a pack, or encoded samples.
        key: argument of `Distributor.item` that reads it again; by default its number.
        resume_state: argument of `Distributor.items` that continues after it; by default the next number.

    Examples:
        >>> Item(0, {"text": "A document."}).value
        {'text': 'A document.'}
    """

    number: int
    value: Any
    key: Any = None
    resume_state: Any = None


class Distributor(ABC):
    """Base class that assigns the items of an epoch to ranks and workers; implement `items(shard, start)`.

    Every item of an epoch belongs to exactly one shard, in an order that a seed decides. Keys and resume states are
    plain (numbers, strings, lists, dicts with string keys), as loader states contain them.

    Attributes:
        can_seek: items after the current item can be read again. False for one-shot iterators: such a stream cannot
            be saved while a packer buffers samples out of order.
        infinite: the items of a shard never end.
        repeats: an epoch may have an item several times, by weights or `repeat`; then the order log compares no ids.
        read_ahead: items that are read and encoded together.
        readers: readers of its records, for reports of rejected records; () for other items.
        schedule: weights that may change during an epoch; None if they do not change.

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

    @abstractmethod
    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield the items of a shard, numbered without a gap.

        Args:
            shard: index, epoch and seed.
            start: 0 for the start of the epoch, else the `resume_state` of the item before the first item to yield.
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

    def identity(self) -> dict[str, Any]:
        """Return what a saved state and the distributor that continues from it must share, in plain types."""
        return {"distributor": type(self).__name__}

    def read(self, shard: ShardSpec, start: Any = 0, number: int = 0) -> Iterator[Item]:
        """Yield `items` with keys and resume states filled in, and check their numbers.

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
            if item.key is None or item.resume_state is None:
                key = item.number if item.key is None else item.key
                item = Item(item.number, item.value, key, number if item.resume_state is None else item.resume_state)
            yield item
