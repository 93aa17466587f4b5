"""LLaMA-Factory: its own training on packed data, as on docs/trainers.md."""

from pathlib import Path

from tests.trainers.harness import Data, prove


def test_llamafactory_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    packages = ("llamafactory", "transformers", "accelerate")
    title = "[LLaMA-Factory](#llama-factory), `PackedTrainerMixin`"
    prove("llamafactory", trainer_data, tmp_path, title=title, packages=packages).assert_exact()
