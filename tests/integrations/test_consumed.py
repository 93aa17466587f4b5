"""Trainers that read ahead: the state behind any batch that was used, with every update of a learned mixture."""

import gc
import json
import math
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from energon_packed import (
    BatchError,
    ConfigError,
    Consumed,
    DataflowConfig,
    DataflowLoader,
    IterableDistributor,
    JointLoader,
    MapDistributor,
    MixtureDistributor,
    PackedDataset,
    PackedIterableDataset,
    PaddingFreeCollator,
    PoolPacker,
    TrainerStream,
    get_packed_loader,
    prepare_loader,
)
from tests.loading.flows import feature

LOADERS: dict[str, Any] = {
    "energon": lambda packs, blend: get_packed_loader(packs, epochs=1, num_workers=0),
    "energon_repeated": lambda packs, blend: get_packed_loader(blend, num_workers=0),
    "energon_workers": lambda packs, blend: get_packed_loader(packs, epochs=1, num_workers=2),
    "dataflow": lambda packs, blend: DataflowLoader(MapDistributor(PackedDataset(packs))),
    "dataflow_workers": lambda packs, blend: DataflowLoader(MapDistributor(PackedDataset(packs)), num_workers=2),
    "pool": lambda packs, blend: DataflowLoader(
        MapDistributor(PackedDataset(packs)), packer=PoolPacker(2000, pool_size=5), num_workers=1
    ),
    "joint": lambda packs, blend: JointLoader(
        {name: DataflowLoader(MapDistributor(PackedDataset(packs)), seed=seed) for seed, name in enumerate("ab")},
        {"a": 2, "b": 1},
    ),
}
# Loaders with processes take a second to make: used and read ahead.
SLOW = {"energon": [(0, 1), (7, 2), (10, 3)], "energon_repeated": [(9, 1)], "energon_workers": [(10, 4), (6, 3)]}
SLOW |= {"joint": [(3, 2), (9, 1)], "dataflow_workers": [(7, 3)], "pool": [(0, 2), (4, 4)]}


def reading(loader: Any) -> Consumed:
    """The batches of a loader for a trainer that counts the batches that it has used."""
    return Consumed(loader, lambda batch: batch, ahead=None)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_is_identical_from_every_batch_that_was_used(text_packs: list[Path], kind: str) -> None:
    make = lambda: LOADERS[kind](text_packs[0], text_packs[2])  # noqa: E731
    steps = 14
    expected = [batch.ids for batch in islice(reading(make()).forever(), steps)]
    assert len({str(ids) for ids in expected}) > 1
    for used, ahead in SLOW.get(kind, [(used, used % 4) for used in range(11)]):
        batches = reading(make())
        read = [batch.ids for batch in islice(batches.forever(), used + ahead)]
        assert read == expected[: used + ahead]
        for _ in range(used):
            batches.use()
        state = json.loads(json.dumps(batches.state_dict()))
        resumed = reading(make())
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest = [batch.ids for batch in islice(resumed.forever(), steps - used)]
        assert rest == expected[used:], f"{used} used, {ahead} read ahead"


class Numbers:
    """An iterable of another package: two batches in an epoch, and a state."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Iterator[int]:
        while self.step % 2 or not self.step:
            self.step += 1
            yield self.step
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def test_an_iterable_of_another_package_continues_after_every_batch() -> None:
    for used in range(5):
        loader = Consumed(Numbers(), int, ahead=None)
        assert list(islice(loader.forever(), 5)) == [1, 2, 1, 2, 1]
        for _ in range(used):
            loader.use()
        resumed = Consumed(Numbers(), int, ahead=None)
        resumed.load_state_dict(loader.state_dict())
        assert list(islice(resumed.forever(), 3)) == [used % 2 + 1, 2 - used % 2, used % 2 + 1]


def test_the_state_of_an_epoch_is_that_of_the_loader_and_iterations_of_steps_count_their_batches() -> None:
    def new(**steps: int) -> Consumed:
        return Consumed(DataflowLoader(MapDistributor([feature(n, 0) for n in range(5)])), **steps)

    epochs, steps = new(), new(steps=3)
    assert [len(list(epochs)), len(list(steps)), len(list(islice(steps, 2)))] == [5, 3, 2]
    assert "iteration_step" not in epochs.state_dict()
    resumed = new(steps=3)
    resumed.load_state_dict(steps.state_dict())
    assert [len(list(resumed)), len(list(resumed))] == [1, 3]
    with pytest.raises(BatchError, match="iteration_step"):
        new(steps=3).load_state_dict(epochs.state_dict())


@pytest.mark.parametrize("ahead", [0, 1, None])
def test_a_trainer_that_holds_batches_back_continues_at_every_step_of_several_epochs(ahead: int | None) -> None:
    """The state at the last steps of an epoch, when the trainer asks for no further batch."""

    def new() -> Consumed:
        loader = DataflowLoader(MapDistributor([feature(n, 0) for n in range(5)]), seed=1)
        return Consumed(loader, lambda batch: batch.ids, ahead=ahead)

    def used(consumed: Consumed, steps: int) -> Iterator[Any]:
        """Yield each batch that the trainer uses; it reads 1 or 3 batches before, and uses them up in each epoch."""
        before, done = 3 if ahead is None else ahead, 0
        while done < steps:
            waiting = []
            for batch in consumed:
                waiting.append(batch)
                if len(waiting) > before:
                    yield waiting.pop(0)
                    done += 1
            for batch in waiting:
                yield batch
                done += 1

    expected = list(islice(used(new(), 14), 14))
    trained = new()
    for step, _ in enumerate(islice(used(trained, 14), 12), 1):
        if ahead is None:
            trained.use()
        resumed = new()
        resumed.load_state_dict(trained.state_dict())
        assert list(islice(used(resumed, 14), 14 - step)) == expected[step:], step


def test_more_than_one_batch_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`ahead` must be 0, 1 or None, got 2. Pass None and call `use\(\)`"):
        Consumed(Numbers(), ahead=2)


def test_loaders_of_another_rank_are_refused_also_inside_a_joint_loader() -> None:
    loader = DataflowLoader(MapDistributor([feature(n, 0) for n in range(5)]), rank=1, world_size=2)
    for wrapped in (loader, JointLoader({"a": loader}, {"a": 1})):
        with pytest.raises(ConfigError, match="must be of rank 0 of 1, as this process, got rank 1 of 2"):
            prepare_loader(Accelerator(cpu=True), wrapped)
        with pytest.raises(ConfigError, match="must be of rank 0 of 1, as this process, got rank 1 of 2"):
            iter(TrainerStream(wrapped))


def test_loaders_without_a_state_are_named() -> None:
    with pytest.raises(ConfigError, match="`loader` must have state_dict to resume, got a list"):
        next(iter(Consumed([])))


# --- learned mixtures ------------------------------------------------------------------------------------------------


def rewards_of(step: int) -> dict[str, float]:
    return {"a": 0.5, "b": 1.0 + step / 20, "c": 2.0 + math.sin(step) / 4}


def learning(num_workers: int) -> tuple[MixtureDistributor, DataflowLoader]:
    """Three sources whose epochs end after 9 to 11 batches, in rows of a pool."""
    parts = [MapDistributor([feature(n, 1000 * part) for n in range(11 + part)]) for part in range(3)]
    mixture = MixtureDistributor(parts, [1, 1, 1], names=["a", "b", "c"])
    loader = DataflowLoader(mixture, packer=PoolPacker(24, pool_size=5), num_workers=num_workers, seed=5)
    return mixture, loader


class ThroughTrainer:
    """A TrainerStream as Transformers' Trainer reads it: `ahead` batches more than are used."""

    ahead = 3

    def __init__(self, loader: DataflowLoader) -> None:
        self.stream = TrainerStream(loader)
        self.stream.consumed.ahead = None
        self.batches = self._batches()

    def _batches(self) -> Any:
        waiting: list[Any] = []
        for batch in iter(self.stream):
            waiting.append(batch)
            if len(waiting) > self.ahead:
                yield waiting.pop(0)

    def next(self) -> Any:
        return next(self.batches).input_ids

    def used(self) -> None:
        self.stream.consumed.use()

    def state(self) -> Any:
        return self.stream.consumed.state_dict()

    def restore(self, state: Any) -> None:
        self.stream.consumed.load_state_dict(state)


class Epochs:
    """A loader of which each iteration is an epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches = iter(())

    def next(self) -> Any:
        for _ in range(3):
            batch = next(self.batches, None)
            if batch is not None:
                return batch.input_ids if hasattr(batch, "input_ids") else batch["input_ids"]
            self.batches = iter(self.loader)
        raise AssertionError("no batch")

    def used(self) -> None:
        pass

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


WRAPPERS: dict[str, Any] = {
    "DataflowLoader": Epochs,
    "Consumed": lambda loader: Epochs(Consumed(loader, steps=7)),
    "prepare_loader": lambda loader: Epochs(prepare_loader(Accelerator(cpu=True), loader)),
    "TrainerStream": ThroughTrainer,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_learned_weights_and_batches_are_those_of_the_run_without_interruption(wrapper: str, num_workers: int) -> None:
    """At every step, over several epochs, whatever the wrapper has read ahead."""
    steps = 45

    def run(first: int, last: int, state: Any = None) -> tuple[list[Any], list[Any], list[Any]]:
        mixture, loader = learning(num_workers)
        wrapped = WRAPPERS[wrapper](loader)
        if state is not None:
            wrapped.restore(json.loads(json.dumps(state)))
        rows, weights, states = [], [], []
        for step in range(first, last):
            rows.append(wrapped.next().tolist())
            weights.append(list(mixture.update(rewards_of(step)).values()))
            wrapped.used()
            states.append(wrapped.state())
        return rows, weights, states

    rows, weights, states = run(0, steps)
    assert len({str(one) for one in weights}) > steps - 4
    for step in range(0, steps - 4, 4 if num_workers == 0 else 13):
        resumed = run(step + 1, steps, states[step])
        assert resumed[1] == weights[step + 1 :], f"weights after step {step}"
        assert resumed[0] == rows[step + 1 :], f"batches after step {step}"


def test_gathered_states_are_continued_by_other_ranks() -> None:
    """Items with a global order: the state of any rank; a stream: the states of all, here without a process group."""
    data = [feature(n % 13, 13 * (n // 13)) for n in range(26)]
    makes: dict[str, Any] = {
        "order": lambda **place: Consumed(DataflowLoader(MapDistributor(data), **place)),
        "stream": lambda **place: Consumed(
            DataflowLoader(IterableDistributor(data), packer=PoolPacker(24, pool_size=3), **place), steps=40
        ),
    }
    for kind, make in makes.items():
        before = [make(rank=rank, world_size=2) for rank in range(2)]
        seen = []
        for loader in before:
            for _ in islice(loader, 2):
                pass
        states = [json.loads(json.dumps(loader.state_dict())) for loader in before]
        if kind == "order":
            assert states[0] == states[1]
            state = states[0]
        else:
            state = states[0] | {"ranks": [one["ranks"][0] for one in states]}
        for rank in range(3):
            loader = make(rank=rank, world_size=3)
            loader.load_state_dict(state)
            seen += [name for batch in loader.loader.rest_of_epoch() for name in batch.ids if name]
        used = [name for rank in range(2) for name in first_ids(make, rank)]
        assert sorted(seen + used) == sorted(one["id"] for one in data), kind


def first_ids(make: Any, rank: int) -> list[str]:
    return [name for batch in islice(make(rank=rank, world_size=2).loader, 2) for name in batch.ids]


def test_steps_without_a_checkpoint_take_no_memory() -> None:
    """The positions of used batches are dropped, and so are the updates of a mixture that no position needs."""
    parts = [MapDistributor([{"id": str(part), "input_ids": [1, 2]}] * 50) for part in range(3)]
    mixture = MixtureDistributor(parts, [1, 1, 1], repeat=True, names=["a", "b", "c"])
    batches = Consumed(DataflowLoader(mixture, packer=PoolPacker(4, pool_size=4)), lambda batch: batch, ahead=1)
    seen = batches.forever()

    def train(steps: int) -> int:
        for _ in range(steps):
            next(seen)
            mixture.update({"a": 1.0, "b": 0.5})
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    train(10)
    tracemalloc.start()
    try:
        train(100)
        before = train(200)
        assert len(batches._positions) <= 2
        assert train(300) - before < 60_000  # an update that is kept takes 400 bytes
    finally:
        tracemalloc.stop()
    assert len(json.dumps(batches.state_dict())) < 20_000


def test_a_raw_stream_inside_another_loader_is_refused(text_packs: list[Path], text_tokenizer_dir: Path) -> None:
    config = DataflowConfig(
        inputs=(str(text_packs[2].parent / "a.jsonl"),), tokenizer=text_tokenizer_dir, packing_length=384
    )
    data = PackedIterableDataset(config)
    with pytest.raises(ConfigError, match="each worker would read everything. Iterate it directly"):
        list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))


def test_stateful_data_loaders_of_two_ranks(text_packs: list[Path]) -> None:
    data = PackedDataset(text_packs[0])

    def new_loader(rank: int) -> Any:
        sampler = StatefulDistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=1)
        return StatefulDataLoader(data, batch_size=1, sampler=sampler, collate_fn=PaddingFreeCollator())

    seen = []
    for rank in (0, 1):
        loader = new_loader(rank)
        states, batches = [], []
        for batch in loader:
            batches.append(batch["input_ids"].tolist())
            states.append(loader.state_dict())
        for step, state in enumerate(states[:-1], 1):
            resumed = new_loader(rank)
            resumed.load_state_dict(state)
            assert [batch["input_ids"].tolist() for batch in resumed] == batches[step:]
        seen += batches
    assert sorted(seen) == sorted(PaddingFreeCollator()([pack])["input_ids"].tolist() for pack in data)


def test_batches_need_a_function_that_converts_them() -> None:
    with pytest.raises(ConfigError, match="`to_inputs` must be a function of a batch, got None"):
        Consumed(Numbers(), None)  # type: ignore[arg-type]
