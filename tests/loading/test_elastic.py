"""Another number of ranks or workers: no item lost, none twice, whatever distributes and packs them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    BatchError,
    DataflowLoader,
    IterableDistributor,
    JointLoader,
    MapDistributor,
    MixtureDistributor,
    PackedDataset,
    Packer,
    PoolPacker,
    SequentialPacker,
    SimpleBatcher,
    gather_state,
    get_packed_loader,
)
from tests.internals import check_order, redistribute
from tests.loading.flows import DISTRIBUTORS, FEATURES, ITEMS, PACKERS, feature
from tests.processes import run_ranks


class Ranks:
    """The loaders of all ranks, step by step together, as a training loop takes them."""

    def __init__(self, new_loader: Callable[..., Any], world_size: int, state: Any = None, **options: Any) -> None:
        self.loaders = [new_loader(rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        for loader in self.loaders if state is not None else []:
            loader.load_state_dict(json.loads(json.dumps(state)))

    def state(self) -> dict[str, Any]:
        return {"ranks": [loader.state_dict() for loader in self.loaders]}

    def take(self, steps: int | None = None) -> Counter[str]:
        """Ids of so many steps of each rank, or of the rest of the epoch."""
        seen: Counter[str] = Counter()
        streams = [loader.rest_of_epoch() for loader in self.loaders]
        for step, batches in enumerate(zip_longest(*streams)):
            seen.update(name for batch in batches if batch is not None for name in batch.ids if name)
            if step + 1 == steps:
                break
        return seen


ALL = {f"s{number}": 1 for number in range(ITEMS)}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("distributor", DISTRIBUTORS)
@pytest.mark.parametrize("sizes", [(2, 3, 1), (3, 1, 2, 4), (1, 2)])
def test_every_item_once_over_changes_at_every_step(
    folder: Path, sizes: tuple[int, ...], distributor: str, packer: str
) -> None:
    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(DISTRIBUTORS[distributor](folder), packer=PACKERS[packer](), seed=3, **place)

    steps = (
        [(0, 1), (1, 1), (2, 1), (1, 2)] if distributor == "energon" else [(a, b) for a in range(4) for b in (0, 1)]
    )
    for first, second in steps:
        seen: Counter[str] = Counter()
        ranks = Ranks(new_loader, sizes[0])
        for world_size, count in zip(sizes[1:], [first, second, second], strict=False):
            if count:
                seen += ranks.take(count)
            ranks = Ranks(new_loader, world_size, ranks.state())
        seen += ranks.take()
        epochs = {loader.epoch for loader in ranks.loaders}  # 2 where a rank had begun the second before the change
        assert epochs in ({1}, {2})
        assert seen == dict.fromkeys(ALL, epochs.pop()), f"after {first} and {second} steps"


def test_a_rank_that_has_begun_the_next_epoch_cannot_change_with_the_others() -> None:
    """Rank 0 has 7 items and rank 1 has 6: after its last batch, rank 1 is asked once more, and begins again."""

    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(IterableDistributor(FEATURES), packer=SimpleBatcher(1), **place)

    before = Ranks(new_loader, 2)
    batches = [iter(loader) for loader in before.loaders]
    for _ in range(6):
        next(batches[0]), next(batches[1])
    assert next(batches[1], None) is None
    seen = Ranks(new_loader, 3, before.state()).take()
    assert sum(seen.values()) == 1  # the last item of rank 0
    next(iter(before.loaders[1]))
    assert [loader.epoch for loader in before.loaders] == [0, 1]
    with pytest.raises(BatchError, match=r"ranks are in different epochs, .*. Save while all ranks are in one epoch"):
        Ranks(new_loader, 3, before.state())


def test_after_the_rest_all_is_as_with_that_number_from_the_start() -> None:
    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES), packer=PACKERS["pool"](), seed=5, **place)

    two = Ranks(new_loader, 2)
    two.take(2)
    three, fresh = Ranks(new_loader, 3, two.state()), Ranks(new_loader, 3)
    three.take()
    fresh.take()
    for resumed, other in zip(three.loaders, fresh.loaders, strict=True):
        assert [batch.ids for batch in resumed] == [batch.ids for batch in other]


def test_the_rest_resumes_exactly_at_every_step() -> None:
    def new_loader(**place: Any) -> DataflowLoader:
        mixture = MixtureDistributor([MapDistributor(FEATURES[:8]), IterableDistributor(FEATURES[8:])], [1, 2])
        return DataflowLoader(mixture, packer=PACKERS["pool"](), seed=5, **place)

    two = Ranks(new_loader, 2)
    two.take(1)
    loader = Ranks(new_loader, 1, two.state()).loaders[0]
    states, expected = [], []
    for batch in loader:
        expected.append(batch.ids)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert len(expected) > 3
    for step, state in enumerate(states[:-1], 1):
        resumed = new_loader(rank=0, world_size=1)
        resumed.load_state_dict(state)
        assert [batch.ids for batch in resumed] == expected[step:], f"after step {step}"


def test_worker_processes_with_several_shards_resume_exactly() -> None:
    """2 workers finish 5 shards: the turn in which a worker reports the end of a shard is not skipped."""

    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(IterableDistributor(FEATURES), packer=SimpleBatcher(2), **place)

    five = Ranks(new_loader, 5)
    next(iter(five.loaders[0]))
    loader = new_loader(num_workers=2)
    loader.load_state_dict(five.state())
    states, expected = [], []
    for batch in loader.rest_of_epoch():
        expected.append(batch.ids)
        states.append(json.loads(json.dumps(loader.state_dict())))
    for step in range(1, len(states), 2):
        resumed = new_loader(num_workers=2)
        resumed.load_state_dict(states[step - 1])
        assert [batch.ids for batch in resumed.rest_of_epoch()] == expected[step:], f"after step {step}"


def test_worker_processes_of_a_loader_change(folder: Path) -> None:
    """0 -> 2 -> 1 workers of one rank: its state is that of all ranks; what workers read ahead is not lost."""

    def new_loader(num_workers: int) -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES), packer=PACKERS["pool"](), num_workers=num_workers)

    seen: Counter[str] = Counter()
    state = None
    for num_workers in (0, 2, 1):
        loader = new_loader(num_workers)
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in enumerate(loader.rest_of_epoch()):
            seen.update(batch.ids)
            if num_workers != 1 and step == 1:
                break
        state = loader.state_dict()
    assert seen == ALL


def test_a_packed_dataset_goes_on_with_other_ranks_and_worker_processes(folder: Path) -> None:
    def new_loader(**options: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(PackedDataset(folder)), seed=1, **options)

    two = Ranks(new_loader, 2)
    seen = two.take(2)
    three = Ranks(new_loader, 3, two.state(), num_workers=2)
    seen += three.take(1)
    one = Ranks(new_loader, 1, three.state(), num_workers=1)
    seen += one.take()
    assert seen == ALL
    assert one.take() == ALL


def test_new_workers_read_only_the_shards_that_they_finish() -> None:
    class Watched(list[Any]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Watched.reads += 1
            return super().__getitem__(index)

    data = Watched(feature(number) for number in range(60))

    def new_loader(**place: Any) -> DataflowLoader:
        mixture = MixtureDistributor([MapDistributor(data), MapDistributor(FEATURES)], [4, 1])
        return DataflowLoader(mixture, seed=2, **place)

    two = Ranks(new_loader, 2)
    seen = two.take(10)
    state = two.state()
    Watched.reads = 0
    three = Ranks(new_loader, 3, state)
    more = three.take(8)  # the third rank has no shard until the epoch ends
    assert Watched.reads <= 16 + 2 * 32  # used, and read ahead
    rest = Ranks(new_loader, 1, three.state()).take()
    assert seen + more + rest == Counter(f"s{number}" for number in [*range(60), *range(ITEMS)])


def test_a_stream_without_end_is_shared_by_fewer_workers_alone() -> None:
    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(MixtureDistributor([MapDistributor(FEATURES)], [1], repeat=True), **place)

    two = Ranks(new_loader, 2)
    two.take(3)
    assert sum(Ranks(new_loader, 1, two.state()).take(9).values()) == 9
    with pytest.raises(BatchError, match="stream without end with 2 shards must have at most as many workers, got 3"):
        Ranks(new_loader, 3, two.state())


def test_joint_loaders_change_together() -> None:
    def new_loader(**place: Any) -> JointLoader:
        short = DataflowLoader(MapDistributor(FEATURES), packer=SequentialPacker(16), seed=1, **place)
        other = [feature(number, 100) for number in range(30)]
        long = DataflowLoader(MapDistributor(other), batch_size=2, **place)
        return JointLoader({"short": short, "long": long}, {"short": 1, "long": 3}, seed=4, stop="first")

    ranks = [new_loader(rank=rank, world_size=2) for rank in range(2)]
    seen: Counter[str] = Counter()
    for joint in ranks:
        for _, (_, batch) in zip(range(4), joint, strict=False):
            seen.update(batch.ids)
    state = {"ranks": [joint.state_dict() for joint in ranks]}
    one = new_loader(rank=0, world_size=1)
    one.load_state_dict(json.loads(json.dumps(state)))
    for loader in one.loaders.values():
        for batch in loader.rest_of_epoch():
            seen.update(batch.ids)
    assert set(seen.values()) == {1}
    assert len(seen) == ITEMS + 30


@pytest.mark.parametrize("choice", ["repeat", "drop"])
def test_the_length_of_an_energon_loader_is_that_of_its_epoch(folder: Path, choice: Any) -> None:
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "micro_batch_size": 2, "epoch_end": choice}
    for world_size in (1, 2, 3, 5):
        for rank in range(world_size):
            loader = get_packed_loader(folder, rank=rank, world_size=world_size, **options)
            assert len(loader) == len(list(loader))
    with pytest.raises(TypeError, match="Count steps.* set `epochs=1`"):
        len(get_packed_loader(folder, num_workers=0))


def test_gathered_states_of_energon_loaders_change_ranks(folder: Path) -> None:
    ranks = [get_packed_loader(folder, rank=rank, world_size=2, num_workers=1) for rank in range(2)]
    for loader in ranks:
        next(iter(loader))
    gathered = {"ranks": [loader.state_dict() for loader in ranks]}
    one = get_packed_loader(folder, num_workers=2)
    one.load_state_dict(gathered)
    by_hand = get_packed_loader(folder, num_workers=2)
    by_hand.load_state_dict(redistribute(gathered["ranks"], 1)[0])
    assert [b.ids for b, _ in zip(one, range(9), strict=False)] == [
        b.ids for b, _ in zip(by_hand, range(9), strict=False)
    ]
    again = get_packed_loader(folder, rank=1, world_size=2, num_workers=1)
    again.load_state_dict(gathered)
    assert next(iter(again)).ids == next(iter(ranks[1])).ids
    with pytest.raises(BatchError, match="without end with 2 shards must have at most as many workers, got 3"):
        get_packed_loader(folder, rank=1, world_size=3, num_workers=1).load_state_dict(gathered)


def test_an_exact_epoch_of_an_energon_loader_continues_with_any_number_of_ranks(folder: Path) -> None:
    def new_loader(**place: Any) -> Any:
        return get_packed_loader(folder, epochs=1, num_workers=0, shuffle_buffer_size=3, **place)

    two = Ranks(new_loader, 2)
    seen = two.take(2)
    three = Ranks(new_loader, 3, two.state())
    # Ranks with the shards of other ranks have no known number of steps: they must exchange when they end.
    assert all(state["regrouped"] for state in three.state()["ranks"])
    assert Ranks(new_loader, 3, three.state()).state() == three.state()
    seen += three.take(1)
    one = Ranks(new_loader, 1, three.state())
    assert seen + one.take() == ALL
    assert one.take() == ALL


def test_streams_that_cannot_change_ranks_raise() -> None:
    def stream() -> Iterator[Any]:
        yield from FEATURES

    def new_loader(source: Any, packer: Packer | None = None, **place: Any) -> DataflowLoader:
        return DataflowLoader(IterableDistributor(source), packer=packer, **place)

    loader = new_loader(stream())
    next(iter(loader))
    with pytest.raises(
        BatchError, match="over a one-shot iterator cannot continue .*1 ranks x 1 workers saved, 2 x 1 now"
    ):
        new_loader(stream(), rank=0, world_size=2).load_state_dict(gather_state(loader))
    two = [new_loader(FEATURES, rank=rank, world_size=2) for rank in range(2)]
    state = two[1].state_dict()
    with pytest.raises(
        BatchError,
        match="has only rank 1 of 2, .*2 ranks x 1 workers saved, 1 x 1 now.. Load the result of gather_state",
    ):
        new_loader(FEATURES).load_state_dict(state)
    with pytest.raises(BatchError, match="the states of all 2 ranks, got ranks 1. Call gather_state on every"):
        new_loader(FEATURES).load_state_dict({"ranks": [state]})
    with pytest.raises(BatchError, match="must be of rank 0, got rank 1"):
        two[0].load_state_dict(state)
    with pytest.raises(BatchError, match="seed 0 saved, 4 now"):
        new_loader(FEATURES, seed=4).load_state_dict({"ranks": [one.state_dict() for one in two]})


GATHER = """
from energon_packed import DataflowLoader, MapDistributor, gather_state
import json
features = [{"id": f"s{n}", "input_ids": [n + 1, 5]} for n in range(13)]
loader = DataflowLoader(MapDistributor(features), batch_size=2, num_workers=1)
batches = iter(loader)
names = [name for _ in range(2) for name in next(batches).ids]
print(json.dumps([names, gather_state(loader)]))
"""


def test_an_order_log_goes_on_with_other_ranks(tmp_path: Path) -> None:
    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES), order_log=tmp_path, **place)

    two = Ranks(new_loader, 2)
    two.take(2)
    state = two.state()
    two.take(1)  # after the checkpoint: the lines of the resumed run replace these
    three = Ranks(new_loader, 3, state)
    three.take(1)
    Ranks(new_loader, 1, state).take()
    report = check_order(tmp_path)
    assert (report.problems, report.samples, report.complete) == ([], ITEMS, [0])
    three.take(1)  # two runs at the same time
    assert any("two processes wrote at the same time" in problem for problem in check_order(tmp_path).problems)


def test_an_order_log_of_a_stream_goes_on_with_other_ranks(tmp_path: Path) -> None:
    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(IterableDistributor(FEATURES), batch_size=2, order_log=tmp_path, **place)

    two = Ranks(new_loader, 2)
    two.take(1)
    state = two.state()
    two.take(1)  # after the checkpoint: the resumed run logs these steps again, by another rank
    Ranks(new_loader, 1, state).take()
    report = check_order(tmp_path)
    assert (report.problems, report.samples, report.complete, report.replaced) == ([], ITEMS, [0], 2)
    file = tmp_path / "order-00000-000.jsonl"
    file.write_text(file.read_text().replace('"s2"', '"s0"', 1))
    assert check_order(tmp_path).problems


def test_learned_weights_go_on_with_other_ranks_from_the_next_epoch() -> None:
    mixtures = []

    def new_loader(**place: Any) -> DataflowLoader:
        parts = [MapDistributor(FEATURES), MapDistributor([feature(number, 100) for number in range(ITEMS)])]
        mixtures.append(MixtureDistributor(parts, [1, 1], names=["a", "b"]))
        return DataflowLoader(mixtures[-1], seed=2, **place)

    two = Ranks(new_loader, 2)
    two.take(3)
    for mixture in mixtures:
        mixture.update({"a": 1.0, "b": 5.0})
    with pytest.raises(BatchError, match="Finish the epoch with the same ranks and workers"):
        Ranks(new_loader, 3, two.state())
    two.take()
    weights = mixtures[0].current_weights
    three = Ranks(new_loader, 3, two.state())
    assert all(mixture.current_weights == weights for mixture in mixtures[-3:])
    assert set(three.take().values()) == {1}


def test_one_checkpoint_gathers_all_ranks(tmp_path: Path) -> None:
    outputs = [json.loads(out) for out in run_ranks(GATHER, 2, tmp_path / "store")]
    assert outputs[0][1] == outputs[1][1]
    features = [{"id": f"s{n}", "input_ids": [n + 1, 5]} for n in range(13)]
    loader = DataflowLoader(MapDistributor(features), batch_size=2)
    loader.load_state_dict(outputs[0][1])
    seen = Counter(name for names, _ in outputs for name in names)
    seen.update(name for batch in loader for name in batch.ids)
    assert seen == ALL


def test_layouts_without_a_step_leave_no_trace_in_a_state() -> None:
    """Changes of the ranks before the first step, or between two steps, give the state of the last change alone."""

    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES), seed=3, **place)

    for steps in (0, 2):
        ranks = Ranks(new_loader, 2)
        if steps:
            ranks.take(steps)
        saved = ranks.state()
        direct = Ranks(new_loader, 4, saved).state()
        through = Ranks(new_loader, 4, Ranks(new_loader, 3, Ranks(new_loader, 1, saved).state()).state()).state()
        assert through == direct
        assert len(direct["ranks"][0]["segments"]) == (2 if steps else 1)


def test_a_changed_stream_counts_steps_from_the_rank_with_the_most() -> None:
    """Rank 0 has 7 items and rank 1 has 6: each batch of a rank has a number of its own."""

    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(IterableDistributor(FEATURES), packer=SimpleBatcher(1), **place)

    ranks = Ranks(new_loader, 2)
    streams = [loader.rest_of_epoch() for loader in ranks.loaders]
    for stream, steps in zip(streams, (3, 5), strict=True):
        for _ in range(steps):
            next(stream)
    (one,) = Ranks(new_loader, 1, ranks.state()).loaders
    assert one.position().step == 5
    assert len(list(one.rest_of_epoch())) == ITEMS - 8


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shard_with_waiting_rows_has_not_ended_in_the_log(tmp_path: Path, world_size: int) -> None:
    """The end of the data fills several rows at once: a state between them, and one after the last of them."""

    def new_loader(**place: Any) -> DataflowLoader:
        return DataflowLoader(
            IterableDistributor(FEATURES), packer=PoolPacker(16, pool_size=100), order_log=tmp_path, **place
        )

    whole = len(list(DataflowLoader(IterableDistributor(FEATURES), packer=PoolPacker(16, pool_size=100))))
    assert whole > 4
    state = None
    for steps in (1, whole - 3, 2):  # up to the last row, whose shard has ended
        (loader,) = Ranks(new_loader, 1, state).loaders
        stream = loader.rest_of_epoch()
        for _ in range(steps):
            next(stream)
        report = check_order(tmp_path)
        assert report.problems == []
        assert report.complete == []
        state = {"ranks": [loader.state_dict()]}
    for loader in Ranks(new_loader, world_size, state).loaders:
        assert list(loader.rest_of_epoch()) == []
    report = check_order(tmp_path)
    assert (report.problems, report.complete, report.samples) == ([], [0], ITEMS)
