"""Dropout of a resumed run: the weights equal those of the uninterrupted run, bit by bit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from energon_packed import (
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    TrainerStreamCallback,
    get_packed_loader,
    packed_training_arguments,
    prepare_loader,
)
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET, StopAt, digest

STEPS, SAVED = 6, 3


class Augmented(PaddingFreeCollator):
    """Draws random numbers for every row, in the process that reads."""

    def collate(self, samples: Any) -> Any:
        torch.rand(1), np.random.rand(), random.random()
        return super().collate(samples)


def energon(folder: Path, num_workers: int) -> Any:
    return get_packed_loader(folder, collator=Augmented(), epochs=1, num_workers=num_workers)


def dataflow(folder: Path, num_workers: int) -> Any:
    order = MapDistributor(PackedDataset(folder))
    return DataflowLoader(order, collator=Augmented(), batch_size=1, num_workers=num_workers)


@pytest.mark.parametrize(
    ("make", "num_workers", "accumulation", "kind"),
    [
        (energon, 0, 2, Trainer),
        (energon, 2, 1, PackedTrainer),
        (dataflow, 0, 1, PackedTrainer),
        (dataflow, 2, 2, Trainer),
    ],
)
def test_a_resumed_stream_has_the_dropout_of_the_uninterrupted_run(
    text_packs: list[Path],
    tmp_path: Path,
    make: Callable[[Path, int], Any],
    num_workers: int,
    accumulation: int,
    kind: type[Trainer],
) -> None:
    def trained(name: str, *callbacks: Any, dropout: float = 0.1, resume: bool = False, **arguments: Any) -> str:
        stream = TrainerStream(make(text_packs[0], num_workers))
        steps = {"max_steps": STEPS, "gradient_accumulation_steps": accumulation, "save_steps": SAVED}
        args = packed_training_arguments(str(tmp_path / name), stream, **QUIET | steps | arguments)
        if kind is Trainer:
            callbacks += (TrainerStreamCallback(stream),)
        trainer = kind(
            tiny_qwen2(dropout=dropout),
            args,
            train_dataset=stream,
            data_collator=PaddingFreeCollator(),
            callbacks=[*callbacks],
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / name / f"checkpoint-{SAVED}") if resume else None)
        return digest(trainer.model)

    complete = trained("complete", save_strategy="no")
    trained("parts", StopAt(SAVED))
    assert trained("parts", resume=True) == complete
    if not num_workers:
        assert trained("without", save_strategy="no", dropout=0.0) != complete, "dropout has no effect"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_of_accelerate_draws_nothing_from_the_states_of_the_training(
    text_packs: list[Path], num_workers: int
) -> None:
    """Three epochs, whose iterators of torch and Energon draw seeds, and a collator that draws numbers."""

    def drawn() -> tuple[float, float, float]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    def seeded() -> None:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    seeded()
    expected = [drawn() for _ in range(3)]
    loader = prepare_loader(Accelerator(cpu=True), energon(text_packs[0], num_workers))
    seeded()
    found = []
    for _ in range(3):
        assert list(loader)
        found.append(drawn())
    assert found == expected
