"""States of loaders: what they contain, what continues from them, and the line that refuses the others."""

import copy
import json
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_packed import (
    BatchError,
    ConfigError,
    DataflowLoader,
    IterableDistributor,
    JointLoader,
    MapDistributor,
    MixtureDistributor,
    gather_state,
    get_packed_loader,
)
from tests.internals import ratio
from tests.loading.flows import FEATURES, energon_folder, feature

Loader = Callable[..., Any]


def planned(**options: Any) -> DataflowLoader:
    return DataflowLoader(MapDistributor(FEATURES), **options)


def stream(**options: Any) -> DataflowLoader:
    return DataflowLoader(IterableDistributor(FEATURES), batch_size=2, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return energon_folder(tmp_path_factory.mktemp("states"))


def after(loader: Any, steps: int) -> Any:
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    return json.loads(json.dumps(loader.state_dict()))


def ids(batches: Any) -> list[Any]:
    return [batch.ids for batch in batches]


@pytest.mark.parametrize("new", [planned, stream])
def test_a_state_has_the_rank_if_other_ranks_have_another_state(new: Loader) -> None:
    state = after(new(rank=1, world_size=3), 1)
    assert (state["version"], state["loader"]) == (1, "DataflowLoader")
    assert (state.get("rank"), state.get("world_size")) == ((None, None) if new is planned else (1, 3))
    gathered = gather_state(new(rank=1, world_size=3))
    assert list(gathered) == (list(state) if new is planned else ["version", "loader", "ranks"])
    loader = new(rank=0, world_size=1)
    expected = ids(new(rank=0, world_size=1))
    for step in range(3):
        resumed = new(rank=0, world_size=1)
        resumed.load_state_dict(gather_state(loader))
        assert ids(resumed) == expected[step:]
        next(iter(loader))


class Counter:
    """A loader of a third party: it has a state, and no position."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Iterator[int]:
        while self.step < 9:
            self.step += 1
            yield self.step

    def state_dict(self) -> dict[str, int]:
        return {"at": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["at"]


def test_the_state_of_an_earlier_position_is_the_state_of_that_time() -> None:
    def new() -> JointLoader:
        return JointLoader({"own": planned(), "other": Counter()}, {"own": 1, "other": 1}, seed=1)

    loader = new()
    saved = []
    for _, (name, batch) in zip(range(9), loader, strict=False):
        saved.append((loader.position(), loader.state_dict(), name, batch))
    assert {name for *_, name, _ in saved} == {"own", "other"}
    for position, state, *_ in saved:
        assert loader.state_dict(position) == state
    resumed = new()
    resumed.load_state_dict(saved[3][1])
    for (*_, name, batch), (other, value) in zip(saved[4:], resumed, strict=False):
        assert (name, getattr(batch, "ids", batch)) == (other, getattr(value, "ids", value))


def test_gathered_states_are_taken_by_rank() -> None:
    """In any order, also of several processes of a rank; a missing rank is named."""
    states = [after(stream(rank=rank, world_size=3), 1) for rank in range(3)]
    seen = {name for rank in range(3) for name in next(iter(stream(rank=rank, world_size=3))).ids}
    rest = {one["id"] for one in FEATURES} - seen
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 2, 0, 2]):
        one = stream(rank=0, world_size=1)
        one.load_state_dict({"ranks": [states[rank] for rank in order]})
        assert sorted(name for batch in one.rest_of_epoch() for name in batch.ids) == sorted(rest)
    for order, got in (([0, 2], "0, 2"), ([1, 2], "1, 2"), ([1], "1"), ([0], "0")):
        with pytest.raises(
            BatchError, match=f"the states of all 3 ranks, got ranks {got}. Call gather_state on every"
        ):
            stream().load_state_dict({"ranks": [states[rank] for rank in order]})
    for empty in ([], [None, 5]):
        with pytest.raises(BatchError, match="the states of all 0 ranks, got ranks none"):
            stream().load_state_dict({"ranks": empty})


def test_gathered_states_without_a_rank_are_equal() -> None:
    state = after(planned(rank=0, world_size=2), 2)
    for ranks in ([state], [state, state]):
        for rank in range(2):
            loader, other = planned(rank=rank, world_size=2), planned(rank=rank, world_size=2)
            loader.load_state_dict({"ranks": ranks})
            assert ids(loader) == ids(other)[2:]


@pytest.mark.parametrize("name", ["rank", "world_size", "epoch", "step", "num_workers", "next_worker", "num_shards"])
@pytest.mark.parametrize("value", [-1, True, "1", 1.0, None])
def test_numbers_of_a_state_are_integers_from_0(name: str, value: object) -> None:
    state = after(stream(), 1)
    with pytest.raises(BatchError, match=r"^The saved state is corrupted \(.*\). Load an earlier one, or restart the"):
        stream().load_state_dict(copy.deepcopy(state) | {name: value})


@pytest.mark.parametrize("loader", [planned, lambda: JointLoader({"a": planned()}, {"a": 1})])
def test_what_is_no_state_is_named(loader: Loader) -> None:
    for value, got in (({"model": 1, "step": 2}, "model, step"), (None, "NoneType"), ([1], "list"), ({}, "")):
        with pytest.raises(BatchError, match=rf"no `version` key, got {got}\). Pass a saved state_dict\(\)"):
            loader().load_state_dict(value)
    with pytest.raises(BatchError) as raised:
        loader().load_state_dict(dict.fromkeys(map(str, range(10_000))))
    assert 200 < len(str(raised.value)) < 300
    state = loader().state_dict()
    with pytest.raises(BatchError, match="version 5 is not supported"):
        loader().load_state_dict(state | {"version": 5})
    with pytest.raises(
        BatchError, match=f"saved by Other, but this loader is a {state['loader']}. Load it with a Oth"
    ):
        loader().load_state_dict(state | {"loader": "Other"})
    del state["loader"]
    with pytest.raises(BatchError, match="saved by None"):
        loader().load_state_dict(state)


def test_a_damaged_state_of_any_shape_is_one_line() -> None:
    """Errors of every kind that reading a wrong value raises; errors of other kinds are not of the state."""
    state = after(planned(), 1)
    for change in ({"segments": 5}, {"segments": [[1]]}, {"segments": []}, {"identity": 5}, {"segments": ["abcdef"]}):
        with pytest.raises(BatchError, match=r"^The saved state is corrupted \(.*\). Load an earlier one") as raised:
            planned().load_state_dict(copy.deepcopy(state) | change)
        assert "\n" not in str(raised.value)
    with pytest.raises(BatchError, match=r"corrupted \(KeyError: 'segments'\)"):
        planned().load_state_dict({name: value for name, value in state.items() if name != "segments"})


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"seed": 5}, r"^The saved state does not match this loader: seed 5 saved, 0 now. Restore it with the same"),
        (
            {"distributor_dataset": "x"},
            r"^The dataset changed since the state was saved \(distributor_dataset x saved, .* now\). Restore",
        ),
        ({"distributor_dataset": "x", "seed": 5}, r"does not match this loader: seed 5 saved, 0 now. Restore it"),
        ({"seed": 5, "distributor_split": "val"}, r"seed 5 saved, 0 now; distributor_split val saved, train now. Re"),
    ],
)
def test_what_differs_of_an_energon_loader_is_named(folder: Path, saved: dict[str, Any], message: str) -> None:
    """The dataset alone is another dataset; its fingerprint contains the settings, and is left out beside them."""
    loader = get_packed_loader(folder, epochs=1, num_workers=0)
    state = after(loader, 1)
    with pytest.raises(BatchError, match=message) as raised:
        loader.load_state_dict(state | {"identity": state["identity"] | saved})
    assert ("dataset x" in str(raised.value)) == (set(saved) == {"distributor_dataset"})


def test_another_number_of_ranks_of_an_energon_loader_is_redistributed(folder: Path) -> None:
    state = after(get_packed_loader(folder, epochs=1, num_workers=0, rank=1, world_size=2), 1)
    with pytest.raises(
        BatchError,
        match=r"only rank 1 of 2, .*Load the result of gather_state\(loader\), or run `energon-packed state",
    ):
        get_packed_loader(folder, epochs=1, num_workers=0, rank=0, world_size=1).load_state_dict(state)


class Data(list[Any]):
    def __init__(self, content: str, items: Any = FEATURES) -> None:
        super().__init__(items)
        self.content = content

    def fingerprint(self) -> str:
        return self.content


@pytest.mark.parametrize("value", [None, "of another library"])
def test_a_dataset_may_have_values_with_the_names_of_methods(value: Any) -> None:
    data: Any = Data("a")
    data.fingerprint = data.set_epoch = data.row_sizes = value
    assert after(DataflowLoader(MapDistributor(data)), 1)["identity"]["distributor_content"] is None
    with pytest.raises(ConfigError, match="`balance` needs the sizes of rows, which Data does not have"):
        list(DataflowLoader(MapDistributor(data, balance="attention")))


def test_what_differs_of_a_dataflow_is_named() -> None:
    def new(content: str, items: int = 13, **options: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(Data(content, FEATURES[:items])), **options)

    state = after(new("a"), 1)
    with pytest.raises(BatchError, match=r"The dataset changed .* \(distributor_content a saved, b now\)"):
        new("b").load_state_dict(state)
    with pytest.raises(
        BatchError, match=r"does not match .*distributor_items 13 saved, 5 now; distributor_content a s"
    ):
        new("b", 5).load_state_dict(state)
    with pytest.raises(BatchError, match=r"does not match this loader: seed 0 saved, 2 now. Restore it with"):
        new("a", seed=2).load_state_dict(state)
    identity = {name: value for name, value in state["identity"].items() if name != "seed"}
    with pytest.raises(BatchError, match="seed None saved, 0 now"):
        new("a").load_state_dict(state | {"identity": identity})
    more = new("a")
    more.load_state_dict(state | {"identity": state["identity"] | {"later": 1}})  # only what this loader has counts
    assert len(list(more)) == 12


def mixture(weights: tuple[float, ...], *, nested: bool = False, seed: int = 0, allow: bool = True) -> DataflowLoader:
    parts: list[Any] = [
        MapDistributor([feature(number, start) for number in range(13)]) for start in range(0, 100 * len(weights), 100)
    ]
    data = MixtureDistributor(parts, weights)
    if nested:
        data = MixtureDistributor([data, MapDistributor([feature(number, 900) for number in range(13)])], [1, 1])
    return DataflowLoader(data, batch_size=2, seed=seed, allow_changed_weights=allow)


def test_other_weights_are_allowed_and_nothing_else() -> None:
    for nested in (False, True):
        state = after(mixture((3, 1), nested=nested), 2)
        mixture((1, 3), nested=nested).load_state_dict(state)
        for other in (mixture((1, 3, 1), nested=nested), mixture((1, 3), nested=nested, seed=1)):
            with pytest.raises(BatchError, match="does not match this loader"):
                other.load_state_dict(state)
    state = after(mixture((3, 1)), 2)
    with pytest.raises(BatchError, match=r"^weights 3:1 saved, 1:3 now. Pass `allow_changed_weights=True`"):
        mixture((1, 3), allow=False).load_state_dict(state)
    with pytest.raises(BatchError, match=r"does not match this loader: seed 0 saved, 1 now; weights 3:1 saved, 1:3 n"):
        mixture((1, 3), seed=1, allow=False).load_state_dict(state)
    with pytest.raises(BatchError, match=r"does not match this loader: distributor_weights \[3.0, 1.0\] saved, \["):
        mixture((1, 3, 1), allow=False).load_state_dict(state)
    state["identity"]["distributor_weights"] = []
    with pytest.raises(BatchError, match=r"does not match this loader: distributor_weights \[\] saved, \[1.0, 3"):
        mixture((1, 3), allow=False).load_state_dict(state)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.sampled_from([1, 3, 0.37]))
def test_weights_are_shown_as_their_smallest_integers(weights: list[int], scale: float) -> None:
    smallest = [weight // gcd(*weights) for weight in weights]
    assert ratio([weight * scale for weight in weights]) == ":".join(map(str, smallest))


def test_weights_with_large_integers_are_shown_as_decimals() -> None:
    assert ratio({"a": 1, "b": 999}) == "1:999"
    assert ratio([weight / 1155 for weight in (1000, 77, 78)]) == "1000:77:78"
    assert ratio([weight / 1155 for weight in (1001, 54, 100)]) == "0.8667:0.04675:0.08658"
    assert ratio([0, 0]) == "0:0"


@pytest.mark.parametrize("new", [planned, stream])
def test_epochs_follow_one_another_from_any_point(new: Loader) -> None:
    """A loop that counts steps, a loop that meets the end, and the rest of an epoch, which may be empty."""
    whole = new()
    epochs = [ids(whole) for _ in range(3)]
    counted = new()
    for expected in epochs:
        batches = iter(counted)
        assert [next(batches).ids for _ in expected] == expected
    assert ids(counted.rest_of_epoch()) == []
    assert counted.epoch == 3
    for steps in (0, 1, len(epochs[0])):
        loader = new()
        batches = iter(loader)
        given_ = [next(batches).ids for _ in range(steps)]
        resumed = new()
        resumed.load_state_dict(loader.state_dict())
        if steps == len(epochs[0]):
            assert ids(resumed) == epochs[1]
        else:
            assert given_ + ids(resumed) == epochs[0]


def test_a_loader_without_a_batch_is_refused_and_not_asked_forever() -> None:
    asked = []

    def none() -> Iterator[Any]:
        asked.append(1)
        return iter(())

    loader = DataflowLoader(IterableDistributor(none))
    assert list(loader) == []
    assert len(asked) == 1


def test_an_iterator_ends_with_its_epoch_and_refuses_another_position() -> None:
    loader = planned()
    first = iter(loader)
    next(first)
    list(loader)
    assert next(first, None) is None
    second = iter(loader)
    next(second)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(BatchError, match=r"load_state_dict\(\) was called while this iterator was active"):
        next(second)
