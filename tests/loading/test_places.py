"""Loaders that would give ranks the wrong packs: made before the process group, or split over ranks once more."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from energon_packed import ChatEncoder, ConfigError, DataflowLoader, MapDistributor, get_packed_loader
from tests.conftest import Packer
from tests.loading.flows import FEATURES
from tests.processes import run_ranks


@pytest.mark.parametrize("kind", ["energon", "dataflow"])
def test_a_loader_before_the_process_group_is_refused(
    pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shards = pack_demo(sample_class="PackedTokensSample").shards

    def new_loader(**place: Any) -> Any:
        if kind == "dataflow":
            return DataflowLoader(MapDistributor(FEATURES), **place)
        return get_packed_loader(shards, encoder, num_workers=0, **place)

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2 but torch.distributed is not initialized.*or pass `rank`"):
        new_loader()
    assert next(iter(new_loader(rank=1, world_size=2))).num_samples
    monkeypatch.delenv("WORLD_SIZE")
    loader = new_loader()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.raises(ConfigError, match=r"created as rank 0 of 1, but torch.distributed now reports rank 1 of 2"):
        next(iter(loader))
    loader = new_loader()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"created as rank 1 of 2, but torch.distributed now reports rank 0 of 1"):
        next(iter(loader))


def test_a_loader_over_the_data_of_a_dataflow_is_refused() -> None:
    loader = DataflowLoader(MapDistributor(FEATURES), batch_size=2)
    assert len(list(loader)) == 7
    with pytest.raises(ConfigError, match="Another DataLoader is iterating .* do not pass it to accelerator.prepare"):
        list(torch.utils.data.DataLoader(loader.dataset, batch_size=None))  # what accelerator.prepare makes of it
    assert len(list(loader)) == 7


class DataLoaderDispatcher:
    """The part of ms-swift 4.6's `swift/dataloader/dispatcher.py` that reads: it knows ranks by `world_size`."""

    def __init__(self, base_dataloader: Any, world_size: int) -> None:
        self.base_dataloader = base_dataloader
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader


def test_a_dispatcher_of_ms_swift_is_refused() -> None:
    loader = DataflowLoader(MapDistributor(FEATURES), batch_size=2, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="DataLoaderDispatcher would shard it again"):
        list(DataLoaderDispatcher(loader, 2))
    whole = DataflowLoader(MapDistributor(FEATURES), batch_size=2, rank=0, world_size=1)
    assert len(list(DataLoaderDispatcher(whole, 2))) == 7


SPLIT_AGAIN = """
import os
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
from accelerate import Accelerator, DataLoaderConfiguration
from energon_packed import ChatEncoder, ConfigError, DataflowLoader, MapDistributor, get_packed_loader
encoder = ChatEncoder.from_pretrained(sys.argv[5])

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, **place):
        self.place = place
    def __iter__(self):
        for batch in get_packed_loader(sys.argv[4], encoder, epochs=1, num_workers=0, **self.place):
            yield batch.ids

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
Loader = torch.utils.data.DataLoader
prepare = lambda data: accelerator.prepare(Loader(data, batch_size=1, collate_fn=lambda items: items[0]))
try:
    list(prepare(Stream()))
except ConfigError as error:
    print("refused", "IterableDatasetShard" in str(error))
print(*[name for ids in prepare(Stream(rank=0, world_size=1)) for name in ids])
features = [{"id": str(number), "input_ids": [5, 6]} for number in range(8)]

class Flow(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(DataflowLoader(MapDistributor(features)))
try:
    list(prepare(Flow()))
except ConfigError as error:
    print("IterableDatasetShard" in str(error))
"""


def test_a_second_split_by_accelerate_is_refused(
    pack_demo: Packer, encoder: ChatEncoder, tokenizer_dir: Any, tmp_path: Any
) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    outputs = run_ranks(SPLIT_AGAIN, 2, tmp_path / "store", result.shards, tokenizer_dir)
    names: set[str] = set()
    for out in outputs:
        lines = out.splitlines()
        assert lines[0] == "refused True"
        names |= set(lines[1].split())
        assert lines[2:] == ["True"]
    loader = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    assert names == {name for batch in loader for name in batch.ids}


DISPATCHED = """
import json, os
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", OMP_NUM_THREADS="1")
from accelerate import Accelerator, DataLoaderConfiguration
from energon_packed import ConfigError, DataflowConfig, EncodedSample, PaddingFreeCollator, plan_in_memory
from tests.loading.flows import FEATURES

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, items):
        self.items = items
    def __iter__(self):
        yield from self.items

collator = PaddingFreeCollator()
planned = plan_in_memory(DataflowConfig(dataset_path=sys.argv[4], packing_length=1024, processor_config=sys.argv[5]))
packs = [[sample] for sample in collator.collate(planned[0]).split()]
found = {}
for split in (False, True):
    config = DataLoaderConfiguration(split_batches=split, dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    for name, data, options in (
        ("PlannedDataset", planned, {"collate_fn": collator}),
        ("PlannedDataset, custom collate_fn", planned, {"collate_fn": lambda packs: collator.collate(packs[0])}),
        ("iterable of packs", Stream(packs), {"collate_fn": collator}),
        ("iterable of packs, forked", Stream(packs), {"collate_fn": collator, "num_workers": 1}),
        ("iterable of packs, spawned", Stream(packs), {"collate_fn": collator, "num_workers": 1,
                                                       "multiprocessing_context": "spawn"}),
        ("iterable of features", Stream(FEATURES), {"collate_fn": collator}),
        ("list of packs", packs, {"collate_fn": collator}),
    ):
        try:
            for _ in accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2, **options)):
                pass
            found[f"{name}, {split}"] = "accepted"
        except ConfigError as error:
            found[f"{name}, {split}"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_dispatched_packs_are_refused_on_every_rank(demo: Any, tokenizer_dir: Any, tmp_path: Any, ranks: int) -> None:
    for out in run_ranks(DISPATCHED, ranks, tmp_path / "store", demo.jsonl, tokenizer_dir):
        found = json.loads(out.splitlines()[-1])
        assert len(found) == 14
        for kind, message in found.items():
            assert message.startswith("`dispatch_batches=True` splits tensors between processes"), kind
            assert "\n" not in message
