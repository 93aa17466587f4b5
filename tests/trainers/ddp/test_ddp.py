"""DDP loops over the loaders of this package."""

from pathlib import Path

import pytest

from tests.trainers.harness import Data, prove

LOADERS = {"energon": "DDP loop, `get_packed_loader`", "dataflow": "DDP loop, `DataflowLoader`"}


@pytest.mark.parametrize("kind", LOADERS)
def test_ddp_is_exact(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    prove("ddp", trainer_data, tmp_path, kind=kind, title=LOADERS[kind], packages=()).assert_exact()
