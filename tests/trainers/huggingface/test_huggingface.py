"""Trainer and PackedTrainer of Transformers."""

from pathlib import Path

import pytest

from tests.trainers.harness import Data, prove

KINDS = {
    "packed": "Transformers `PackedTrainer`, `PackedDataset`",
    "stream": "Transformers `Trainer`, `TrainerStream`",
    "trainer": "Transformers `Trainer`, `PackedDataset`",
}


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_is_exact(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    result = prove(
        "huggingface", trainer_data, tmp_path, kind=kind, title=KINDS[kind], packages=("transformers", "accelerate")
    )
    result.assert_exact(repeats=kind == "trainer")  # accelerate fills the last step with packs from the start
