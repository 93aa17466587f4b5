"""How batches travel from workers: the same at arrival, in turn, errors in their place; when garbage is collected."""

import gc
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import (
    BatchError,
    DataflowLoader,
    Distributor,
    EncodedSample,
    Item,
    MapDistributor,
    PackedBatch,
    PaddingFreeCollator,
    SampleSource,
    ShardSpec,
)
from tests.internals import Step, VisionInputs, messages, round_robin
from tests.internals import TransportMessage as Message
from tests.loading.flows import FEATURES, signature

EXAMPLES = int(os.environ.get("ENERGON_PACKED_FUZZ", "25"))


class Broken(Distributor):
    """Some items, then an error; only worker 0 of two has it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        for number in range(start, 5):
            if number == 3 and shard.index == 0:
                raise self.error
            yield Item(number, FEATURES[number])


def same(one: Any, other: Any) -> bool:
    """Equal values and types; tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or not other.is_contiguous():
            return False
        return not one.numel() or torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


def assert_arrives(batch: PackedBatch) -> int:
    """Through the pickle of torch's queue; returns its bytes."""
    blob = bytes(ForkingPickler.dumps(batch))
    found = pickle.loads(blob)
    assert type(found) is PackedBatch
    for one in fields(batch):
        assert same(getattr(batch, one.name), getattr(found, one.name)), one.name
        if isinstance(value := getattr(found, one.name), torch.Tensor) and value.numel():
            value.view(-1)[0] = value.view(-1)[0]  # no read-only memory
    return len(blob)


@st.composite
def rows(draw: st.DrawFn) -> PackedBatch:
    """Rows of every form that the collator makes."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["text", "patches", "vision_inputs"]))
    mrope = kind == "patches" and draw(st.booleans())
    highest = draw(st.sampled_from([200, 1 << 16, 1 << 20]))
    samples = []
    for number in range(draw(st.integers(1, 5))):
        length = int(rng.integers(2, draw(st.sampled_from([8, 900]))))
        ids = rng.integers(0, highest, length)
        labels = np.where(rng.random(length) < 0.5, ids, -100)
        labels[-1] = ids[-1] if draw(st.booleans()) else 7  # a target that is not the id
        images: dict[str, Any] = {}
        if kind == "patches":
            images = {
                "pixel_values": torch.randn(8, 12),
                "image_grid_thw": torch.tensor([[1, 4, 2]]),
                "patch_positions": rng.integers(0, 9, (8, 3)),
                "token_type_ids": rng.integers(0, 2, length),
                "position_ids": rng.integers(0, 50, (3, length)) if mrope else None,
            }
        elif kind == "vision_inputs":
            values = {"pixel_values": torch.randn(1, 3, 4, 5), "image_sizes": torch.tensor([[4, 5]])}
            images = {"vision_inputs": VisionInputs(values, {"pixel_values": 0, "image_sizes": 0}, 1)}
        source = SampleSource("data", {"of": number}) if draw(st.booleans()) else None
        samples.append(EncodedSample(id=f"s{number}", input_ids=ids, labels=labels, source=source, **images))
    collator = PaddingFreeCollator(
        pad_multiple=draw(st.sampled_from([1, 4])),
        pad_to=draw(st.sampled_from([None, 5000])),
        loss_weighting=draw(st.sampled_from(["token", "sqrt"])),
        pixel_dtype=draw(st.sampled_from([None, torch.bfloat16])),
        dummy_images="never",
    )
    return collator.collate(samples)


@settings(max_examples=EXAMPLES, deadline=None)
@given(batch=rows())
def test_every_row_arrives_as_it_was_made(batch: PackedBatch) -> None:
    assert_arrives(batch)


@pytest.mark.parametrize("name", ["labels", "loss_mask", "position_ids", "cu_seqlens"])
def test_tensors_that_a_collator_of_its_user_changed_arrive_as_they_are(name: str) -> None:
    batch = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=np.arange(2000), labels=np.arange(2000))])
    getattr(batch, name).view(-1)[1] = 12345
    assert_arrives(batch)
    setattr(batch, name, -getattr(batch, name))
    assert_arrives(batch)
    setattr(batch, name, getattr(batch, name)[..., :0])
    assert_arrives(batch)


@pytest.mark.parametrize("number", [-1, (1 << 16) - 1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 63) - 1])
def test_ids_at_the_bounds_of_each_type_arrive(number: int) -> None:
    ids = np.full(2000, number)
    assert_arrives(PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=ids, labels=ids)]))


def test_a_row_of_text_is_sent_in_half_of_its_bytes() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 4096)
    batch = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=ids, labels=ids)])
    bytes_of = sum(
        value.nbytes for one in fields(batch) if isinstance(value := getattr(batch, one.name), torch.Tensor)
    )
    assert assert_arrives(batch) < bytes_of / 2


def test_tensors_up_to_a_mebibyte_are_bytes_and_larger_ones_share_memory() -> None:
    batch = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=np.arange(9), labels=np.arange(9))])
    for elements, is_shared in ((1 << 18, False), ((1 << 18) + 1, True)):
        pixels: Any = torch.randn(elements)
        batch.pixel_values = pixels
        size = assert_arrives(batch)
        assert pixels.is_shared() == is_shared
        assert (size < 1 << 12) == is_shared


def test_views_weights_and_attributes_arrive() -> None:
    batch = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=np.arange(3000), labels=np.arange(3000))])
    batch.patch_positions = torch.arange(6000).view(3, 2000).T  # not contiguous
    batch.loss_mask[0, :3] = torch.tensor([-0.0, float("nan"), 0.5])
    batch.token_type_ids = torch.zeros(0, 3, dtype=torch.int64)
    found = pickle.loads(bytes(ForkingPickler.dumps(batch)))
    assert torch.equal(found.patch_positions, batch.patch_positions)
    assert torch.equal(found.loss_mask.view(torch.int32), batch.loss_mask.view(torch.int32))
    assert found.token_type_ids.shape == (0, 3)


def test_a_saved_batch_is_pickled_as_ever() -> None:
    batch = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=np.arange(9), labels=np.arange(9))])
    assert b"transport" not in pickle.dumps(batch)


def steps_of(worker: int, batches: list[Any]) -> Iterator[Step]:
    for number, batch in enumerate([*batches, None]):
        yield Step(worker, batch, (worker, str(number)), [number], [], ended=batch is None)


def test_small_steps_share_a_message_and_large_ones_do_not() -> None:
    row = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=np.arange(9), labels=np.arange(9))])
    counts = torch.zeros((2, 1), dtype=torch.int64)

    def sent(batches: list[Any], *, one_by_one: bool = False) -> int:
        return len(list(messages(steps_of(0, batches), 0, counts, 2, one_by_one=one_by_one)))

    assert sent([row] * 31) == 2
    assert sent([row] * 31, one_by_one=True) == 32
    large = PaddingFreeCollator().collate([EncodedSample(id="s", input_ids=np.arange(9), labels=np.arange(9))])
    large.pixel_values = torch.zeros(1 << 20)
    found = messages(steps_of(0, [large] * 31), 0, counts, 2, one_by_one=False)
    entries = [len(next(found).entries) for _ in range(9)]
    assert entries == [1, 1, 1, 1, 1, 0, 0, 0, 0]  # far ahead of the main process
    counts[:, 0] = torch.tensor([30, 200 << 20])
    assert len(next(found).entries) == 1


def numbered(number: int) -> PackedBatch:
    ids = np.full(2, number)
    return PaddingFreeCollator().collate([EncodedSample(id=str(number), input_ids=ids, labels=ids)])


def number_of(batch: Any) -> int | None:
    if isinstance(batch, PackedBatch):
        return int(batch.input_ids[0, 0])
    return None if batch is None else int(batch["n"])


@pytest.mark.parametrize("first", [0, 1])
def test_workers_take_turns_whatever_messages_their_steps_come_in(first: int) -> None:
    makes: dict[int, list[Any]] = {0: [numbered(n) for n in range(40)], 1: [{"n": 100 + n} for n in range(3)]}
    counts, outboxes = torch.zeros((2, 2), dtype=torch.int64), {}
    for worker, one_by_one in ((0, False), (1, True)):
        outboxes[worker] = messages(steps_of(worker, makes[worker]), worker, counts, 2, one_by_one=one_by_one)

    def as_torch_gives() -> Iterator[Message]:
        running = [outboxes[first], outboxes[1 - first]]
        while running:
            for one in list(running):
                if (message := next(one, None)) is None:
                    running.remove(one)
                else:
                    yield message

    found = [number_of(step.batch) for step in round_robin(as_torch_gives(), first, counts)]
    makes = {worker: [number_of(one) for one in made] for worker, made in makes.items()}
    expected: list[Any] = []
    for n in range(4):
        pair = [[*makes[0], None][n], [*makes[1], None][n]]
        expected += pair[::-1] if first else pair
    assert found == expected + makes[0][4:] + [None]


class Own:
    """A batch of a collator of its user, which pins itself."""

    pinned = False

    def pin_memory(self) -> "Own":
        self.pinned = True
        return self


def test_the_thread_of_pin_memory_pins_every_batch_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedBatch, "pin_memory", lambda batch: "pinned")
    steps = [
        Step(0, numbered(1), (0, "1"), [0], []),
        Step(0, None, (0, "2"), [], []),
        Step(0, Own(), (0, "3"), [2], []),
        BatchError("bad"),
    ]
    sent = list(messages(iter(steps), 0, torch.zeros((2, 1), dtype=torch.int64), 2, one_by_one=False))
    assert [len(message.entries) for message in sent] == [3, 1]
    pin: Any = torch.utils.data._utils.pin_memory.pin_memory
    row, end, own, error = [step for message in sent for step, _ in pin(message).entries]
    assert row == Step(0, "pinned", (0, "1"), [0], [])
    assert end == Step(0, None, (0, "2"), [], [])
    assert isinstance(error, BatchError)
    assert own.batch.pinned
    assert own[2:] == ((0, "3"), [2], [], False, ())


class Dicts(PaddingFreeCollator):
    """A collator of its user: batches of which nothing is known, with tensors that torch shares."""

    def collate(self, samples: Any) -> Any:
        return {"ids": super().collate(samples).input_ids}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_of_any_type_arrive_after_their_worker_ended(context: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context, "batch_size": 1}
    loader = DataflowLoader(MapDistributor(FEATURES), collator=Dicts(), **options)
    for _ in range({"fork": 2, "spawn": 1}[context]):
        found = []
        for batch in loader:
            time.sleep(0.02)
            found.append(batch["ids"][0, 0].item())
        assert sorted(found) == list(range(len(FEATURES)))


def test_an_epoch_leaves_no_descriptor_open() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    loader = DataflowLoader(MapDistributor(FEATURES), batch_size=1, num_workers=2, persistent_workers=True)
    counts = []
    for _ in range(3):
        list(loader)
        counts.append(descriptors())
    assert counts[1] == counts[2]


@pytest.mark.parametrize(
    ("error", "kind", "named"),
    [(ZeroDivisionError("item 3"), ZeroDivisionError, "worker process 0.*Traceback.*item 3"),
     (BatchError("item 3 is bad"), BatchError, "^item 3 is bad$")],
)  # fmt: skip
def test_an_error_of_a_worker_arrives_behind_the_steps_before_it(error: Exception, kind: type, named: str) -> None:
    broken = Broken(error)
    broken.read_ahead = 1
    loader = DataflowLoader(broken, batch_size=1, num_workers=2)
    found = []
    with pytest.raises(kind, match=f"(?s){named}"):
        for batch in loader.rest_of_epoch():
            found += batch.ids
    assert found == ["s0", "s0", "s1", "s1", "s2", "s2"]
    state = loader.state_dict()
    with pytest.raises(kind):  # again, from the state
        next(iter(loader.rest_of_epoch()))
    assert loader.state_dict() == state


def test_batches_of_workers_are_those_of_one_process() -> None:
    alone = [signature(batch) for batch in DataflowLoader(MapDistributor(FEATURES), batch_size=2)]
    batches = list(DataflowLoader(MapDistributor(FEATURES), batch_size=2, num_workers=1))
    assert [signature(batch) for batch in batches] == alone


def test_python_collects_garbage_between_batches_and_after_an_error() -> None:
    assert gc.isenabled()
    for _ in DataflowLoader(MapDistributor(FEATURES), batch_size=2):
        assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        list(DataflowLoader(Broken(ZeroDivisionError()), batch_size=2))
    assert gc.isenabled()
