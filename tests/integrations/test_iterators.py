"""A loader has one stream of batches: each iterator continues after the last batch that any iterator returned."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState

from energon_packed import (
    BatchError,
    Consumed,
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    IterableDistributor,
    JointLoader,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PoolPacker,
    TrainerStream,
    TrainerStreamCallback,
    get_packed_loader,
    get_raw_loader,
    packed_training_arguments,
    prepare_loader,
)
from tests.loading.flows import FEATURES, energon_folder, feature
from tests.processes import run_python

Make = Callable[[Path], Any]


def pool(folder: Path, **options: Any) -> DataflowLoader:
    data = [feature(number % 13, 13 * (number // 13)) for number in range(39)]
    return DataflowLoader(IterableDistributor(data), packer=PoolPacker(24, pool_size=4), **options)


def records(folder: Path, **options: Any) -> DataflowConfig:
    settings = {"tokenizer": str(folder.parent / "tokenizer")}
    return DataflowConfig(
        dataset_path=str(folder.parent / "data.jsonl"), packing_length=14, processor_config=settings, **options
    )


def joint(folder: Path) -> JointLoader:
    loaders = {
        name: DataflowLoader(MapDistributor(FEATURES), batch_size=1, seed=seed) for seed, name in ((1, "a"), (2, "b"))
    }
    return JointLoader(loaders, {"a": 2, "b": 1})


LOADERS: dict[str, Make] = {
    "get_packed_loader": lambda folder: get_packed_loader(folder, epochs=1, num_workers=0),
    "get_packed_loader, workers": lambda folder: get_packed_loader(folder, epochs=1, num_workers=2),
    "get_packed_loader, without end": lambda folder: get_packed_loader(folder, num_workers=0),
    "DataflowLoader": lambda folder: DataflowLoader(MapDistributor(PackedDataset(folder)), batch_size=1),
    "DataflowLoader, workers": lambda folder: DataflowLoader(MapDistributor(FEATURES), batch_size=1, num_workers=2),
    "DataflowLoader, pool": pool,
    "DataflowLoader, pool, workers": lambda folder: pool(folder, num_workers=2),
    "DataflowLoader, EnergonDistributor": lambda folder: DataflowLoader(EnergonDistributor(folder), batch_size=1),
    "PackedIterableDataset": lambda folder: PackedIterableDataset(records(folder)),
    "get_raw_loader, planned": lambda folder: get_raw_loader(records(folder, streaming=False)),
    "JointLoader": joint,
    "Consumed": lambda folder: Consumed(DataflowLoader(MapDistributor(FEATURES), batch_size=1)),
    "prepare_loader": lambda folder: prepare_loader(
        Accelerator(cpu=True), DataflowLoader(MapDistributor(FEATURES), batch_size=1)
    ),
    "TrainerStream": lambda folder: TrainerStream(DataflowLoader(MapDistributor(FEATURES), batch_size=1)),
}
LATEST = ("prepare_loader", "TrainerStream")  # they are read in advance, or have no end


def tokens(batch: Any) -> Any:
    """The same for a PackedBatch, the inputs of a model, and a batch of a JointLoader."""
    batch = batch[1] if isinstance(batch, tuple) else batch
    return (batch["input_ids"] if isinstance(batch, dict) else batch.input_ids).tolist()


def first(loader: Any, count: int) -> list[Any]:
    return [tokens(batch) for batch in islice(loader, count)]


@pytest.mark.parametrize("kind", LOADERS)
def test_every_iterator_continues_after_the_last_batch(packs: Path, kind: str) -> None:
    make = LOADERS[kind]
    expected = first(make(packs), 8)
    loader = make(packs)
    left = iter(loader)
    found = [tokens(next(iter(loader))), tokens(next(left)), tokens(next(iter(loader)))]
    del left
    found += first(loader, 2) + first(loader, 3)
    assert found == expected


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind not in LATEST])
def test_a_state_counts_the_batches_that_all_iterators_returned(packs: Path, kind: str) -> None:
    make = LOADERS[kind]
    expected = first(make(packs), 8)
    loader = make(packs)
    iterators = [iter(loader), iter(loader)]
    found = [tokens(next(iterators[turn % 2])) for turn in range(5)]
    assert found == expected[:5]
    resumed = make(packs)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert first(resumed, 3) == expected[5:]


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "without end" not in kind and kind not in LATEST])
def test_iterators_of_one_epoch_return_its_batches_once(packs: Path, kind: str) -> None:
    reference = LOADERS[kind](packs)
    expected = [[tokens(batch) for batch in reference] for _ in range(2)]
    loader = LOADERS[kind](packs)
    iterators = [iter(loader), iter(loader)]
    found = []
    while (batch := next(iterators[len(found) % 2], None)) is not None:
        found.append(tokens(batch))
    assert found == expected[0]
    assert [next(iterator, None) for iterator in iterators] == [None, None]
    assert [tokens(batch) for batch in loader] == expected[1]


def test_a_prepared_loader_has_only_its_last_iterator(packs: Path) -> None:
    """Accelerate has read a batch of each iterator in advance, which must not be returned twice."""
    loader = LOADERS["prepare_loader"](packs)
    expected = first(LOADERS["prepare_loader"](packs), 4)
    earlier, later = iter(loader), iter(loader)
    found = [tokens(next(earlier)), tokens(next(later))]
    with pytest.raises(BatchError, match="A later iterator of this loader continues its batches"):
        next(earlier)
    assert found + [tokens(next(later)) for _ in range(2)] == expected


def test_a_second_training_starts_with_the_batches_that_the_first_had_only_read(packs: Path) -> None:
    expected = first(LOADERS["TrainerStream"](packs), 10)
    stream = LOADERS["TrainerStream"](packs)
    callback = TrainerStreamCallback(stream)
    arguments = packed_training_arguments(str(packs.parent / "run"), stream, max_steps=4, report_to=[], use_cpu=True)
    found = []
    for _ in range(2):
        callback.on_train_begin(arguments, TrainerState(), TrainerControl())
        read = first(stream, 6)
        for batch in read[:4]:
            found.append(batch)
            callback.on_step_end(arguments, TrainerState(), TrainerControl())
    assert found == expected[:8]
    resumed = LOADERS["TrainerStream"](packs)
    resumed.consumed.load_state_dict(callback.state())
    assert first(resumed, 2) == expected[8:]


def test_loaders_of_several_threads_return_the_same_batches_as_loaders_of_one(packs: Path) -> None:
    expected = first(LOADERS["get_packed_loader"](packs), 99)
    kinds = ["get_packed_loader", "DataflowLoader, EnergonDistributor"] * 3
    loaders = [LOADERS[kind](packs) for kind in kinds]
    start = threading.Barrier(len(loaders))

    def read(loader: Any) -> list[Any]:
        start.wait()
        return first(loader, 99)

    with ThreadPoolExecutor(len(loaders)) as threads:
        found = list(threads.map(read, loaders))
    assert found[0::2] == [expected] * 3
    assert sorted(found[1]) == sorted(expected)
    assert found[1::2] == [found[1]] * 3


def test_a_process_that_is_forked_during_a_read_of_another_thread_can_read(packs: Path) -> None:
    code = """
import os, sys, threading, time
from energon_packed import PaddingFreeCollator, get_packed_loader

class Slow(PaddingFreeCollator):
    def collate(self, samples):
        reading.set()
        time.sleep(0.05)
        return super().collate(samples)

reading = threading.Event()
loader = get_packed_loader(sys.argv[1], collator=Slow(), epochs=1, num_workers=0)
thread = threading.Thread(target=lambda: next(iter(loader)))
thread.start()
reading.wait()
child = os.fork()
if not child:
    os._exit(len(list(get_packed_loader(sys.argv[1], epochs=1, num_workers=0))))
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code, packs).stdout.split() == ["13"]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory, text_tokenizer_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("iterators")
    (folder / "tokenizer").symlink_to(text_tokenizer_dir)
    return energon_folder(folder)
