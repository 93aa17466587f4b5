"""axolotl: its own training on packed data, as on docs/trainers.md."""

from pathlib import Path

from tests.trainers.harness import Data, prove


def test_axolotl_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    packages = ("axolotl", "transformers", "accelerate")
    title = "[axolotl](#axolotl), `PackedPlugin`"
    prove("axolotl", trainer_data, tmp_path, title=title, packages=packages).assert_exact()
