"""Cases of test_arguments.py: loaders as `train_dataset`, in the process of the trainer and in a worker."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from energon_packed import (
    ConfigError,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    get_packed_loader,
)
from tests.integrations.launched import tiny_qwen2
from tests.integrations.test_arguments import made


@pytest.mark.parametrize("kind", [Trainer, PackedTrainer])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: get_packed_loader(path, num_workers=0, epochs=1),
        lambda path: get_packed_loader(path, num_workers=0),
        lambda path: DataflowLoader(MapDistributor(PackedDataset(path))),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_is_not_a_train_dataset(
    text_packs: list[Path], tmp_path: Path, kind: Any, make: Any, num_workers: int
) -> None:
    args = made(tmp_path, max_steps=1, remove_unused_columns=False, dataloader_num_workers=num_workers)
    with pytest.raises((ConfigError, TypeError), match=r"TrainerStream\(loader\)") as raised:
        kind(tiny_qwen2(), args, train_dataset=make(text_packs[0]), data_collator=PaddingFreeCollator()).train()
    assert "\n" not in str(raised.value)
