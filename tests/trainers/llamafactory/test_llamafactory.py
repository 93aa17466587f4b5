"""LLaMA-Factory: its `run_exp` and its trainer, over packed data."""

from pathlib import Path

from tests.trainers.harness import Data, prove


def test_llamafactory_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    packages = ("llamafactory", "transformers", "accelerate")
    prove("llamafactory", trainer_data, tmp_path, title="LLaMA-Factory", packages=packages).assert_exact()
