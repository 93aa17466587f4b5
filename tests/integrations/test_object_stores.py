"""Trainers read datasets in an object store as they read the local folder."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackedDataset, PackedTrainer, PaddingFreeCollator, packed_training_arguments
from tests.conftest import Packer
from tests.integrations.launched import tiny_qwen2
from tests.internals import DemoDataset, global_loader
from tests.loading.flows import signature
from tests.storage import Store


@pytest.fixture
def places(store: Store, pack_demo: Packer, demo: DemoDataset, text_tokenizer_dir: Path, tmp_path: Path) -> list[str]:
    lines = [line for line in demo.jsonl.read_bytes().splitlines() if b"image" not in line and b"broken" not in line]
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(lines[:30]))
    options = {"inputs": (str(tmp_path / "data.jsonl"),), "tokenizer": text_tokenizer_dir, "seq_len": 256}
    folder = pack_demo(**options, sample_class="PackedTokensSample", max_reject_rate=1.0).shards
    return [str(folder), store.put_folder("trained/webdataset", folder)]


def test_packed_trainer_has_the_losses_of_the_local_folder(places: list[str], tmp_path: Path) -> None:
    losses = []
    for place in places:
        data = PackedDataset(place)
        settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no"}
        args = packed_training_arguments(str(tmp_path), data, max_steps=2, **settings)
        trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=PaddingFreeCollator())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_the_loader_of_the_megatron_provider_has_the_batches_of_the_local_folder(places: list[str]) -> None:
    local, remote = (
        [signature(batch) for batch in itertools.islice(global_loader(place, None, rank=1, world_size=2), 3)]
        for place in places
    )
    assert local == remote
