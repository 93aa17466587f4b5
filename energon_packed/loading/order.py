"""The order of training: map-style data, seed, epoch, rank and step in, the items of that step out.

    order of an epoch   a seeded permutation of its N items, optionally with equal costs of the items in a step;
                        computed block by block from a function (`permutation.py`), never as a whole
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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from energon_packed.arrays import blocks
from energon_packed.errors import ConfigError, FormatError, RecordError
from energon_packed.loading.costs.model import CostModel
from energon_packed.loading.datasets.map_data import MapData
from energon_packed.loading.permutation import Permutation
from energon_packed.options import as_integer
from energon_packed.packing.balance import Float64, Int64, StepImbalance, balanced_steps

WINDOW = 128
"""Steps that are sorted by cost together: a larger window aligns better and shuffles less."""
_BLOCK = 1024
"""Places that are computed together: the items of a step alone need half the time of a block."""
_KEPT = 1 << 16
"""Items of windows that are kept; with more, the two last windows of each change are kept."""
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
        accumulation = as_integer(accumulation, "accumulation")
        if repeat and not len(data):
            raise ConfigError("`repeat` needs at least 1 item, got an empty dataset. Pass data with items.")
        self.data = data
        self.shuffle, self.cost, self.repeat = shuffle, cost, repeat
        self.accumulation = accumulation if cost is not None else 1
        self._turn: tuple[Any, _Turn] | None = None
        if cost is not None:
            self.data.item_sizes()  # reads the sizes before workers are forked, which inherit them

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_turn": None}  # of functions, which worker processes make again

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
            first, window = self._turn_of(turn, seed, segments).window(at)
            items.append(int(window[at - first]))
        return items

    def item_or_error(self, number: int) -> Any:
        """Read one item, or return the error of reading it: `max_failures` decides whether it is raised."""
        try:
            return self.data.item(number)
        except (FormatError, RecordError) as error:
            return error

    def items(self, places: range, epoch: int, seed: int, segments: Sequence[Segment]) -> Int64:
        """Items at consecutive places of an epoch, int64 (n,).

        Args:
            places: from 0 in the epoch.
            epoch: from 0.
            seed: seed of the loader.
            segments: segments of the epoch; with `repeat`, of all epochs so far.
        """
        return self._turn_of(epoch, seed, segments).items(places.start, places.stop)

    def imbalances(self, epoch: int, seed: int, segment: Segment) -> tuple[StepImbalance, StepImbalance]:
        """Time of the slowest rank of each step over the mean rank: (shuffled, aligned).

        A step includes its accumulated steps, after which the ranks wait for each other.
        """
        count, rows = len(self) // segment.aligned_width, segment.rows * segment.accumulation
        turn = self._turn_of(epoch, seed, [segment])
        orders = [turn.items(0, count * segment.aligned_width, level) for level in (0, -1)]
        # Items of a step alternate between ranks: (step, row, rank) to (step, rank, row).
        steps = [order.reshape(count, rows, segment.ranks).transpose(0, 2, 1) for order in orders]
        costs = self._costs()
        return StepImbalance.of(costs, steps[0]), StepImbalance.of(costs, steps[1])

    def _costs(self) -> Float64:
        """Cost of each item, float64; of data that has other items in each epoch, of the epoch that was set."""
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

    def _turn_of(self, epoch: int, seed: int, segments: Sequence[Segment]) -> "_Turn":
        """Return the order of an epoch with these segments; the last result is kept."""
        layout = tuple(self._layout_of(epoch, segments))
        key = (epoch, seed, layout)
        if self._turn is None or self._turn[0] != key:
            self._turn = key, _Turn(list(self._levels(epoch, seed, layout)))
        return self._turn[1]

    def _levels(self, epoch: int, seed: int, layout: Sequence[Segment]) -> Iterator[list["_Region"]]:
        """Yield the changes of the order of an epoch: the shuffle, then new weights and alignment of each segment."""
        # Data that depends on the epoch sets it here, before its sizes are read.
        item_at = self.data.epoch_items(epoch, layout[0].weights)
        size, key = len(self), [seed, epoch] if self.cost is None else [seed, epoch, _ALIGNED]
        number_at = Permutation(size, key) if self.shuffle else np.asarray
        yield [_Region(0, size, _BLOCK, lambda _, start, stop: item_at(number_at(np.arange(start, stop))))]
        costs = None if self.cost is None else self._costs()
        for i, part in enumerate(layout):
            if i and part.weights != layout[i - 1].weights:
                yield [self._redrawn(part, epoch, seed)]
            if costs is not None:
                # Only in the first segment, items before it complete the accumulated steps of the previous epoch.
                head = [] if i else [(part.item % part.width, part.item, 1)]
                yield [self._aligned(costs, part, *bounds, [seed, epoch]) for bounds in [*head, *self._whole(part)]]

    def _whole(self, segment: Segment) -> Iterator[tuple[int, int, int]]:
        """Yield first place, end, and accumulation of whole accumulated steps, then of whole single steps."""
        start = segment.item
        for accumulation in sorted({segment.accumulation, 1}, reverse=True):
            stop = start + (len(self) - start) // (segment.width * accumulation) * segment.width * accumulation
            yield start, stop, accumulation
            start = stop

    def _aligned(
        self, costs: Float64, segment: Segment, start: int, stop: int, accumulation: int, key: Sequence[int]
    ) -> "_Region":
        """Reorder the items of whole steps, so that a step has equal costs on all ranks."""

        def align(before: _Items, first: int, last: int) -> Int64:
            # The generator of a window does not depend on the windows and segments before it.
            steps, _ = balanced_steps(
                costs,
                before(first, last),
                ranks=segment.ranks,
                rows=segment.rows * accumulation,
                window=WINDOW,
                rng=np.random.default_rng([*key, _ALIGNED, segment.item, first]),
            )
            # (step, rank, row) to the order of items, in which rank r has every `ranks`-th item of a step
            return steps.transpose(0, 2, 1).ravel()

        return _Region(start, stop, WINDOW * segment.width * accumulation, align)

    def _redrawn(self, segment: Segment, epoch: int, seed: int) -> "_Region":
        """Draw the items of the rest of an epoch by new weights, after the items that the epoch has used."""
        start, stop, weights = segment.item, len(self), segment.weights
        assert weights is not None

        def draw(before: _Items, first: int, last: int) -> Int64:
            # How often each item was used depends on all earlier places, so this needs an array, in a file.
            rng = np.random.default_rng([seed, epoch, _REDRAWN, first])
            used = (before(block.start, block.stop) for block in blocks(first))
            items = self.data.redrawn(used, last - first, weights, rng)
            if self.shuffle:
                rng.shuffle(items)
            return items

        return _Region(start, stop, max(1, stop - start), draw)


class _Region(NamedTuple):
    """Consecutive places whose items are changed, window by window.

    Attributes:
        start, stop: first place, and the place after the last.
        size: places of a window; the last window may be shorter.
        change: function of the items before the change, and of the bounds of a window, to the items of the window.
    """

    start: int
    stop: int
    size: int
    change: "Callable[[_Items, int, int], Int64]"


_Items = Callable[[int, int], Int64]
"""Function of the bounds of a range of places to its items."""


class _Turn:
    """The order of an epoch, of which only the windows that were read last are in memory.

    Args:
        levels: the changes that make the order, each by its regions, which are sorted. A place between the regions has
            the item that it had before the change. The first change has a region of all places.
    """

    def __init__(self, levels: Sequence[Sequence[_Region]]) -> None:
        self._levels = levels
        self._windows: dict[tuple[int, int], Int64] = {}  # by level and first place, the window used last at the end

    def items(self, start: int, stop: int, level: int = -1) -> Int64:
        """Items at places after the change of a level, by default the last, int64 (n,)."""
        parts = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            first, window = self.window(start, level)
            parts.append(window[start - first : stop - first])
            start += len(parts[-1])
        return np.concatenate(parts)

    def window(self, place: int, level: int = -1) -> tuple[int, Int64]:
        """Return the first place of a window that contains a place, and its items after the change of a level."""
        level %= len(self._levels)
        regions = self._levels[level]
        region = next((region for region in regions if region.start <= place < region.stop), None)
        if region is None:
            first, window = self.window(place, level - 1)
            start = max([first, *(region.stop for region in regions if region.stop <= place)])
            stop = min([first + len(window), *(region.start for region in regions if region.start > place)])
            return start, window[start - first : stop - first]
        first = place - (place - region.start) % region.size
        if (level, first) in self._windows:
            window = self._windows.pop((level, first))
        else:
            before = partial(self.items, level=level - 1)
            window = region.change(before, first, min(first + region.size, region.stop))
        self._windows[level, first] = window
        while len(self._windows) > 2 * len(self._levels) and sum(map(len, self._windows.values())) > _KEPT:
            del self._windows[next(iter(self._windows))]
        return first, window
