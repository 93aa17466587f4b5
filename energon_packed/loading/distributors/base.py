"""Distributor: a resumable stream of items for one share. One required method: `items`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from energon_packed.errors import BatchError
from energon_packed.loading.distributors.schedule import WeightSchedule
from energon_packed.loading.ranks import ShardSpec
from energon_packed.pipeline.reader import RecordReader


class Item(NamedTuple):
    """One item of a share.

    Attributes:
        number: place in the share, from 0 in each epoch.
        value: what a Processor takes: a record, a Conversation, a pack, or encoded samples.
        key: what `Distributor.item` needs to read it again; by default its number.
        cursor: what `Distributor.items` needs to continue after it; by default the next number.
    """

    number: int
    value: Any
    key: Any = None
    resume_state: Any = None


class Distributor(ABC):
    """Gives every item of an epoch to exactly one share, in an order that a seed decides.

    A subclass implements `items`. Keys and cursors are plain (numbers, texts, lists, dicts with text keys): they are
    saved in loader states.

    Attributes:
        can_seek: items after the current one can be read again. False for one-shot iterators: such a stream cannot
            be saved while a packer holds samples out of order.
        endless: the items of a share never end.
        read_ahead: items that are read and encoded together.
        readers: of the records that it reads, for reports of rejected records; () for other items.
        schedule: of weights that may change while it is read; None where nothing does.
    """

    can_seek: bool = True
    infinite: bool = False
    read_ahead: int = 32
    readers: Sequence[RecordReader] = ()
    schedule: WeightSchedule | None = None

    @abstractmethod
    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
        """The items of a share, numbered without a gap.

        Args:
            share: part, epoch and seed.
            start: 0 for the beginning of the epoch, else the `resume_state` of the item before the first one to give.
        """

    def item(self, share: ShardSpec, key: Any) -> Any:
        """The value of one item again, by its key; the default reads the item that `items` begins with there."""
        return next(self.items(share, key)).value

    def read_many(self, share: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """The values of several items again, by their keys; overridden where one pass is faster."""
        return [self.item(share, key) for key in keys]

    def count(self, share: ShardSpec) -> int | None:
        """Items of a share in one epoch, or None where that is not known."""
        return None

    def identity(self) -> dict[str, Any]:
        """What a saved state must have in common with the distributor that continues from it, in plain types."""
        return {"distributor": type(self).__name__}

    def read(self, share: ShardSpec, start: Any = 0, number: int = 0) -> Iterator[Item]:
        """`items`, with keys and cursors filled in; numbers with a gap or a repeat are refused.

        Args:
            share, start: as for `items`.
            number: of the first item.

        Raises:
            BatchError: an item is missing or comes twice.
        """
        for item in self.items(share, start):
            if item.number != number:
                what = "comes again" if item.number < number else f"follows item {number - 1}"
                raise BatchError(
                    f"item {item.number} of {type(self).__name__} {what}, where item {number} must come: data would "
                    f"be {'repeated' if item.number < number else 'lost'}; number the items of a share from 0, and "
                    "begin at `start`"
                )
            number += 1
            if item.key is None or item.resume_state is None:
                key = item.number if item.key is None else item.key
                item = Item(item.number, item.value, key, number if item.resume_state is None else item.resume_state)
            yield item
