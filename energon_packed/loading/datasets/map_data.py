"""Map-style data in, what an Order needs of it out.

| class | data |
|---|---|
| MapData | base class of data that knows its items in each epoch, such as PackedDataset |
| IndexedData | any object with a length and `data[index]`: a list, a dataset of torch or of Hugging Face |

`map_data` makes one of them of the argument of a user.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np

from energon_packed.errors import ConfigError
from energon_packed.loading.costs.model import RowSizes
from energon_packed.packing.balance import Int64


@runtime_checkable
class HasItems(Protocol):
    """Data with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class MapData(ABC):
    """The items of an Order, by number.

    Attributes:
        read_ahead: items that are worth a `request` before they are read; 0 for local data.
        repeats: an epoch may have an item several times.
    """

    read_ahead: int = 0
    repeats: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items of an epoch."""

    @abstractmethod
    def item(self, number: int) -> Any:
        """Read an item."""

    @abstractmethod
    def item_sizes(self) -> RowSizes:
        """Return the sizes of all items. Raises ConfigError if they are not known."""

    @property
    def weights(self) -> Sequence[float] | None:
        """Weights of the datasets of a blend by weight; None for other data."""
        return None

    def epoch_items(self, epoch: int, weights: Sequence[float] | None) -> Callable[[Int64], Int64]:
        """Return the function of indices in the epoch, in the order of the data, to items, both int64 (n,).

        Args:
            epoch: from 0.
            weights: instead of the weights of a blend by weight; otherwise None.
        """
        return np.asarray

    def redrawn(self, used: Iterable[Int64], count: int, weights: Sequence[float], rng: np.random.Generator) -> Int64:
        """Return the items of the rest of an epoch whose weights changed in it, int64 (count,); only of a blend.

        Args:
            used: blocks of the items that the epoch has used.
            count: items of the rest.
            weights: new weights of the datasets.
            rng: chooses among items that were used equally often.
        """
        raise NotImplementedError

    def request(self, numbers: Sequence[int]) -> None:  # noqa: B027
        """Start to read items, if `read_ahead` is not 0."""

    def fingerprint(self) -> str | None:
        """Return a digest of the content, for loader states; None if there is no digest."""
        return None


class IndexedData(MapData):
    """Items that are read by their index.

    Args:
        data: has a length and `data[index]`. If they exist, `set_epoch(epoch)`, `row_sizes()`, which returns RowSizes,
            and `fingerprint()`, which returns a digest of the content, are called.
    """

    def __init__(self, data: HasItems) -> None:
        self._data: Any = data

    def __len__(self) -> int:
        return len(self._data)

    def item(self, number: int) -> Any:
        """Read an item."""
        return self._data[number]

    def item_sizes(self) -> RowSizes:
        """Return the sizes of all items of the epoch that was set."""
        if (row_sizes := _method(self._data, "row_sizes")) is None:
            raise ConfigError(
                f"`balance` needs the sizes of rows, which {type(self._data).__name__} does not have. Use "
                "PackedDataset or plan_in_memory."
            )
        sizes: RowSizes = row_sizes()
        return sizes

    def epoch_items(self, epoch: int, weights: Sequence[float] | None) -> Callable[[Int64], Int64]:
        """Set the epoch of the data, whose items are its indices."""
        if (set_epoch := _method(self._data, "set_epoch")) is not None:
            set_epoch(epoch)
        return super().epoch_items(epoch, weights)

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the data, if it has that method."""
        fingerprint = _method(self._data, "fingerprint")
        return None if fingerprint is None else fingerprint()


def _method(data: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of map-style data; None without it. Other data may have a value of that name."""
    found = getattr(data, name, None)
    return found if callable(found) else None


def map_data(data: MapData | HasItems) -> MapData:
    """Return map-style data as MapData."""
    if isinstance(data, MapData):
        return data
    # Each loader sets the epoch of its own copy, which shares the open files.
    return IndexedData(data if _method(data, "set_epoch") is None else copy(data))
