"""Places of the global order against sets and sorted lists: who reads an item, and which items are aligned."""

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import ConfigError, CostModel, DataflowLoader, MapDistributor, PackedDataset, RowSizes
from tests.internals import MapData, Permutation, arrays, files
from tests.loading.flows import FEATURES

ITEMS = 41
COSTS = np.random.default_rng(5).permutation(1000)[:ITEMS] + 1  # all different, so that a sorted list is one list
TOKENS = CostModel(token=1.0, square=0.0, patch=0.0)


def sizes(tokens: np.ndarray) -> RowSizes:
    return RowSizes(tokens=tokens, squares=tokens * 0, patches=tokens * 0, patch_squares=tokens * 0)


class Rows(list[Any]):
    """Items of known costs."""

    def __init__(self, items: int = ITEMS) -> None:
        super().__init__({"id": str(n), "input_ids": [n, n]} for n in range(items))

    def row_sizes(self) -> RowSizes:
        return sizes(COSTS[: len(self)])


def order_of(data: Any = None, **options: Any) -> Any:
    return MapDistributor(Rows() if data is None else data, **options).order


def shuffled(epoch: int, seed: int, items: int = ITEMS, *salt: int) -> list[int]:
    return Permutation(items, [seed, epoch, *salt])(np.arange(items)).tolist()


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (3, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch_end", ["repeat", "drop"])
def test_a_step_is_the_next_items_and_a_rank_reads_every_so_many(
    ranks: int, rows: int, shuffle: bool, epoch_end: Any
) -> None:
    width = ranks * rows
    for rank in range(ranks):
        options: dict[str, Any] = {"rank": rank, "world_size": ranks, "seed": 2, "epoch_end": epoch_end}
        loader = DataflowLoader(MapDistributor(Rows(), shuffle=shuffle), batch_size=rows, **options)
        for epoch in range(3):
            order = shuffled(epoch, 2) if shuffle else list(range(ITEMS))
            steps = [order[first : first + width] for first in range(0, ITEMS, width)]
            if epoch_end == "drop":
                steps = [step for step in steps if len(step) == width]
            batches = [[name and int(name) for name in batch.ids] for batch in loader]
            assert [found for found in batches if found != [None]] == [
                step[rank::ranks] for step in steps if step[rank:]
            ]
            assert len(batches) == len(steps) == len(loader)


def rounds(order: Sequence[int], ranks: int) -> set[frozenset[int]]:
    assert len(order) % ranks == 0
    return {frozenset(order[first : first + ranks]) for first in range(0, len(order), ranks)}


def check_aligned(before: list[int], after: list[int], starts: list[int], ranks: int) -> None:
    """In each part, the items are those of `before`, and the items of all ranks at a time are neighbours in cost."""
    bounds = [0, *starts, len(before)]
    assert after[: bounds[1]] == before[: bounds[1]]
    assert after[bounds[-2] :] == before[bounds[-2] :]
    for start, stop in pairwise(bounds[1:-1]):
        by_cost = sorted(before[start:stop], key=lambda item: -COSTS[item])
        assert rounds(after[start:stop], ranks) == rounds(by_cost, ranks)


def parts(first: int, begin: int, end: int, layout: tuple[int, int, int], *, head: bool) -> list[int]:
    """Bounds of whole single steps, of whole groups of accumulated steps, and of whole single steps.

    Args:
        first: place at which the layout starts.
        begin, end: places of the epoch.
        layout: ranks, rows, accumulated steps.
        head: the layout starts before the epoch.
    """
    ranks, rows, accumulation = layout
    width = ranks * rows
    steps = [place for place in range(first, end + 1, width) if place >= begin]
    groups = [place for place in range(first, end + 1, width * accumulation) if place >= begin]
    bounds = ([steps[0]] if head else []) + [groups[0], groups[-1], steps[-1]]
    return [place - begin for place in bounds]


LAYOUTS = [(1, 2, 1), (2, 1, 1), (3, 2, 1), (4, 1, 1), (2, 2, 2), (2, 1, 3), (3, 1, 4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epoch", [0, 2])
def test_the_items_of_a_time_are_neighbours_in_cost(layout: tuple[int, int, int], epoch: int) -> None:
    ranks, rows, accumulation = layout
    order = order_of(balance=TOKENS, accumulation=accumulation)
    after = order.numbers(range(ITEMS), epoch, 7, [order.segment(ranks, rows)])
    starts = parts(0, 0, ITEMS, layout, head=False)
    check_aligned(shuffled(epoch, 7, ITEMS, 3), after, starts, ranks)
    # The rank with the least so far gets the most: the sums of a group differ by one item at most.
    if ranks > 1 and rows * accumulation > 1:
        for first in range(0, starts[1], ranks * rows * accumulation):
            group = np.array(after[first : first + ranks * rows * accumulation]).reshape(-1, ranks)
            spread = COSTS[group].max(axis=1) - COSTS[group].min(axis=1)
            assert np.ptp(COSTS[group].sum(axis=0)) <= spread.max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_epochs_align_whole_steps_of_one_epoch(layout: tuple[int, int, int]) -> None:
    ranks, rows, accumulation = layout
    order = order_of(balance=TOKENS, accumulation=accumulation, repeat=True)
    segments = [order.segment(ranks, rows)]
    for epoch in range(4):
        begin = epoch * ITEMS
        after = order.numbers(range(begin, begin + ITEMS), 0, 7, segments)
        starts = parts(0, begin, begin + ITEMS, layout, head=True)
        check_aligned(shuffled(epoch, 7, ITEMS, 3), after, starts, ranks)


@settings(max_examples=40)
@given(
    layouts=st.lists(st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 12)), min_size=2, max_size=4),
    repeat=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_changed_layout_aligns_only_what_is_left(
    layouts: list[tuple[tuple[int, int, int], int]], repeat: bool, seed: int
) -> None:
    segments: list[Any] = []
    step = place = 0
    for (ranks, rows, accumulation), steps in layouts:
        if place >= ITEMS and not repeat:
            break
        order = order_of(balance=TOKENS, accumulation=accumulation, repeat=repeat)
        layout = order.segment(ranks, rows)
        segments.append(segments[-1].continued(step, layout) if segments else layout)
        assert (segments[-1].step, segments[-1].item) == (step, place)
        step, place = step + steps, place + steps * ranks * rows
    for epoch in range(3 if repeat else 1):
        begin, end = epoch * ITEMS, (epoch + 1) * ITEMS
        before = shuffled(epoch, seed, ITEMS, 3)
        first = max(n for n, segment in enumerate(segments) if segment.item <= begin)
        for n in range(first, len(segments)):
            segment = segments[n]
            start = max(begin, segment.item)
            if start >= end:
                break
            layout = (segment.ranks, segment.rows, segment.accumulation)
            after = order.numbers(range(begin, end), 0, seed, segments[: n + 1])
            bounds = parts(segment.item, start, end, layout, head=repeat and n == first)
            check_aligned(before, after, [start - begin + bound for bound in bounds], segment.ranks)
            before = after


def test_places_without_alignment_do_not_depend_on_the_layout() -> None:
    for repeat in (False, True):
        order = order_of(repeat=repeat, accumulation=3)  # without costs, no steps are aligned
        assert order.segment(2, 3).accumulation == 1
        layouts = [
            [order.segment(2, 1)],
            [order.segment(3, 2)],
            [order.segment(2, 1), order.segment(2, 1).continued(3, order.segment(5, 1))],
        ]
        for segments in layouts:
            assert order.items(range(ITEMS), 1 - repeat, 4, segments).tolist() == shuffled(1 - repeat, 4)
        expected = [shuffled(epoch, 4)[place] for epoch, place in [(0, 7), (1, 0), (1, 40)]]
        if repeat:
            assert order.numbers([7, 41, 81], 0, 4, layouts[2]) == expected
        else:
            assert [
                order.numbers([place], epoch, 4, layouts[2])[0] for epoch, place in [(0, 7), (1, 0), (1, 40)]
            ] == expected
        assert {type(number) for number in order.numbers([1, 2], 0, 4, layouts[0])} == {int}


@pytest.mark.parametrize("balance", [None, TOKENS])
@pytest.mark.parametrize("repeat", [False, True])
def test_an_order_asked_in_any_sequence_is_the_order_of_a_new_loader(balance: Any, repeat: bool) -> None:
    """What is kept of the last epoch is not taken for another epoch, seed or layout."""
    layouts = [(2, 1), (3, 2), (2, 2)]
    cases = [(epoch, seed, layout) for epoch in range(3) for seed in (1, 2) for layout in layouts]
    one = order_of(balance=balance, repeat=repeat)
    for n in np.random.default_rng(0).integers(0, len(cases), 60):
        epoch, seed, layout = cases[n]
        new = order_of(balance=balance, repeat=repeat)
        segments = [one.segment(*layout)]
        found = one.items(range(ITEMS), epoch, seed, segments)
        assert found.tolist() == new.items(range(ITEMS), epoch, seed, segments).tolist()
        assert found.dtype == np.int64


@pytest.mark.parametrize("items", [40, 41])
def test_steps_are_counted_from_the_layout_on(items: int) -> None:
    for ranks, rows, start in [
        (2, 2, 0),
        (2, 2, 3),
        (3, 1, 5),
        (1, 1, 7),
        (4, 2, 2),
        (41, 1, 0),
        (3, 2, 5),
        (4, 3, 2),
    ]:
        order = order_of(Rows(items))
        segment = order.segment(1, 3).continued(start, order.segment(ranks, rows))
        left = items - 3 * start
        assert order.steps(segment) == start + -(-left // (ranks * rows))
        assert order.steps(segment, drop=True) == start + left // (ranks * rows)
        places = [
            place
            for rank in range(ranks)
            for step in range(start, order.steps(segment))
            for place in order.places(segment, step, rank)
        ]
        assert sorted(places) == list(range(3 * start, items))
        endless = order_of(Rows(items), repeat=True)
        places = [place for rank in range(ranks) for place in endless.places(segment, start + 50, rank)]
        assert sorted(places) == list(range(3 * start + 50 * ranks * rows, 3 * start + 51 * ranks * rows))


@pytest.mark.parametrize("balance", [None, TOKENS])
def test_a_layout_that_does_not_change_leaves_the_state_as_it_was(balance: Any) -> None:
    """Also an aligned order: a new layout would align the rest again."""

    def new(rank: int, **options: Any) -> DataflowLoader:
        order = MapDistributor(Rows(), balance=balance, accumulation=2)
        return DataflowLoader(order, rank=rank, world_size=2, batch_size=2, seed=1, **options)

    for rank in range(2):
        loader = new(rank)
        states, expected = [loader.state_dict()], []
        for batch in loader:
            expected.append(batch.ids)
            states.append(loader.state_dict())
        for step, state in enumerate(states[:-1]):
            resumed = new(rank)
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert resumed.state_dict() == state
            assert [batch.ids for batch in resumed] == expected[step:]
    assert states[3] | {"identity": None} == {
        "version": 1, "loader": "DataflowLoader", "identity": None, "epoch": 0, "step": 3,
        "segments": [[0, 0, 2, 2, None, 2 if balance else 1]],
    }  # fmt: skip


@pytest.mark.parametrize(("epoch", "seed", "layout"), [(0, 1, (2, 1, 1)), (3, 2, (3, 2, 1)), (1, 1, (2, 2, 3))])
@pytest.mark.parametrize("balance", [TOKENS, None])
def test_imbalances_are_those_of_the_steps(
    epoch: int, seed: int, layout: tuple[int, int, int], balance: CostModel | None
) -> None:
    ranks, rows, accumulation = layout if balance else (*layout[:2], 1)
    order = order_of(balance=balance, accumulation=accumulation)
    segment = order.segment(ranks, rows)
    groups = ITEMS // (ranks * rows * accumulation)
    costs = (balance or CostModel()).costs(sizes(COSTS))
    aligned = np.zeros((groups, ranks))
    for step in range(groups * accumulation):
        for rank in range(ranks):
            numbers = order.numbers(order.places(segment, step, rank), epoch, seed, [segment])
            aligned[step // accumulation, rank] += costs[numbers].sum()
    plain = np.array(shuffled(epoch, seed, ITEMS, *([3] if balance else [])))[: groups * ranks * rows * accumulation]
    before = costs[plain.reshape(groups, rows * accumulation, ranks)].sum(axis=1)
    for found, expected in zip(order.imbalances(epoch, seed, segment), (before, aligned), strict=True):
        slowest = expected.max(axis=1)
        assert found.mean == pytest.approx(slowest.sum() / expected.mean(axis=1).sum())
        assert found.max == pytest.approx((slowest / expected.mean(axis=1)).max())
    blend = Drawn((3, 1))
    order = order_of(blend, balance=balance)
    order.imbalances(epoch, seed, order.segment(ranks, rows))
    assert blend.drawn == [(epoch, (3, 1))]


def test_the_order_of_a_saved_position_does_not_change() -> None:
    """A state continues with the same items, whatever changed in the code since it was saved."""
    order = order_of(balance=TOKENS)
    first = order.segment(2, 2)
    found = order.numbers(range(ITEMS), 1, 7, [first, first.continued(5, order.segment(3, 1))])
    assert found == [
        2, 35, 29, 22, 3, 11, 26, 12, 40, 15, 32, 20, 38, 7, 21, 33, 8, 27, 4, 6, 39, 16, 0, 14, 18, 9,
        30, 5, 13, 24, 1, 23, 36, 17, 34, 31, 25, 28, 37, 19, 10,
    ]  # fmt: skip


def test_a_layout_that_changes_between_two_epochs_is_that_of_the_whole_epoch() -> None:
    order, one = order_of(balance=TOKENS, repeat=True), order_of(balance=TOKENS)
    first = order.segment(1, 1)
    changed = [first, first.continued(ITEMS, order.segment(2, 2))]
    expected = one.numbers(range(ITEMS), 1, 7, [one.segment(2, 2)])
    assert order.numbers(range(ITEMS, 2 * ITEMS), 0, 7, changed) == expected
    before = one.numbers(range(ITEMS), 0, 7, [one.segment(1, 1)])
    assert order.numbers(range(ITEMS), 0, 7, changed) == before


class Drawn(MapData):
    """A blend: each epoch draws its items, and other weights draw the rest of them."""

    read_ahead = 5

    def __init__(self, weights: Sequence[float] | None = (3, 1)) -> None:
        self._weights = None if weights is None else list(weights)
        self.drawn: list[Any] = []
        self.requested: list[list[int]] = []
        self.items = np.arange(ITEMS) + 100

    def __len__(self) -> int:
        return ITEMS

    @property
    def weights(self) -> list[float] | None:
        return self._weights

    def epoch_items(self, epoch: int, weights: Any) -> Any:
        self.drawn.append((epoch, weights))
        self.items += epoch
        return self.items.__getitem__

    def redrawn(self, used: Any, count: int, weights: Any, rng: np.random.Generator) -> np.ndarray:
        self.drawn.append(([item for block in used for item in block.tolist()], count, weights))
        self.rest = rng.permutation(1000)[:count] + 1000
        return self.rest.copy()

    def item(self, number: int) -> Any:
        return {"id": str(number), "input_ids": [1, 2]}

    def item_sizes(self) -> RowSizes:
        return sizes(np.arange(2000) * 7 % 2000)

    def request(self, numbers: Sequence[int]) -> None:
        self.requested.append(list(numbers))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("balance", [None, TOKENS])
def test_new_weights_draw_the_rest_of_an_epoch_once(shuffle: bool, balance: Any) -> None:
    old, new = Drawn((3, 1)), Drawn((1, 3))
    order = order_of(old, shuffle=shuffle, balance=balance)
    assert (order.weights, order_of(new).weights, order_of(Drawn(None)).weights, order_of().weights) == (
        (3, 1),
        (1, 3),
        None,
        None,
    )
    first = order.segment(2, 1)
    before = order.numbers(range(ITEMS), 2, 6, [first])
    assert old.drawn[-1] == (2, (3, 1))
    assert sorted(before) == list(range(102, 102 + ITEMS))
    assert old.items.tolist() == list(range(102, 102 + ITEMS))  # the blend's own array is not reordered
    if not shuffle and balance is None:
        assert before == sorted(before)
    changed = first.continued(4, order_of(new, balance=balance).segment(3, 1))
    assert (changed.item, changed.weights) == (8, (1, 3))
    again = changed.continued(7, order.segment(2, 1))
    for segments, start in (([first, changed], 8), ([first, changed, again], 17)):
        part = segments[-1]
        other = order_of(Drawn((3, 1)), shuffle=shuffle, balance=balance)
        after = other.numbers(range(ITEMS), 2, 6, segments)
        assert after[:start] == before[:start]
        assert min(after[start:]) >= 1000
        assert other.data.drawn[-1] == (after[:start], ITEMS - start, part.weights)
        assert sorted(after[start:]) == sorted(other.data.rest.tolist())
        if balance is None:
            assert (after[start:] == other.data.rest.tolist()) != shuffle
        assert min(order.numbers(range(start, ITEMS), 2, 6, segments)) >= 1000  # not the order of the old weights
        assert after == order_of(Drawn((5, 5)), shuffle=shuffle, balance=balance).numbers(range(ITEMS), 2, 6, segments)
        for epoch, seed in ((3, 6), (2, 7)):
            assert after[start:] != order_of(Drawn(), balance=balance).numbers(
                range(start, ITEMS), epoch, seed, segments
            )
        before = after
    same = first.continued(4, order.segment(3, 1))  # other ranks draw nothing again
    count = len(old.drawn)
    order.numbers([30], 2, 6, [first, same])
    assert all(len(call) == 2 for call in old.drawn[count:])


class Blend(MapData):
    """The order of a PackedDataset of two datasets of equal size, without packs; each pack is in an epoch once."""

    def __init__(self, count: int) -> None:
        self.bounds = np.array([0, count // 2, count])

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @property
    def weights(self) -> list[float]:
        return [1.0, 1.0]

    def item(self, number: int) -> Any:
        raise NotImplementedError

    def item_sizes(self) -> RowSizes:
        raise NotImplementedError

    def redrawn(self, used: Any, count: int, weights: Any, rng: np.random.Generator) -> np.ndarray:
        of_blend: Any = SimpleNamespace(_starts=self.bounds)
        return PackedDataset.redrawn(of_blend, used, count, weights, rng)


@pytest.mark.parametrize("shuffle", [True, False])
def test_new_weights_need_no_array_of_all_items_in_memory(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a pack is used again only after the other packs of its dataset."""
    for module, name, size in ((files, "_IN_MEMORY", 1), (arrays, "BLOCK", 1 << 10)):
        monkeypatch.setattr(module, name, size)
    peaks = []
    for count in (320_000, 320_000, 640_000):  # with fewer items, all windows are kept
        order = order_of(Blend(count), shuffle=shuffle)
        first = order.segment(2, 1)
        changed = replace(first.continued(count // 4, first), weights=(1.0, 7.0))
        tracemalloc.start()
        try:
            order.numbers([count - 1], 0, 3, [first, changed])
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        items = order.items(range(count), 0, 3, [first, changed])
        rest = items[count // 2 :]
        assert abs(int((rest < count // 2).sum()) - len(rest) / 8) <= 1
        assert (rest[:1000] < count // 2).all() != shuffle
        for own in np.split(np.bincount(items, minlength=count), 2):
            assert own.max() - own.min() <= 1
    assert peaks[2] - peaks[1] < 100_000


def test_items_are_requested_ahead_of_data_that_can() -> None:
    data = Drawn()
    order = order_of(data)
    assert (order.data.read_ahead, order_of().data.read_ahead) == (5, 0)
    assert order.data is data
    assert order_of().data.item(7) == Rows()[7]


class Epochs(Rows):
    """Items that depend on the epoch that is set."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, number: Any) -> Any:
        return {"id": f"{self.epoch}.{number}", "input_ids": [1, 2]}


def test_each_loader_sets_the_epoch_of_its_own_data() -> None:
    data = Epochs()
    loaders = [DataflowLoader(MapDistributor(data), seed=seed) for seed in (0, 1)]
    for epoch in range(2):
        pairs = list(zip(*loaders, strict=True))
        for seed in range(2):
            assert [pair[seed].ids for pair in pairs] == [[f"{epoch}.{n}"] for n in shuffled(epoch, seed)]
    assert data.epoch == -1


@pytest.mark.parametrize("accumulation", [0, -1, True, 1.5, "2", None])
def test_accumulation_is_a_number_of_steps(accumulation: Any) -> None:
    with pytest.raises(ConfigError, match="`accumulation` must be (an integer|at least 1), got "):
        MapDistributor(Rows(), accumulation=accumulation)


def test_costs_need_sizes_of_rows() -> None:
    with pytest.raises(ConfigError, match="`balance` needs the sizes of rows, which list does not have"):
        MapDistributor(FEATURES, balance=TOKENS)
    read: list[int] = []

    class Counted(Rows):
        def row_sizes(self) -> RowSizes:
            read.append(1)
            return super().row_sizes()

    MapDistributor(Counted())
    assert not read
    MapDistributor(Counted(), balance=TOKENS)
    assert read  # before workers are started, which inherit them


def test_segments_with_weights_continue_from_a_file() -> None:
    def new(weights: tuple[float, ...], world_size: int) -> DataflowLoader:
        options: dict[str, Any] = {"rank": 0, "world_size": world_size, "allow_changed_weights": True}
        return DataflowLoader(MapDistributor(Drawn(weights)), **options)

    def after(loader: DataflowLoader, steps: int) -> Any:
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        return json.loads(json.dumps(loader.state_dict()))

    first = after(new((3.0, 1.0), 2), 2)
    changed = new((1.0, 3.0), 3)
    changed.load_state_dict(first)
    state = after(changed, 1)
    assert state["segments"] == [[0, 0, 2, 1, [3.0, 1.0], 1], [2, 4, 3, 1, [1.0, 3.0], 1]]
    resumed = new((1.0, 3.0), 3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [batch.ids for batch in resumed] == [batch.ids for batch in changed]
