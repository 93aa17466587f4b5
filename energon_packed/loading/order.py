"""The order of training: map-style data, seed, epoch, rank and step in, the items of that step out.

    order of an epoch   a seeded permutation of its N items, optionally with equal costs of the items in a step
    step s              the next `ranks * rows` items of the order; rank r reads every `ranks`-th of them, from r on
    worker w of W       prepares the steps w, w + W, w + 2 W, ... of its rank

    items   7 3 9 | 0 4 8 | 2 1 6 | 5        3 ranks of one row: step 0 is 7 3 9, and rank 1 reads 3, 4 and 1
            step 0  step 1  step 2  step 3   the last step is short: only rank 0 has an item

Everything follows from seed and epoch, so each rank and worker computes its items. The order does not depend on the
number of workers, and a position in the data is (epoch, step), the same on all ranks. If the ranks, the rows of a step
or the weights of a blend change within an epoch, a `Segment` records the step: the epoch continues after the last item
that was used, with any number of ranks and workers.

Names: an *item* is an index in the data (of all datasets of a blend); a *place* is a position in the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.loading.costs.model import CostModel
from energon_packed.loading.map_data import MapData
from energon_packed.packing.balance import Float64, Int64, StepImbalance, balanced_steps

WINDOW = 128
"""Steps that are sorted by cost together: a larger window aligns better and shuffles less."""
# Last entries of seeds, so that the orders of a plain shuffle, an aligned shuffle and a redraw are independent.
_ALIGNED, _REDRAWN = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive steps of an epoch with the same ranks, rows and weights.

    Attributes:
        step: first step of the segment, from 0 in the epoch.
        item: place in the order of the first item of that step.
        ranks: data-parallel ranks.
        rows: items of a step on a rank.
        weights: weights of the datasets of a blend by weight; None for other data.
        accumulation: steps whose costs are aligned together, as the trainer accumulates their gradients.
    """

    step: int = 0
    item: int = 0
    ranks: int
    rows: int
    weights: tuple[float, ...] | None = None
    accumulation: int = 1

    @property
    def width(self) -> int:
        """Items of a step on all ranks."""
        return self.ranks * self.rows

    @property
    def aligned_width(self) -> int:
        """Items whose costs are aligned together: of all accumulated steps on all ranks."""
        return self.width * self.accumulation

    def first_item(self, step: int) -> int:
        """Place in the order of the first item of a step."""
        return self.item + (step - self.step) * self.width

    def continued(self, step: int, layout: "Segment") -> "Segment":
        """The segment that starts at `step` with the ranks, rows, weights and accumulation of `layout`."""
        return replace(layout, step=step, item=self.first_item(step))

    def has_layout_of(self, other: "Segment") -> bool:
        """Whether ranks, rows, weights and accumulation are equal."""
        return replace(other, step=self.step, item=self.item) == self

    def to_plain(self) -> list[Any]:
        """Return a list of numbers and lists, for loader states."""
        return [list(value) if isinstance(value, tuple) else value for value in astuple(self)]

    @classmethod
    def from_plain(cls, value: Sequence[Any]) -> "Segment":
        """Rebuild a segment from the result of `to_plain`."""
        step, item, ranks, rows, weights, accumulation = value
        return cls(
            step=step,
            item=item,
            ranks=ranks,
            rows=rows,
            weights=None if weights is None else tuple(weights),
            accumulation=accumulation,
        )


class Order:
    """The items of map-style data in the order of training.

    Args:
        data: the items.
        shuffle: permute the items by seed and epoch; False keeps the order of the data.
        cost: cost model of an item; the items of a step get similar costs on all ranks. None does not align.
        accumulation: steps whose costs are aligned together; without `cost`, it has no effect.
        repeat: concatenate all epochs to one endless sequence: a step at the end of an epoch combines its last items
            with the first items of the next epoch, so that all ranks have an item at every step.

    Raises:
        ConfigError: `cost` with data of unknown sizes, `accumulation` below 1, or `repeat` with empty data.
    """

    def __init__(
        self,
        data: MapData,
        *,
        shuffle: bool = True,
        cost: CostModel | None = None,
        accumulation: int = 1,
        repeat: bool = False,
    ) -> None:
        if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
            raise ConfigError(f"`accumulation` must be an integer of at least 1, got {accumulation!r}.")
        if repeat and not len(data):
            raise ConfigError("`repeat` needs at least 1 item, got an empty dataset. Pass data with items.")
        self.data = data
        self.shuffle, self.cost, self.repeat = shuffle, cost, repeat
        self.accumulation = accumulation if cost is not None else 1
        self._cached: tuple[Any, Int64] | None = None
        if cost is not None:
            self._costs()  # reads the sizes before workers are forked, which inherit them

    def __len__(self) -> int:
        """Items of one epoch."""
        return len(self.data)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the datasets of a blend by weight; None for other data."""
        return None if self.data.weights is None else tuple(self.data.weights)

    def segment(self, ranks: int, rows: int) -> Segment:
        """The segment of an epoch whose layout does not change."""
        return Segment(ranks=ranks, rows=rows, weights=self.weights, accumulation=self.accumulation)

    def steps(self, segment: Segment, *, drop: bool = False) -> int:
        """Index of the step after the last step of an epoch that ends with this segment, the same on all ranks.

        Args:
            segment: last segment of the epoch.
            drop: leave out a step that is not full.

        Raises:
            TypeError: `repeat` is set, so the steps do not end.
        """
        if self.repeat:
            raise TypeError("the number of batches is not known in advance: the data repeats, count steps")
        full, remainder = divmod(len(self) - segment.item, segment.width)
        return segment.step + full + (remainder > 0 and not drop)

    def places(self, segment: Segment, step: int, rank: int) -> range:
        """Places in the order of the items of a step on one rank."""
        first = segment.first_item(step)
        stop = first + segment.width
        return range(first + rank, stop if self.repeat else min(stop, len(self)), segment.ranks)

    def numbers(self, places: Sequence[int], epoch: int, seed: int, segments: Sequence[Segment]) -> list[int]:
        """Items at places of the order.

        Args:
            places: from 0 in the epoch; with `repeat`, from 0 in epoch 0.
            epoch: from 0; with `repeat`, always 0.
            seed: seed of the loader.
            segments: segments of the epoch so far.
        """
        size = len(self)
        items = []
        for place in places:
            turn, at = divmod(place, size) if self.repeat else (epoch, place)
            items.append(int(self.epoch_order(turn, seed, segments)[at]))
        return items

    def item_or_error(self, number: int) -> Any:
        """Read one item, or return the error of reading it: `max_failures` decides whether it is raised."""
        try:
            return self.data.item(number)
        except (FormatError, RecordError) as error:
            return error

    def epoch_order(self, epoch: int, seed: int, segments: Sequence[Segment]) -> Int64:
        """Items of an epoch in their order, int64 (N,); the last result is cached.

        Args:
            epoch: from 0.
            seed: seed of the loader.
            segments: segments of the epoch; with `repeat`, of all epochs so far.
        """
        layout = tuple(self._layout_of(epoch, segments))
        # Without alignment, ranks and rows do not change the order: a rank count that changes keeps the cached order.
        weighted = tuple((part.item, part.weights) for part in layout if part.weights)
        key = (epoch, seed, weighted if self.cost is None else layout)
        if self._cached is None or self._cached[0] != key:
            self._cached = key, self._ordered(epoch, seed, layout)
        return self._cached[1]

    def imbalances(self, epoch: int, seed: int, segment: Segment) -> tuple[StepImbalance, StepImbalance]:
        """Time of the slowest rank of each step over the mean rank: (shuffled, aligned).

        A step includes its accumulated steps, after which the ranks wait for each other.
        """
        count, rows = len(self) // segment.aligned_width, segment.rows * segment.accumulation
        orders = (self._shuffled(epoch, seed, segment.weights)[0], self.epoch_order(epoch, seed, [segment]))
        # Items of a step alternate between ranks: (step, row, rank) to (step, rank, row).
        steps = [
            order[: count * segment.aligned_width].reshape(count, rows, segment.ranks).transpose(0, 2, 1)
            for order in orders
        ]
        costs = self._costs()
        return StepImbalance.of(costs, steps[0]), StepImbalance.of(costs, steps[1])

    def _costs(self) -> Float64:
        """Cost of each item, float64."""
        return (self.cost or CostModel()).costs(self.data.item_sizes())

    def _layout_of(self, epoch: int, segments: Sequence[Segment]) -> Iterator[Segment]:
        """The segments of one epoch, with places relative to its start.

        With `repeat`, a step may start in the previous epoch: the items that complete it precede the first segment.
        """
        if not self.repeat:
            yield from segments
            return
        start, size = epoch * len(self), len(self)
        first = max((part for part in segments if part.item <= start), key=lambda part: part.item)
        # The first whole step of this epoch starts at the next multiple of the width after the segment's start.
        yield replace(first, item=(first.item - start) % first.aligned_width)
        for part in segments:
            if start < part.item < start + size:
                yield replace(part, item=part.item - start)

    def _ordered(self, epoch: int, seed: int, layout: Sequence[Segment]) -> Int64:
        """Build the order of an epoch; each segment changes only the places from its start on."""
        order, rng = self._shuffled(epoch, seed, layout[0].weights)
        for i, part in enumerate(layout):
            if i and part.weights != layout[i - 1].weights:
                order[part.item :] = self._redrawn(order[: part.item], len(order) - part.item, part, epoch, seed)
            if self.cost is not None:
                # Later segments have their own generator, which does not depend on the segments before.
                rng = np.random.default_rng([seed, epoch, _ALIGNED, part.item]) if i else rng
                if not i:  # items that complete the accumulated steps of the previous epoch
                    head = slice(part.item % part.width, part.item)
                    order[head] = self._aligned(order[head], part, rng)
                order[part.item :] = self._aligned(order[part.item :], part, rng)
        return order

    def _shuffled(self, epoch: int, seed: int, weights: tuple[float, ...] | None) -> tuple[Int64, np.random.Generator]:
        """The items of an epoch before alignment, and the generator that alignment continues with."""
        items = self.data.epoch_items(epoch, weights)
        rng = np.random.default_rng([seed, epoch] if self.cost is None else [seed, epoch, _ALIGNED])
        return (rng.permutation(items) if self.shuffle else items.copy()), rng

    def _aligned(self, order: Int64, segment: Segment, rng: np.random.Generator) -> Int64:
        """Reorder items so that a step has equal costs on all ranks; the last, short step is unchanged."""
        costs, parts, rest = self._costs(), [], order
        for accumulation in sorted({segment.accumulation, 1}, reverse=True):  # whole steps, then single steps
            steps, rest = balanced_steps(
                costs, rest, ranks=segment.ranks, rows=segment.rows * accumulation, window=WINDOW, rng=rng
            )
            # (step, rank, row) to the order of items, in which rank r has every `ranks`-th item of a step
            parts.append(steps.transpose(0, 2, 1).ravel())
        return np.concatenate([*parts, rest])

    def _redrawn(self, used: Int64, count: int, segment: Segment, epoch: int, seed: int) -> Int64:
        """Draw `count` items by new weights, after the items that the epoch has used."""
        rng = np.random.default_rng([seed, epoch, _REDRAWN, segment.item])
        assert segment.weights is not None
        items = self.data.redrawn(used, count, segment.weights, rng)
        return rng.permutation(items) if self.shuffle else items
