"""The steps of workers against lists in plain Python: who reads an item, and where a state continues.

The workers of a rank run in this process, one after the other, as `round_robin` calls them.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from energon_packed import (
    BatchError,
    ConfigError,
    FormatError,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
    PaddingFreeCollator,
    PoolPacker,
    Reason,
    Reject,
    RowSizes,
    SampleSource,
    SimpleBatcher,
)
from tests.internals import (
    FailureLog,
    LoaderLayout,
    LoaderParts,
    MapData,
    Permutation,
    PlannedSteps,
    RecordAt,
    StoredTokens,
    StreamSteps,
    WithSource,
    rejects,
)
from tests.loading.flows import feature

ITEMS = 23
DATA = [feature(number) for number in range(ITEMS)]


def parts(distributor: Any, packer: Any, epoch_end: str = "repeat", limit: int | None = None) -> Any:
    failures = FailureLog(rejects.RejectLimits(max_failures=limit), readers=distributor.readers)
    return LoaderParts(distributor, StoredTokens(), packer, PaddingFreeCollator(), failures, epoch_end)


def read(plan: Any, position: Any) -> Iterator[tuple[Any, Any]]:
    """The steps of all workers of a rank, each with the position after it."""
    workers = deque(plan.steps(position, turn) for turn in range(plan.num_workers))
    while workers:
        worker = workers.popleft()
        step = next(worker)
        position = plan.after(position, step)
        if not step.ended:
            workers.append(worker)
        yield step, position


def saved(plan: Any, position: Any) -> Any:
    place = dict(zip(("rank", "world_size"), plan.place or (), strict=False))
    return json.loads(json.dumps({"identity": plan.identity(), **place, **plan.to_plain(position)}))


def resumed(plan: Any, *states: Any, allow: bool = False) -> Any:
    return plan.from_plain(list(states), plan.identity(), allow_changed_weights=allow)


# --- items with a global order -------------------------------------------------------------------------------------


class Data(MapData):
    """Items, some of which cannot be used: an error, a pack without a sample, rejected records."""

    def __init__(self, bad: Sequence[int] = (), ahead: int = 0) -> None:
        self.items = list(DATA)
        self.read_ahead, self.requested = ahead, list[list[int]]()
        kinds = [
            FormatError("no sample"),
            [],
            WithSource(Reject(Reason.EMPTY, "no text"), SampleSource("d", {}), RecordAt("d", 0, 7, "r")),
            Reject(Reason.EMPTY, "no text"),
        ]
        for n, item in enumerate(bad):
            self.items[item] = kinds[n % 4]

    def __len__(self) -> int:
        return len(self.items)

    def item(self, number: int) -> Any:
        return self.items[number]

    def item_sizes(self) -> RowSizes:
        raise AssertionError("no costs")

    def request(self, numbers: Sequence[int]) -> None:
        self.requested.append(list(numbers))


def planned(
    data: Any,
    layout: tuple[int, int, int] = (1, 1, 1),
    rank: int = 0,
    end: str = "repeat",
    seed: int = 0,
    **options: Any,
) -> Any:
    """Steps of a layout: ranks, rows, workers."""
    ranks, rows, workers = layout
    roles = parts(MapDistributor(data, **options), SimpleBatcher(rows), end)
    return PlannedSteps(roles, LoaderLayout(rank, ranks, workers, rows), seed)


def order_of(epoch: int, seed: int) -> list[int]:
    return Permutation(ITEMS, [seed, epoch])(np.arange(ITEMS)).tolist()


@pytest.mark.parametrize("case", range(40))
def test_each_step_has_its_items_or_a_row_of_another_rank(case: int) -> None:
    rng = np.random.default_rng(case)
    ranks, rows, workers = layout = tuple(int(rng.integers(1, most)) for most in (5, 4, 5))
    width, end, repeat = ranks * rows, str(rng.choice(["repeat", "drop"])), bool(case % 3 == 2)
    rank, epoch, seed, ahead = (int(rng.integers(most)) for most in (ranks, 3, 3, 8))
    epoch = 0 if repeat else epoch
    bad = rng.permutation(ITEMS)[: int(rng.integers(ITEMS))].tolist()
    data = Data(bad, ahead)
    plan = planned(data, layout, rank, end, seed, repeat=repeat)

    def number(place: int) -> int:
        turn, at = divmod(place, ITEMS) if repeat else (epoch, place)
        return order_of(turn, seed)[at]

    def places(step: int, of: int) -> list[int]:
        found = range(step * width + of, (step + 1) * width, ranks)
        return [place for place in found if repeat or place < ITEMS]

    count = 2 * ITEMS if repeat else ITEMS // width if end == "drop" else -(-ITEMS // width)
    first = int(rng.integers(count + 1))
    position = plan.begin(epoch)
    assert (position.epoch, position.step, plan.place) == (epoch, 0, None)
    if not repeat:
        assert plan.length() == count
    at_first = resumed(plan, saved(plan, position) | {"step": first})
    found = read(plan, at_first)
    requests, failed = [], Counter[str]()
    for n, index in enumerate(range(first, count)):
        step, position = next(found)
        mine = places(index, rank)
        used = [place for place in mine if number(place) not in bad]
        assert (step.worker, step.state, step.ended) == (n % workers, None, False)
        assert (step.items, step.dropped) == (used, [place for place in mine if place not in used])
        assert (position.epoch, position.step, position.parts) == (epoch, index + 1, at_first.parts)
        others = [[p for p in places(index, other) if number(p) not in bad] for other in range(ranks)]
        shown = used or next((one for one in others if one), [])
        if not shown:
            assert step.batch is None
        else:
            numbers = [number(place) for place in shown]
            tokens = [token for n in numbers for token in DATA[n]["input_ids"]]
            assert step.batch.input_ids.flatten().tolist() == tokens
            assert step.batch.ids == ([f"s{n}" for n in numbers] if used else [None] * len(shown))
            assert bool(step.batch.loss_mask.sum()) == bool(used)
        for place in mine:
            kind = bad.index(number(place)) % 4 if number(place) in bad else 1
            failed[{0: f"item {place}", 1: "", 2: "r", 3: f"item {place}"}[kind]] += 1
        ahead_of = list[int]()
        following = iter(range(index, count if not repeat else index + 10 * workers * ahead + 1, workers))
        while len(ahead_of) < ahead and (following_step := next(following, None)) is not None:
            ahead_of += [number(place) for place in places(following_step, rank)]
        requests += [ahead_of] if ahead else []
    assert data.requested[: len(requests)] == requests
    del failed[""]
    assert Counter(row["id"] for row in plan.roles.failures.rows) == failed
    assert plan.roles.failures.used == sum(
        number(place) not in bad for index in range(first, count) for place in places(index, rank)
    )
    if repeat:
        return
    assert not plan.roles.failures.counts.get("epoch_end")
    ended = list(found)
    left = places(count, rank) if end == "drop" else []
    assert {step.worker: step.dropped for step, _ in ended} == {n: [] for n in range(1, workers)} | {0: left}
    for step, after in ended:
        assert (step.batch, step.state, step.items, step.ended) == (None, None, [], True)
        assert after == position or first == count
    assert plan.roles.failures.counts.get("epoch_end", 0) == len(left)
    assert len(data.requested) == len(requests)


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("case", range(12))
def test_a_changed_layout_continues_after_the_last_item(case: int, repeat: bool) -> None:
    rng = np.random.default_rng(case)
    expected: list[list[Any]] = []  # segments
    place = step = 0
    state: Any = None
    seen = Counter[str]()
    for _ in range(6):
        ranks, rows, _ = layout = tuple(int(rng.integers(1, 4)) for _ in range(3))
        plans = [planned(DATA, layout, rank, repeat=repeat) for rank in range(ranks)]
        positions = [plan.begin(0) if state is None else resumed(plan, *[state] * ranks) for plan in plans]
        if not expected or expected[-1][2:4] != [ranks, rows]:
            expected = [one for one in expected if one[1] < place] + [[step, place, ranks, rows, None, 1]]
        assert len({str(position) for position in positions}) == 1
        assert saved(plans[0], positions[0]) == {
            "identity": plans[0].identity(), "epoch": 0, "step": step, "segments": expected
        }  # fmt: skip
        for _ in range(int(rng.integers(3))):
            if place >= ITEMS and not repeat:
                break
            for rank, plan in enumerate(plans):
                # A worker reads ahead: the step is that of a new plan, as after a restart.
                step_of_rank, positions[rank] = next(read(plan, positions[rank]))
                seen.update(name for name in step_of_rank.batch.ids if name)
            step, place = step + 1, place + ranks * rows
        if not repeat:
            place = min(place, ITEMS)
        state = saved(plans[0], positions[0])
        assert all(saved(plan, position) == state for plan, position in zip(plans, positions, strict=True))
    order = [order_of(turn, 0)[at] for turn, at in (divmod(place, ITEMS) for place in range(place))]
    assert seen == Counter(f"s{number}" for number in order)
    assert place or not seen


def test_a_segment_of_a_restart_at_the_end_has_no_item() -> None:
    first = planned(DATA, (4, 2, 1))  # 3 steps, the last of 7 items
    state = saved(first, first.begin(0)) | {"step": 3}
    assert saved(planned(DATA, (2, 1, 1)), resumed(planned(DATA, (2, 1, 1)), state))["segments"] == [
        [0, 0, 4, 2, None, 1], [3, ITEMS, 2, 1, None, 1]
    ]  # fmt: skip
    endless = planned(DATA, (4, 2, 1), repeat=True)
    state = saved(endless, endless.begin(0)) | {"step": 3}
    now = planned(DATA, (2, 1, 1), repeat=True)
    assert saved(now, resumed(now, state))["segments"] == [[0, 0, 4, 2, None, 1], [3, 24, 2, 1, None, 1]]


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"epoch": True}, {"step": -1}, {"step": "1"}, {"step": 1},
        {"segments": [[0, 1, 2, 1, None, 1]]}, {"segments": [[0, 0, 2, 1, None, 1], [2, -1, 2, 1, None, 1]]},
        {"segments": [[0, 0, 0, 1, None, 1]]}, {"segments": [[0, 0, 2, 0, None, 1]]},
        {"segments": [[0, 0, -1, 1, None, 1]]},
    ],
)  # fmt: skip
def test_a_position_that_no_loader_has_is_refused(change: dict[str, Any]) -> None:
    plan = planned(DATA, (2, 1, 1))
    state = {
        "identity": plan.identity(),
        "epoch": 0,
        "step": 2,
        "segments": [[0, 0, 1, 1, None, 1], [2, 2, 2, 1, None, 1]],
    }
    assert resumed(plan, state).step == 2
    with pytest.raises(BatchError, match=r"^The saved state is corrupted \("):
        resumed(plan, state | change)


def test_other_data_or_weights_are_refused() -> None:
    plan = planned(DATA, (2, 1, 1))
    state = saved(plan, plan.begin(0))
    assert plan.identity() == {
        f"distributor_{name}": value for name, value in plan.roles.distributor.identity().items()
    }
    with pytest.raises(BatchError, match="distributor_items 22 saved, 23 now"):
        resumed(plan, state | {"identity": state["identity"] | {"distributor_items": 22}})
    weights = {"distributor_blend_weights": [1, 2]}
    for allow in (True, False):
        try:
            plan.from_plain(
                [state | {"identity": weights}], {"distributor_blend_weights": [2, 1]}, allow_changed_weights=allow
            )
        except BatchError as error:
            assert not allow
            assert "weights 1:2 saved, 2:1 now" in str(error)
        else:
            assert allow


@pytest.mark.parametrize(("ranks", "rest"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_items_that_do_not_fill_the_last_step_are_reported(
    ranks: int, rest: int, caplog: pytest.LogCaptureFixture
) -> None:
    def position(plan: Any) -> Any:
        return resumed(plan, saved(plan, plan.begin(0)) | {"step": 1})

    for end, warns, repeat in [(e, w, r) for e in ("repeat", "drop", "error") for w in (0, 1) for r in (0, 1)]:
        plan = planned(DATA, (ranks, 1, 1), end=end, repeat=bool(repeat))
        caplog.clear()
        if end == "error" and rest and not repeat:
            with pytest.raises(ConfigError, match=f"got {rest} of 23 packs in the last step"):
                plan.check_rest(position(plan), warns=bool(warns))
        else:
            plan.check_rest(position(plan), warns=bool(warns))
        warned = f"leaves out {rest} of 23 packs" in caplog.text
        assert warned == bool(caplog.text) == (end == "drop" and bool(warns and rest) and not repeat)
    changed = planned(DATA, (ranks, 1, 1), end="error")  # the layout of the end of the epoch counts
    state = saved(changed, changed.begin(0)) | {"step": 3, "segments": [[0, 0, 1, 1, None, 1]]}
    if left := 20 % ranks:
        with pytest.raises(ConfigError, match=f"got {left} of 23 packs in the last step"):
            changed.check_rest(resumed(changed, state), warns=False)
    else:
        changed.check_rest(resumed(changed, state), warns=False)


# --- streams -------------------------------------------------------------------------------------------------------


def stream(
    layout: tuple[int, int] = (1, 1), rank: int = 0, packer: Any = None, end: str = "repeat", data: Any = DATA
) -> Any:
    """Steps of a layout: ranks, workers. `data` may be a distributor."""
    distributor = data if hasattr(data, "can_seek") else IterableDistributor(data)
    ranks, workers = layout
    roles = parts(distributor, packer or SimpleBatcher(2), end)
    return StreamSteps(roles, LoaderLayout(rank, ranks, workers, roles.packer.rows), 4)


def rows_of(shard: int, num_shards: int, rows: int, end: str, order: Sequence[int] = range(ITEMS)) -> list[list[str]]:
    names = [f"s{number}" for number in order[shard::num_shards]]
    found = [names[first : first + rows] for first in range(0, len(names), rows)]
    return [row for row in found if end == "repeat" or len(row) == rows]


@pytest.mark.parametrize("case", range(24))
def test_a_worker_reads_its_shards_and_continues_at_every_step(case: int) -> None:
    rng = np.random.default_rng(case)
    ranks, workers, rows, num_shards = (int(rng.integers(1, most)) for most in (4, 4, 4, 9))
    end = "drop" if case % 4 == 1 else "repeat"
    layout = ranks, workers = 1 if end == "drop" else ranks, workers
    rank, first, count = int(rng.integers(ranks)), int(rng.integers(workers)), ranks * workers

    def new() -> Any:
        return stream(layout, rank, SimpleBatcher(rows), end, MapDistributor(DATA))

    plan = new()
    start = plan.begin(2)
    assert (start.epoch, start.step, *start.parts) == (2, 0, count, 0, (), False, None)
    assert plan.place == (rank, ranks)
    start = resumed(plan, saved(plan, start) | {"next_worker": first, "num_shards": num_shards})
    expected: list[Any] = []
    waiting = deque(
        deque(
            [(worker, shard, row) for shard in range(rank * workers + worker, num_shards, count)
             for row in [*rows_of(shard, num_shards, rows, end, order_of(2, 4)), None]] + [(worker, None, None)]
        )
        for worker in ((turn + first) % workers for turn in range(workers))
    )  # fmt: skip
    while waiting:
        expected.append(waiting[0].popleft())
        if waiting[0]:
            waiting.append(waiting[0])
        waiting.popleft()
    steps, positions, shards = [], [start], dict[int, Any]()
    for step, position in read(plan, start):
        shard = step.state and step.state[0]
        steps.append((step.worker, shard, step.batch and step.batch.ids))
        assert step.ended == (shard is None)
        assert len(step.items) == len(steps[-1][2] or ())
        assert end == "drop" or not len(step.dropped)
        shards |= dict([step.state]) if step.state else {}
        assert (position.epoch, position.parts.num_shards, position.parts.mark) == (2, num_shards, None)
        assert position.step == sum(row is not None for *_, row in steps)
        assert position.parts.next_worker == (step.worker + 1) % workers
        assert len(position.parts.states) == len(shards)
        assert dict(position.parts.states) == shards
        positions.append(position)
    assert steps == expected
    for n in rng.permutation(len(positions))[:6]:
        position = positions[n]
        left = [(shard, row) for _, shard, row in expected[n:] if row is not None]
        ended = {shard for shard, text in position.parts.states if json.loads(text)["ended"]}
        assert {shard for _, shard, row in expected[:n] if shard is not None and row is None} <= ended
        assert not ended & {shard for shard, _ in left}
        again = new()
        state = saved(plan, position)
        if any(position.parts.states) or num_shards != count or not position.step:
            following = resumed(again, state)
            assert saved(again, following) == state
            assert [
                (step.state[0], step.batch.ids) for step, _ in read(again, following) if step.batch is not None
            ] == left


PACKERS = {"simple": lambda: SimpleBatcher(3), "pool": lambda: PoolPacker(32, pool_size=7)}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("case", range(16))
def test_changed_ranks_and_workers_finish_the_shards(case: int, packer: str) -> None:
    rng = np.random.default_rng(case)
    states: list[Any] = []
    shards: dict[int, Any] = {}
    seen, num_shards, before, most = Counter[str](), 0, (0, 0), 0
    for change in range(7):
        ranks, workers = layout = tuple(int(rng.integers(1, 4)) for _ in range(2))
        count = ranks * workers
        plans = [stream(layout, rank, PACKERS[packer]()) for rank in range(ranks)]
        positions = [resumed(plan, *states) if states else plan.begin(0) for plan in plans]
        is_new = not shards
        num_shards = count if is_new else num_shards
        for rank, (plan, position) in enumerate(zip(plans, positions, strict=True)):
            own = {n: state for n, state in shards.items() if n % count // workers == rank}
            if before == layout:
                kept = {n: state for n, state in shards.items() if n in dict(states[rank]["shards"])}
                assert saved(plan, position) == states[rank]
                assert states[rank]["shards"] == [[n, kept[n]] for n in sorted(kept)]
                continue
            assert (position.epoch, position.step, position.parts.num_shards) == (0, most, num_shards)
            assert position.parts.next_worker == 0
            assert sorted((n, json.loads(text)) for n, text in position.parts.states) == sorted(own.items())
        before, states = layout, []
        for rank, (plan, position) in enumerate(zip(plans, positions, strict=True)):
            if position.epoch:  # finished before, and the same ranks and workers
                states.append(saved(plan, position))
                continue
            steps = read(plan, position)
            for _ in range(int(rng.integers(5)) if change < 6 else 1000):
                found = next(steps, None)
                if found is None:  # the rank is at the start of the next epoch
                    position = plan.begin(1)
                    mine = range(rank * workers, (rank + 1) * workers)
                    shards |= {n: {"ended": True} for n in range(num_shards) if n % count in mine}
                    break
                step, position = found
                seen.update(step.batch.ids if step.batch else ())
                if step.state is not None:
                    shards[step.state[0]] = json.loads(step.state[1])
            states.append(saved(plan, position))
        most = max(state["step"] for state in states)
        if all(state["epoch"] for state in states):
            break
    assert seen == Counter(f"s{number}" for number in range(ITEMS))
    new = [stream((3, 2), rank, PACKERS[packer]()) for rank in range(3)]
    assert [saved(plan, resumed(plan, *states)) for plan in new] == [saved(plan, plan.begin(1)) for plan in new]


def started(layout: tuple[int, int], steps: int = 1, **options: Any) -> list[Any]:
    """The states of all ranks after so many steps of each."""
    states = []
    for rank in range(layout[0]):
        plan = stream(layout, rank, **options)
        positions = [position for _, (_, position) in zip(range(steps), read(plan, plan.begin(0)), strict=False)]
        states.append(saved(plan, positions[-1] if positions else plan.begin(0)))
    return states


def test_the_state_of_another_rank_or_of_some_ranks_is_refused() -> None:
    two = started((2, 1))
    for rank in range(2):
        assert resumed(stream((2, 1), rank), two[rank]) == resumed(stream((2, 1), rank), *two)
        with pytest.raises(BatchError, match=f"must be of rank {rank}, got rank {1 - rank}"):
            resumed(stream((2, 1), rank), two[1 - rank])
        with pytest.raises(BatchError, match=rf"only rank {rank} of 2, .*\(2 ranks x 1 workers saved, 3 x 2 now\)"):
            resumed(stream((3, 2)), two[rank])
    with pytest.raises(BatchError, match="only rank 0 of 2"):  # before the first step, too
        resumed(stream((3, 2)), started((2, 1), 0)[0])


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 1}, {"epoch": 2, "shards": []}, {"num_shards": 3},
        {"epoch": 1, "step": 3, "shards": [], "num_shards": 1},
    ],
)  # fmt: skip
def test_ranks_in_different_epochs_cannot_change(change: dict[str, Any]) -> None:
    first, second = started((2, 1))
    second |= {"step": 0} | change
    with pytest.raises(
        BatchError, match=r"the ranks are in different epochs, .*\(2 ranks x 1 workers saved, 3 x 2 no"
    ):
        resumed(stream((3, 2)), first, second)


def test_weights_that_changed_in_the_epoch_cannot_change_ranks() -> None:
    first, second = started((2, 1))
    for schedule in ({}, {"learner": {}}, {"learner": {"updates": 0}}):
        assert resumed(stream((3, 2)), first, second | {"schedule": schedule}).parts.num_shards == 2
    changed = {"schedule": {"learner": {"updates": 1}}}
    for states in ((first, second | changed), (first | changed, second)):
        with pytest.raises(BatchError, match=r"changed during this epoch, .*\(2 ranks x 1 workers saved, 3 x 2 now\)"):
            resumed(stream((3, 2)), *states)


def test_an_iterator_and_a_stream_without_end_limit_the_workers() -> None:
    for steps in (0, 1):
        states = (
            started((1, 2), steps, data=IterableDistributor(iter(DATA))) if not steps else started((1, 2), data=DATA)
        )
        plan = stream((2, 1), data=IterableDistributor(iter(DATA)))
        if not steps:
            assert resumed(plan, *states).parts.num_shards == 2
        else:
            with pytest.raises(BatchError, match=r"one-shot iterator .*\(1 ranks x 2 workers saved, 2 x 1 now\)"):
                resumed(plan, *states)

    def endless() -> Any:
        return MixtureDistributor([MapDistributor(DATA)], [1], repeat=True)

    for steps, layout in ((0, (3, 1)), (1, (2, 1)), (1, (1, 1)), (1, (3, 1))):
        states = started((1, 2), steps, data=endless())
        plan = stream(layout, data=endless())
        if layout == (3, 1) and steps:
            with pytest.raises(BatchError, match=r"at most as many workers, got 3 \(1 ranks x 2 workers saved, 3 x 1"):
                resumed(plan, *states)
        else:
            assert resumed(plan, *states).parts.num_shards == (3 if layout == (3, 1) else 2)


def test_a_packer_out_of_order_over_an_iterator_is_refused_when_the_state_is_saved() -> None:
    plan = stream(packer=PoolPacker(32, pool_size=7), data=iter(DATA))
    positions = [position for _, position in read(plan, plan.begin(0))]
    with pytest.raises(BatchError, match="PoolPacker buffers samples out of order"):
        plan.to_plain(positions[0])


@pytest.mark.parametrize(
    "change",
    [
        {name: value}
        for name in ("rank", "world_size", "epoch", "step", "num_workers", "next_worker", "num_shards")
        for value in (-1, True, "1")
    ]
    + [{"next_worker": 2}, {"twice": 0}, {"number": 2}, {"number": -1}, {"shards": []}],
)  # fmt: skip
def test_a_position_in_shards_that_no_loader_has_is_refused(change: dict[str, Any]) -> None:
    (state,) = started((1, 2), 2)
    assert resumed(stream((1, 2)), state).parts.next_worker == 0
    assert resumed(stream((1, 2)), state | {"next_worker": 1}).parts.next_worker == 1
    assert resumed(stream((1, 2)), state | {"shards": [], "num_shards": 1}).step == 2
    assert resumed(stream((1, 2)), state | {"shards": [], "step": 0}).parts.states == ()
    shards = [list(shard) for shard in state["shards"]]
    if "twice" in change:
        change = {"shards": [*shards, shards[0]]}
    if "number" in change:
        change = {"shards": [shards[0], [change["number"], shards[1][1]]]}
    with pytest.raises(BatchError, match=r"^The saved state is corrupted \("):
        resumed(stream((1, 2)), state | change)


@pytest.mark.parametrize("layout", [(1, 1), (1, 3), (3, 1), (2, 2), (5, 3)])
@pytest.mark.parametrize("end", ["repeat", "drop"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_steps_of_an_epoch_are_those_of_all_workers(layout: tuple[int, int], end: str, rows: int) -> None:
    ranks, workers = layout
    count = ranks * workers
    steps = [
        sum(len(rows_of(rank * workers + worker, count, rows, end)) for worker in range(workers))
        for rank in range(ranks)
    ]
    for rank in range(ranks):
        plan = stream(layout, rank, SimpleBatcher(rows), data=MapDistributor(DATA))
        assert plan.ranks is None  # without a process group
        plan.roles = plan.roles._replace(epoch_end=end)
        assert plan.length() == steps[rank]
        plan.ranks = True  # with a group, all ranks have the steps of one of them
        assert plan.length() == (min(steps) if end == "drop" else max(steps))
    if ranks > 1 and end == "drop":
        with pytest.raises(ConfigError, match=f"needs packs of a known number, .* got rank 1 of {ranks}"):
            stream(layout, 1, end=end)
        endless = MixtureDistributor([MapDistributor(DATA)], [1], repeat=True)
        assert stream(layout, 1, end=end, data=endless).ranks is None


class Counted(MapDistributor):
    """The number of items follows from the seed, as if files were assigned by it."""

    def count(self, shard: Any) -> int:
        return int(shard.seed + 10 * shard.index)


def test_steps_follow_from_the_seed_of_the_loader() -> None:
    assert stream((1, 2), packer=SimpleBatcher(1), data=Counted(DATA)).length() == 4 + 14


def test_unknown_steps_and_batches_that_are_left_out_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for plan in (stream(), stream(packer=PoolPacker(32), data=MapDistributor(DATA))):
        with pytest.raises(TypeError, match="the number of batches is not known in advance"):
            plan.length()
    for end in ("repeat", "drop"):
        for packer, several in ((SimpleBatcher(1), False), (SimpleBatcher(2), True), (PoolPacker(32), False)):
            for warns in (False, True):
                caplog.clear()
                plan = stream(packer=packer, end=end)
                plan.check_rest(plan.begin(0), warns=warns)
                assert ("leaves out the last items" in caplog.text) == (end == "drop" and several and warns)


def test_a_state_of_other_data_settings_or_weights_is_refused() -> None:
    (state,) = started((1, 1))
    packer = SimpleBatcher(2).identity()
    assert state["identity"] == {"distributor_distributor": "IterableDistributor"} | {
        f"packer_{name}": value for name, value in packer.items()
    }
    with pytest.raises(BatchError, match="does not match this loader: packer_"):
        resumed(stream(packer=SimpleBatcher(3)), state)
    with pytest.raises(BatchError, match="does not match this loader: packer_"):
        resumed(stream((2, 1)), state, state | {"identity": state["identity"] | {"packer_packer": "Other"}})


def test_the_weights_of_a_mixture_continue_or_are_replaced() -> None:
    def mixture(*weights: int) -> Any:
        return MixtureDistributor([MapDistributor(DATA[:9]), IterableDistributor(DATA[9:])], weights)

    plan = stream(data=mixture(3, 1))
    schedule = plan.roles.distributor.schedule
    assert plan.begin(0).parts.mark.base == [0.75, 0.25]
    schedule.start_epoch()
    position, positions, states = plan.begin(0), [], []
    steps = []
    for step in plan.steps(position, 0):
        schedule.count_step(step.worker)
        position = plan.after(position, step)
        positions.append(position)
        states.append(saved(plan, position))
        steps.append(step.batch and step.batch.ids)
    assert states[2]["schedule"]["handed"] == [[0, 3]]
    assert saved(plan, positions[2]) == states[2]
    assert list(states[2])[-1] == "schedule"
    same = stream(data=mixture(3, 1))
    following = resumed(same, states[2])
    assert (following.parts.mark.handed, following.parts.mark.base) == ({0: 3}, [0.75, 0.25])
    assert "schedule" in json.loads(following.parts.states[0][1])
    assert saved(same, following) == states[2]
    same.roles.distributor.schedule.start_epoch()
    assert [step.batch and step.batch.ids for step in same.steps(following, 0)] == steps[3:]
    other = stream(data=mixture(1, 1))
    with pytest.raises(BatchError, match="weights 3:1 saved, 1:1 now"):
        resumed(other, states[2])
    changed = resumed(other, states[2], allow=True)
    assert (changed.parts.mark.handed, changed.parts.mark.base) == ({}, [0.5, 0.5])
    ((_, inner),) = states[2]["shards"]
    assert [(n, json.loads(text)) for n, text in changed.parts.states] == [
        (0, {name: value for name, value in inner.items() if name != "schedule"})
    ]
    del states[2]["schedule"]
    assert resumed(stream(data=mixture(3, 1)), states[2]).parts.mark.handed == {}
