"""DeepSpeed with ZeRO stages 1 to 3 on the CPU."""

from pathlib import Path

import pytest

from tests.trainers.blocks import check_block
from tests.trainers.harness import Data, prove


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_exact(trainer_data: Data, tmp_path: Path, stage: int) -> None:
    # DeepSpeed saves no states of random number generators.
    title = f"DeepSpeed ZeRO-{stage}, `Consumed`"
    packages = ("deepspeed",)
    kind = f"stage {stage}"
    result = prove("deepspeed", trainer_data, tmp_path, kind=kind, title=title, packages=packages, dropout=0.0)
    result.assert_exact(dropout="differs")


def test_training_data_has_every_pack(trainer_data: Data, tmp_path: Path) -> None:
    result = prove("deepspeed", trainer_data, tmp_path, kind="training_data", title="", packages=(), resume=False)
    result.assert_every_sample(repeats=True)
    result.assert_losses()
    result.assert_gradients()


def test_block(short_packs: Path, tmp_path: Path) -> None:
    check_block("deepspeed", "checkpoint/latest", short_packs, tmp_path)
