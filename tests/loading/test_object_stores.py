"""Loaders of datasets in an object store yield the batches of the local folder, and their errors name the URL."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    ChatEncoder,
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    MapDistributor,
    PackedDataset,
    get_packed_loader,
    get_raw_loader,
)
from tests.conftest import Packer
from tests.internals import DemoDataset
from tests.loading.flows import signature
from tests.storage import Store

Places = tuple[Path, str]
"""A dataset folder, or an input file, and its copy in the store."""


@pytest.fixture
def packed(store: Store, pack_demo: Packer) -> Places:
    folder = pack_demo(max_packs_per_shard=2).shards
    return folder, store.put_folder("out/webdataset", folder)


LOADERS: dict[str, Callable[..., Any]] = {
    "map": lambda path, encoder, workers: DataflowLoader(
        MapDistributor(PackedDataset(path, encoder)), num_workers=workers
    ),
    "energon": lambda path, encoder, workers: DataflowLoader(EnergonDistributor(path), encoder, num_workers=workers),
    "packed_loader": lambda path, encoder, workers: get_packed_loader(path, encoder, num_workers=workers, epochs=1),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_states_are_those_of_the_local_folder(
    packed: Places, encoder: ChatEncoder, kind: str, workers: int
) -> None:
    local, remote = (LOADERS[kind](path, encoder, workers) for path in packed)
    states = []
    for expected, batch in zip(local, remote, strict=True):
        assert signature(batch) == signature(expected)
        states.append((local.state_dict(), remote.state_dict()))
        assert states[-1][0] == states[-1][1]
    assert len(states) > 3


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_resumes_at_every_step(packed: Places, encoder: ChatEncoder, kind: str) -> None:
    expected = [signature(batch) for batch in LOADERS[kind](packed[0], encoder, 0)]
    loader = LOADERS[kind](packed[1], encoder, 0)
    for step, _ in enumerate(itertools.islice(loader, 4), 1):
        resumed = LOADERS[kind](packed[1], encoder, 0)
        resumed.load_state_dict(loader.state_dict())
        assert signature(next(iter(resumed))) == expected[step]


@pytest.mark.parametrize("streaming", [True, False])
def test_raw_records_are_read_from_the_store(
    store: Store, demo: DemoDataset, tokenizer_dir: Path, streaming: bool
) -> None:
    store.put_folder("raw/images", demo.jsonl.parent / "images")
    url = store.put("raw/data.jsonl", demo.jsonl.read_bytes())
    batches = []
    for path in (str(demo.jsonl), url):
        loader = get_raw_loader(
            DataflowConfig(
                dataset_path=path,
                packing_length=1024,
                tokenizer=tokenizer_dir,
                streaming=streaming,
                max_reject_rate=0.2,
            ),
            num_workers=2,
        )
        batches.append([signature(batch) for batch in loader])
    assert batches[1] == batches[0]
    assert len(batches[0]) > 3
