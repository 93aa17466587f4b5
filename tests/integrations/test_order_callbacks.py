"""The order log of transformers.Trainer, over a run that continues from a checkpoint before its last step."""

from pathlib import Path
from typing import Any

import pytest
from transformers import DataCollatorWithFlattening, Trainer

from energon_packed import (
    ConfigError,
    DataflowLoader,
    MapDistributor,
    OrderLogCallback,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    packed_training_arguments,
)
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET, StopAt
from tests.internals import LoggedData, check_order


def trainer(kind: str, packs: Path, folder: Path, stop: int) -> Any:
    data: Any = PackedDataset(packs)
    log = folder / "order"
    if kind == "TrainerStream":
        data = TrainerStream(DataflowLoader(MapDistributor(data)), order_log=log)
    settings = QUIET | {"save_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = packed_training_arguments(str(folder), data, **settings | {"num_train_epochs": 1})
    given: dict[str, Any] = {"train_dataset": data, "data_collator": PaddingFreeCollator()}
    callbacks: list[Any] = [StopAt(stop)] if stop else []
    if kind == "Trainer":
        return Trainer(tiny_qwen2(), args, callbacks=[*callbacks, OrderLogCallback(log)], **given)
    own = {"order_log": log} if kind == "PackedTrainer" else {}
    return PackedTrainer(tiny_qwen2(), args, callbacks=callbacks, **given, **own)


@pytest.mark.parametrize("kind", ["Trainer", "PackedTrainer", "TrainerStream"])
def test_a_resumed_training_logs_each_sample_once(text_packs: list[Path], tmp_path: Path, kind: str) -> None:
    trainer(kind, text_packs[0], tmp_path, stop=3).train()
    resumed = trainer(kind, text_packs[0], tmp_path, stop=0)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    report = check_order(tmp_path / "order", LoggedData(text_packs[0]))
    packs = len(PackedDataset(text_packs[0]))
    assert report.problems == []
    # The last step of a TrainerStream has a batch of the next epoch.
    assert (report.complete, report.steps - packs % 2 * (kind == "TrainerStream"), report.replaced) == ([0], packs, 2)
    assert report.processes == ["1 rank", "1 rank after epoch 0, step 4"]


def test_a_collator_without_names_is_refused(text_packs: list[Path], tmp_path: Path) -> None:
    made = trainer("Trainer", text_packs[0], tmp_path, stop=1)
    made.train_dataset = [{"input_ids": [1, 2], "labels": [1, 2]}] * 4
    made.data_collator = DataCollatorWithFlattening()
    with pytest.raises(ConfigError, match="must be a Collator of energon-packed for an order log, got batches of"):
        made.train()
