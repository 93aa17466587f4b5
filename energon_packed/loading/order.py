"""The order of training: which item of a dataset with known packs each rank reads at each step.

    order of an epoch   a seeded permutation of its N items, or one in which the items of a step cost the same
    step s              the next `ranks * rows` items of the order; rank r reads every `ranks`-th of them, from r on
    worker w of W       prepares the steps w, w + W, w + 2 W, ... of its rank

    items   7 3 9 | 0 4 8 | 2 1 6 | 5        3 ranks of one row: step 0 is 7 3 9, and rank 1 reads 3, 4 and 1
            step 0  step 1  step 2  step 3   the last step is short: only rank 0 has an item

Everything follows from seed and epoch, so each rank and worker computes its items. The number of workers decides
nothing, and the position in the data is (epoch, step), the same on all ranks. Where the ranks, the rows of a step or
the weights of a blend change within an epoch, a `Segment` records the step: the epoch continues after the last item
that was used, whatever the number of ranks and workers is from there on.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.packing.balance import CostModel, Imbalance, balanced_steps, imbalance

Int64 = npt.NDArray[np.int64]
WINDOW = 128
"""Steps that are sorted by cost together: more align better, and mix less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps of an epoch that have one layout.

    Attributes:
        step: the first step of the segment, from 0 in the epoch.
        item: place in the order of the first item of that step.
        ranks: data-parallel ranks.
        rows: items of one step on one rank.
        weights: of the datasets of a blend by weight; None for other data.
    """

    step: int = 0
    item: int = 0
    ranks: int
    rows: int
    weights: tuple[float, ...] | None = None

    @property
    def width(self) -> int:
        """Items of one step on all ranks."""
        return self.ranks * self.rows

    def first_item(self, step: int) -> int:
        """Place in the order of the first item of a step."""
        return self.item + (step - self.step) * self.width

    def continued(self, step: int, layout: "Segment") -> "Segment":
        """The segment that begins at `step` with the ranks, rows and weights of `layout`."""
        return Segment(
            step=step, item=self.first_item(step), ranks=layout.ranks, rows=layout.rows, weights=layout.weights
        )

    def has_layout_of(self, other: "Segment") -> bool:
        """Whether ranks, rows and weights are equal."""
        return (self.ranks, self.rows, self.weights) == (other.ranks, other.rows, other.weights)

    def to_plain(self) -> list[Any]:
        """Numbers and lists, for loader states."""
        return [list(value) if isinstance(value, tuple) else value for value in astuple(self)]

    @classmethod
    def from_plain(cls, value: Sequence[Any]) -> "Segment":
        """The inverse of `to_plain`."""
        step, item, ranks, rows, weights = value
        return cls(step=step, item=item, ranks=ranks, rows=rows, weights=None if weights is None else tuple(weights))


class Order:
    """The items of a map-style dataset in the order of training.

    A dataset that is drawn in each epoch (a blend) has `epoch_items(epoch, weights)`, which returns the numbers of the
    items of an epoch, int64 (N,), `item(number)`, which reads an item, `item_sizes()` and `weights`. Other datasets
    are indexed, after `set_epoch(epoch)` if they have that method.

    Args:
        dataset: with a length and random access.
        shuffle: a permutation by seed and epoch; False keeps the order of the dataset.
        cost: cost of an item; the items of a step get similar costs on all ranks. None does not align. Requires
            `dataset.row_sizes()`.
        repeat: one epoch after the other without end, as one sequence: a step at the end of an epoch takes its
            last items and the first ones of the next epoch, so that all ranks have an item at every step.

    Raises:
        ConfigError: `cost` with a dataset that has no `row_sizes()`, or `repeat` with an empty dataset.
    """

    def __init__(
        self, dataset: Any, *, shuffle: bool = True, cost: CostModel | None = None, repeat: bool = False
    ) -> None:
        if cost is not None:
            check_sizes(dataset)
        if repeat and not len(dataset):
            raise ConfigError("`repeat` needs at least 1 item, got an empty dataset. Pass data with items.")
        # Each loader sets the epoch of its own copy, which shares the open files.
        self.dataset = copy(dataset) if callable(getattr(dataset, "set_epoch", None)) else dataset
        self.shuffle, self.cost, self.repeat = shuffle, cost, repeat
        self._cached: tuple[Any, Int64] | None = None
        if cost is not None:
            self._costs()  # before workers start, which inherit what was read

    def __len__(self) -> int:
        """Items of one epoch."""
        return len(self.dataset)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the datasets of a blend by weight; None for other data."""
        found = self.dataset.weights if hasattr(self.dataset, "epoch_items") else None
        return None if found is None else tuple(found)

    def segment(self, ranks: int, rows: int) -> Segment:
        """The segment of an epoch whose layout does not change."""
        return Segment(ranks=ranks, rows=rows, weights=self.weights)

    def steps(self, segment: Segment, rank: int | None, *, drop_last: bool = False) -> int:
        """Number of the step after the last step of a rank, in an epoch that ends with this segment.

        Args:
            segment: the last one of the epoch.
            rank: from 0; None for the rank with the most steps.
            drop_last: leave out a step that is not full.

        Raises:
            TypeError: `repeat`: the steps do not end.
        """
        if self.repeat:
            raise TypeError("the number of batches is not known in advance: the data repeats, count steps")
        full, left = divmod(len(self) - segment.item, segment.width)
        return segment.step + full + (left > (rank or 0) and not drop_last)

    def places(self, segment: Segment, step: int, rank: int) -> range:
        """Places in the order of the items of a step on one rank."""
        first = segment.first_item(step)
        stop = first + segment.width
        return range(first + rank, stop if self.repeat else min(stop, len(self)), segment.ranks)

    def numbers(self, places: Sequence[int], epoch: int, seed: int, segments: Sequence[Segment]) -> list[int]:
        """Numbers of the items at these places of the order.

        Args:
            places: from 0 in the epoch; with `repeat`, from 0 in epoch 0.
            epoch: from 0; it is 0 with `repeat`.
            seed: of the loader.
            segments: of the epoch until here.
        """
        size = len(self)
        found = []
        for place in places:
            turn, at = divmod(place, size) if self.repeat else (epoch, place)
            found.append(int(self.epoch_order(turn, seed, segments)[at]))
        return found

    def item(self, number: int) -> Any:
        """Read one item by its number."""
        read: Callable[[int], Any] = getattr(self.dataset, "item", None) or self.dataset.__getitem__
        return read(number)

    def epoch_order(self, epoch: int, seed: int, segments: Sequence[Segment]) -> Int64:
        """Numbers of the items of an epoch in their order, int64 (N,); the last order is kept.

        Args:
            epoch: from 0.
            seed: of the loader.
            segments: of the epoch; with `repeat`, of all epochs until here.
        """
        layout = tuple(self._layout_of(epoch, segments))
        decides = layout if self.cost is not None else tuple((one.item, one.weights) for one in layout if one.weights)
        key = (epoch, seed, decides)
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._ordered(epoch, seed, layout)
        return self._cached[1]

    def imbalance(self, epoch: int, seed: int, segment: Segment) -> Imbalance:
        """Time of the slowest rank of a step over the mean rank, as shuffled and as ordered."""
        count = len(self) // segment.width
        orders = (self._shuffled(epoch, seed, segment.weights)[0], self.epoch_order(epoch, seed, [segment]))
        steps = [
            order[: count * segment.width].reshape(count, segment.rows, segment.ranks).transpose(0, 2, 1)
            for order in orders
        ]
        before, after = (imbalance(self._costs(), one) for one in steps)
        return Imbalance(before=before, after=after)

    def _costs(self) -> npt.NDArray[np.float64]:
        """Cost of each item by its number, float64; of a dataset without `item_sizes`, in the epoch that is set."""
        sizes = getattr(self.dataset, "item_sizes", None) or self.dataset.row_sizes
        return (self.cost or CostModel()).costs(sizes())

    def _layout_of(self, epoch: int, segments: Sequence[Segment]) -> Iterator[Segment]:
        """The segments of one epoch, with items counted from its begin.

        With `repeat`, a step may begin in the epoch before: the items that complete it come before the first segment.
        """
        if not self.repeat:
            yield from segments
            return
        begin, size = epoch * len(self), len(self)
        first = max((one for one in segments if one.item <= begin), key=lambda one: one.item)
        yield Segment(
            item=(first.item - begin) % first.width, ranks=first.ranks, rows=first.rows, weights=first.weights
        )
        for one in segments:
            if begin < one.item < begin + size:
                yield Segment(item=one.item - begin, ranks=one.ranks, rows=one.rows, weights=one.weights)

    def _ordered(self, epoch: int, seed: int, layout: Sequence[Segment]) -> Int64:
        order, rng = self._shuffled(epoch, seed, layout[0].weights)
        for number, part in enumerate(layout):
            if number and part.weights != layout[number - 1].weights:
                order[part.item :] = self._redrawn(order[: part.item], len(order) - part.item, part, epoch, seed)
            if self.cost is not None and part.item < len(order):
                rng = np.random.default_rng([seed, epoch, 3, part.item]) if number else rng
                order[part.item :] = self._aligned(order[part.item :], part, rng)
        return order

    def _shuffled(self, epoch: int, seed: int, weights: tuple[float, ...] | None) -> tuple[Int64, np.random.Generator]:
        """The items of an epoch before they are aligned, and the generator that continues with them."""
        numbers = self._numbers_of(epoch, weights)
        rng = np.random.default_rng([seed, epoch] if self.cost is None else [seed, epoch, 3])
        return (rng.permutation(numbers) if self.shuffle else numbers.copy()), rng

    def _numbers_of(self, epoch: int, weights: tuple[float, ...] | None) -> Int64:
        draw = getattr(self.dataset, "epoch_items", None)
        if draw is not None:
            drawn: Int64 = draw(epoch, weights)
            return drawn
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        return np.arange(len(self.dataset), dtype=np.int64)

    def _aligned(self, order: Int64, segment: Segment, rng: np.random.Generator) -> Int64:
        """Steps whose items cost the same on all ranks; the last, short step stays as it is."""
        steps, rest = balanced_steps(
            self._costs(), order, ranks=segment.ranks, rows=segment.rows, window=WINDOW, rng=rng
        )
        # (step, rank, row) to the order of items, in which rank r has every `ranks`-th item of a step
        return np.concatenate([steps.transpose(0, 2, 1).reshape(-1), rest])

    def _redrawn(self, used: Int64, count: int, segment: Segment, epoch: int, seed: int) -> Int64:
        """`count` items by other weights, after the items that the epoch has used."""
        rng = np.random.default_rng([seed, epoch, 4, segment.item])
        drawn: Int64 = self.dataset.redrawn(used, count, segment.weights, rng)
        return rng.permutation(drawn) if self.shuffle else drawn


def check_sizes(dataset: Any) -> None:
    """Refuse a dataset whose rows cannot be aligned by cost.

    Raises:
        ConfigError: it has no `row_sizes()`.
    """
    if not callable(getattr(dataset, "row_sizes", None)):
        raise ConfigError(
            f"`balance` needs the sizes of rows, which {type(dataset).__name__} does not have. Use PackedDataset or "
            "plan_in_memory."
        )
