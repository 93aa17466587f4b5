"""ms-swift: its own training on packed data, as on docs/trainers.md."""

from pathlib import Path

from tests.trainers.harness import Data, prove


def test_ms_swift_is_exact(trainer_data: Data, tmp_path: Path) -> None:
    packages = ("ms-swift", "transformers", "accelerate")
    title = "[ms-swift](#ms-swift), `PackedSft`"
    prove("ms_swift", trainer_data, tmp_path, title=title, packages=packages).assert_exact()
