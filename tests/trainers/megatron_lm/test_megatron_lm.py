"""Megatron-LM's own `pretrain`, from a checkout, as it is not a package."""

import os
from pathlib import Path

from tests.trainers.harness import Data, prove


def test_pretrain_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    checkout = os.environ.get("MEGATRON_LM", "")
    message = f"MEGATRON_LM must be a checkout of Megatron-LM at core_v0.19.0, got {checkout!r}. Set it."
    assert Path(checkout or "/", "pretrain_gpt.py").is_file(), message
    title = "Megatron-LM core_v0.19.0 `pretrain`, layout `megatron-gpt`"
    prove("megatron_lm", trainer_data, tmp_path, title=title, packages=()).assert_exact(endless=True)
