"""Loaders that would give ranks the wrong packs: made before the process group, or split over ranks once more."""

from typing import Any

import pytest
import torch

from energon_packed import ChatEncoder, ConfigError, get_packed_loader
from tests.conftest import Packer
from tests.dataflow.test_ranks import run_ranks


def test_a_loader_before_the_process_group_is_refused(
    pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = pack_demo(sample_class="PackedTokensSample").shards
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2 and there is no process group.*or pass `rank`"):
        get_packed_loader(shards, encoder, num_workers=0)
    assert next(iter(get_packed_loader(shards, encoder, num_workers=0, rank=1, world_size=2))).num_samples
    monkeypatch.delenv("WORLD_SIZE")
    loader = get_packed_loader(shards, encoder, num_workers=0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"made as rank 0 of 1, and torch.distributed now says rank 1 of 2"):
        iter(loader)


SPLIT_AGAIN = """
import os
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
from accelerate import Accelerator, DataLoaderConfiguration
from energon_packed import ChatEncoder, ConfigError, get_packed_loader
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
    loader = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    assert names == {name for batch in loader for name in batch.ids}
