"""The global order of an epoch: the same for any number of workers, exact for any number of ranks, at every step."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packed import (
    BatchError,
    ConfigError,
    CostModel,
    DataflowConfig,
    DataflowLoader,
    JointLoader,
    MapDistributor,
    PackedDataset,
    RowSizes,
    gather_state,
    plan_in_memory,
)
from tests.loading.flows import energon_folder, feature

ITEMS = 23


class Costly(list[Any]):
    """Items of very different costs."""

    def row_sizes(self) -> RowSizes:
        tokens = np.arange(len(self)) ** 2 + 1
        none = np.zeros_like(tokens)
        return RowSizes(tokens=tokens, squares=tokens**2, patches=none, patch_squares=none)


DATA = Costly(feature(number % 13, number - number % 13) for number in range(ITEMS))
ORDERS: dict[str, Callable[[], MapDistributor]] = {
    "shuffled": lambda: MapDistributor(DATA),
    "in order": lambda: MapDistributor(DATA, shuffle=False),
    "aligned": lambda: MapDistributor(DATA, balance="attention"),
    "accumulated": lambda: MapDistributor(DATA, balance="attention", accumulation=3),
}


def new_loader(order: str, rank: int, world_size: int, **options: Any) -> DataflowLoader:
    return DataflowLoader(ORDERS[order](), rank=rank, world_size=world_size, seed=3, **options)


def epoch_of(order: str, world_size: int, state: Any = None, stop: int | None = None, **options: Any) -> Any:
    """(ids of each rank at each step, the state behind the last step)."""
    steps, states = [], []
    for rank in range(world_size):
        loader = new_loader(order, rank, world_size, **options)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        steps.append([batch.ids for batch in itertools.islice(loader.rest_of_epoch(), stop)])
        states.append(loader.state_dict())
    return steps, states[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_order_does_not_depend_on_the_number_of_workers(order: str, world_size: int) -> None:
    expected = epoch_of(order, world_size, batch_size=2)[0]
    for num_workers in (1, 2):
        assert epoch_of(order, world_size, batch_size=2, num_workers=num_workers)[0] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_any_number_of_ranks_and_rows_continues_at_every_step(order: str) -> None:
    """No item is lost and none comes twice, over two changes; the state is the same on all ranks."""
    everything = sorted(one["id"] for one in DATA)
    for first, second in itertools.product(range(5), (0, 1, 3)):
        seen: list[str] = []
        state = None
        for world_size, rows, stop in ((2, 2, first), (3, 1, second), (1, 3, None)):
            steps, after = epoch_of(order, world_size, state, stop, batch_size=rows)
            if stop is not None:
                loaders = [new_loader(order, rank, world_size, batch_size=rows) for rank in range(world_size)]
                for loader in loaders:
                    if state is not None:
                        loader.load_state_dict(state)
                    list(itertools.islice(loader.rest_of_epoch(), stop))
                assert all(loader.state_dict() == after for loader in loaders)
            seen += [name for of_rank in steps for batch in of_rank for name in batch if name is not None]
            state = after
        assert sorted(seen) == everything, f"after {first} and {second} steps"


def test_a_state_without_communication_is_that_of_all_ranks() -> None:
    loader = new_loader("shuffled", 1, 2)
    next(iter(loader))
    state = loader.state_dict()
    assert gather_state(loader) == state
    assert "rank" not in state
    assert (state["epoch"], state["step"]) == (0, 1)


def test_shuffled_items_keep_their_order_whatever_the_ranks() -> None:
    """The items of step after step, over all ranks, are one sequence."""

    def sequence(world_size: int, rows: int) -> list[str]:
        steps = epoch_of("shuffled", world_size, batch_size=rows)[0]
        whole = []
        for of_ranks in itertools.zip_longest(*steps, fillvalue=[]):
            for row in range(rows):
                whole += [batch[row] for batch in of_ranks if row < len(batch) and batch[row] is not None]
        return whole

    assert len({tuple(sequence(*layout)) for layout in [(1, 1), (2, 1), (3, 2), (1, 5), (4, 3)]}) == 1


@given(
    items=st.integers(1, 60),
    layouts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=4),
    accumulation=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_segments_are_a_partition(
    items: int, layouts: list[tuple[int, int, int]], accumulation: int, seed: int
) -> None:
    data = Costly({"id": str(n), "input_ids": [n, n]} for n in range(items))
    distributor = (
        MapDistributor(data, balance="attention", accumulation=accumulation) if accumulation else MapDistributor(data)
    )
    state, seen = None, []
    for number, (world_size, rows, steps) in enumerate(layouts):
        last = number == len(layouts) - 1
        after = []
        for rank in range(world_size):
            loader = DataflowLoader(distributor, batch_size=rows, rank=rank, world_size=world_size, seed=seed)
            if state is not None:
                loader.load_state_dict(state)
            rest = loader.rest_of_epoch() if loader.epoch == 0 else ()  # others may have one more step
            for batch in itertools.islice(rest, None if last else steps):
                seen += [name for name in batch.ids if name is not None]
            after.append(loader.state_dict())
        state = {"ranks": after}
        if {one["epoch"] for one in after} == {1}:
            break
    assert sorted(map(int, seen)) == list(range(items))


def test_repeated_epochs_give_every_rank_an_item_at_every_step() -> None:
    """23 items on 3 ranks of 2 rows: steps run over the ends of epochs, and ranks never differ in length."""
    steps: list[list[Any]] = []
    for rank in range(3):
        loader = DataflowLoader(MapDistributor(DATA, repeat=True), batch_size=2, rank=rank, world_size=3, seed=3)
        steps.append([batch.ids for batch in itertools.islice(loader, 30)])
    assert {len(batch) for of_rank in steps for batch in of_rank} == {2}
    flat = [
        name
        for of_ranks in zip(*steps, strict=True)
        for row in range(2)
        for name in (batch[row] for batch in of_ranks)
    ]
    for epoch in range(len(flat) // ITEMS):
        assert sorted(flat[epoch * ITEMS : (epoch + 1) * ITEMS]) == sorted(one["id"] for one in DATA), epoch
    assert flat[:ITEMS] == [name for batch in epoch_of("shuffled", 1)[0][0] for name in batch]
    with pytest.raises(TypeError, match="the data repeats, count steps"):
        len(loader)
    with pytest.raises(ConfigError, match="`repeat` needs at least 1 item"):
        MapDistributor([], repeat=True)


@pytest.mark.parametrize("balance", [None, "attention", "tokens"])
def test_a_repeated_order_continues_with_other_ranks(balance: Any) -> None:
    def loader_of(rank: int, world_size: int, rows: int, **options: Any) -> DataflowLoader:
        # With another number of ranks, Megatron accumulates another number of steps.
        order = MapDistributor(DATA, repeat=True, balance=balance, accumulation=world_size if balance else 1)
        return DataflowLoader(order, batch_size=rows, rank=rank, world_size=world_size, seed=1, **options)

    for stop in range(0, 20, 3):
        seen: list[str] = []
        state: Any = None
        for world_size, rows, steps in ((2, 2, stop), (3, 1, 5), (1, 3, 7)):
            after = []
            for rank in range(world_size):
                loader = loader_of(rank, world_size, rows, num_workers=rank if stop == 6 else 0)
                if state is not None:
                    loader.load_state_dict(state)
                seen += [name for batch in itertools.islice(loader, steps) for name in batch.ids]
                after.append(loader.state_dict())
            assert all(one == after[0] for one in after)
            state = after[0]
        used = 4 * stop + 15 + 21
        assert len(seen) == used
        counts = {name: seen.count(name) for name in {one["id"] for one in DATA}}
        assert set(counts.values()) <= {used // ITEMS, used // ITEMS + 1}


def test_aligned_steps_of_repeated_epochs_cost_the_same() -> None:
    cost = CostModel(token=1.0, square=0.0, patch=0.0)

    def waits(balance: Any) -> float:
        of_ranks = []
        for rank in range(4):
            order = MapDistributor(DATA, repeat=True, balance=cost if balance else None)
            loader = DataflowLoader(order, rank=rank, world_size=4, seed=1)
            names = [int(batch.ids[0][1:]) for batch in itertools.islice(loader, 40)]
            of_ranks.append([number**2 + 1 for number in names])
        steps = list(zip(*of_ranks, strict=True))
        return sum(map(max, steps)) / sum(sum(step) / 4 for step in steps)

    assert waits("attention") < 1.5 < waits(None)


@pytest.mark.parametrize("repeat", [False, True])
def test_accumulated_steps_cost_the_same_on_all_ranks(repeat: bool) -> None:
    """508 items: every group of 3 steps is aligned, over the ends of epochs, too, and so is each step of it."""
    tokens = np.random.default_rng(0).integers(100, 1000, 508)
    data = Costly(range(508))
    data.row_sizes = lambda: RowSizes(  # type: ignore[method-assign]
        tokens=tokens, squares=tokens * 0, patches=tokens * 0, patch_squares=tokens * 0
    )

    def costs(accumulation: int, balance: Any = "tokens") -> np.ndarray:
        order = MapDistributor(data, balance=balance, accumulation=accumulation, repeat=repeat).order
        segment = order.segment(4, 2)
        places = [order.places(segment, step, rank) for step in range(186 if repeat else 60) for rank in range(4)]
        numbers = [order.numbers(range_, 0, 7, [segment]) for range_ in places]
        if repeat:
            seen = np.bincount([n for of_step in numbers for n in of_step], minlength=508)
            assert seen.min() >= 1488 // 508
            assert seen.max() <= -(-1488 // 508)
        return np.array([tokens[of_step].sum() for of_step in numbers]).reshape(-1, 4)

    def waits(of_ranks: np.ndarray, accumulation: int) -> float:
        sums = of_ranks.reshape(-1, accumulation, 4).sum(axis=1)
        return float(np.median(sums.max(axis=1) / sums.mean(axis=1)))  # a step at the end of an epoch is an exception

    aligned = costs(3)
    assert waits(aligned, 3) - 1 < (waits(costs(1), 3) - 1) * 0.7
    assert waits(aligned, 3) < 1.002 < 1.1 < waits(costs(1, None), 3)
    assert waits(aligned, 1) < 1.01
    of_steps = aligned.max(axis=1) / aligned.mean(axis=1)
    assert (of_steps > 1.1).sum() <= 2  # of items of two epochs, and of the last 8 items of an epoch
    with pytest.raises(ConfigError, match="`accumulation` must be at least 1, got 0"):
        MapDistributor(data, accumulation=0)


def test_another_cost_model_is_refused_and_another_accumulation_continues() -> None:
    loader = DataflowLoader(MapDistributor(DATA, balance=CostModel(square=0.5), accumulation=2), rank=0, world_size=2)
    next(iter(loader))
    state = loader.state_dict()
    assert state["segments"] == [[0, 0, 2, 1, None, 2]]
    other = DataflowLoader(MapDistributor(DATA, balance=CostModel(square=0.25)), rank=0, world_size=2)
    with pytest.raises(BatchError, match="distributor_balance .*'square': 0.5.* saved, .*'square': 0.25.* now"):
        other.load_state_dict(state)
    resumed = DataflowLoader(MapDistributor(DATA, balance=CostModel(square=0.5)), rank=0, world_size=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["segments"] == [[0, 0, 2, 1, None, 2], [1, 2, 2, 1, None, 1]]
    assert len(list(resumed.rest_of_epoch())) == 11


def test_planned_and_packed_datasets_and_joint_loaders_have_this_order(
    tmp_path: Path, tokenizer_dir: Path, demo: Any
) -> None:
    config = DataflowConfig(dataset_path=str(demo.jsonl), packing_length=1024, processor_config=str(tokenizer_dir))
    planned = plan_in_memory(config)
    packed = PackedDataset(energon_folder(tmp_path))

    def joint(rank: int, world_size: int, **options: Any) -> JointLoader:
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, **options}
        loaders = {
            "planned": DataflowLoader(MapDistributor(planned), **place),
            "packed": DataflowLoader(MapDistributor(packed), **place),
        }
        return JointLoader(loaders, {"planned": 1, "packed": 1}, stop="all")

    ranks = [joint(rank, 2) for rank in range(2)]
    seen = [(name, one) for loader in ranks for name, batch in itertools.islice(loader, 9) for one in batch.ids]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert all(loader.state_dict() == state for loader in ranks)
    for rank in range(3):
        loader = joint(rank, 3, num_workers=rank % 2)
        loader.load_state_dict(state)
        for name, part in loader.loaders.items():
            seen += [(name, one) for batch in part.rest_of_epoch() for one in batch.ids if one is not None]
    assert len(seen) == len(set(seen))
    assert {one for name, one in seen if name == "packed"} == {f"s{number}" for number in range(13)}
    assert len(seen) - 13 == sum(len(planned.ids(row)) for row in range(len(planned)))


def test_a_damaged_or_foreign_state_of_an_order_is_one_line() -> None:
    loader = new_loader("shuffled", 0, 1)
    next(iter(loader))
    state = loader.state_dict()
    for change in ({"segments": []}, {"segments": [[0, 5, 1, 1, None, 1]]}, {"step": -1}, {"epoch": None}):
        with pytest.raises(BatchError, match="The saved state is corrupted"):
            new_loader("shuffled", 0, 1).load_state_dict(state | change)
    with pytest.raises(BatchError, match="distributor_items 23 saved, 5 now"):
        DataflowLoader(MapDistributor(DATA[:5]), seed=3).load_state_dict(state)
