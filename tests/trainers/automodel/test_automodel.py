"""NeMo Automodel with the recipe of docs/trainers.md."""

from pathlib import Path

from tests.trainers.harness import Data, prove


def test_automodel_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    title = "[NeMo Automodel](#nemo-automodel), `AutomodelStream`, DDP"
    result = prove("automodel", trainer_data, tmp_path, title=title, packages=("nemo-automodel",), dropout=0.0)
    result.assert_exact(dropout="differs")
