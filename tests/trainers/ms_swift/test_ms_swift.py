"""ms-swift: its own training on packed data and on a stream, as on docs/trainers.md."""

from pathlib import Path

import pytest

from tests.trainers.harness import Data, prove

KINDS = {
    "": "[ms-swift](#ms-swift), `PackedSft`",
    "stream": "[ms-swift](#ms-swift), `PackedSft`, `TrainerStream`",
}


@pytest.mark.parametrize("kind", KINDS)
def test_ms_swift_is_exact(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    packages = ("ms-swift", "transformers", "accelerate")
    prove("ms_swift", trainer_data, tmp_path, kind=kind, title=KINDS[kind], packages=packages).assert_exact()
