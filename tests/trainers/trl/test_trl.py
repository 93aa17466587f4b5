"""SFTTrainer of TRL."""

from pathlib import Path

import pytest

from tests.trainers.harness import Data, prove

KINDS = {"packed": "[TRL](#trl) `SFTTrainer`, `PackedTrainerMixin`", "hf": "[TRL](#trl) `SFTTrainer`, `to_hf()`"}


@pytest.mark.parametrize("kind", KINDS)
def test_trl_is_exact(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    packages = ("trl", "transformers", "accelerate")
    result = prove("trl", trainer_data, tmp_path, kind=kind, title=KINDS[kind], packages=packages)
    result.assert_exact(repeats=kind == "hf")  # accelerate fills the last step with packs from the start
