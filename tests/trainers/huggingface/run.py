"""Trainer and PackedTrainer of Transformers, over a PackedDataset or a TrainerStream."""

import sys
from pathlib import Path
from typing import Any

from transformers import Trainer

from energon_packed import (
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    TrainerStreamCallback,
    get_packed_loader,
    packed_training_arguments,
)
from tests.trainers.recorder import RecordRows, Spec


def arguments(spec: Spec) -> dict[str, Any]:
    """Arguments of a Trainer for the settings of a run."""
    return {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": spec.accumulation,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",
        "num_train_epochs": spec.epochs,
        "max_grad_norm": 0.0,
    }


def main(spec: Spec) -> None:
    data: Any = PackedDataset(spec.packs)
    if spec.kind == "stream":
        data = TrainerStream(lambda: get_packed_loader(spec.packs, epochs=1, num_workers=0))
    trainer = (PackedTrainer if spec.kind == "packed" else Trainer)(
        spec.load_model(),
        packed_training_arguments(spec.checkpoints, data, **arguments(spec)),
        train_dataset=data,
        data_collator=PaddingFreeCollator(),
        callbacks=[TrainerStreamCallback(data)] if spec.kind == "stream" else [],
    )
    recorder = RecordRows(spec, trainer)
    trainer.train(resume_from_checkpoint=spec.resume and latest(spec))
    recorder.finish(trainer.model.state_dict())


def latest(spec: Spec) -> str:
    """The last checkpoint that is complete: `trainer_state.json` is written after the other files."""
    folders = Path(spec.checkpoints).glob("checkpoint-*")
    saved = {int(folder.name.split("-")[1]): folder for folder in folders if (folder / "trainer_state.json").exists()}
    return str(saved[max(saved)])


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
