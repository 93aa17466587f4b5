"""Megatron-Bridge's `gpt_step`."""

from pathlib import Path

from tests.trainers.harness import Data, prove


def test_gpt_step_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    title = "Megatron-Bridge `gpt_step`, layout `bridge`"
    packages = ("megatron-bridge", "megatron-core")
    prove("megatron_bridge", trainer_data, tmp_path, title=title, packages=packages).assert_exact(endless=True)
