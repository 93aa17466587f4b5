"""ms-swift: its own training on packed data and on a stream, as on docs/trainers.md."""

from pathlib import Path

import pytest
from swift.dataloader.dispatcher import DataLoaderDispatcher

from energon_packed import ConfigError, DataflowLoader, MapDistributor
from tests.trainers.harness import Data, prove

KINDS = {
    "": "[ms-swift](#ms-swift), `PackedSft`",
    "stream": "[ms-swift](#ms-swift), `PackedSft`, `TrainerStream`",
}


@pytest.mark.parametrize("kind", KINDS)
def test_ms_swift_is_exact(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    packages = ("ms-swift", "transformers", "accelerate")
    prove("ms_swift", trainer_data, tmp_path, kind=kind, title=KINDS[kind], packages=packages).assert_exact()


def test_the_dispatcher_reads_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it leaves a loader of a rank alone, `loading/resharding.py` must refuse it."""
    monkeypatch.setattr(DataLoaderDispatcher, "world_size", 2)
    items = [{"id": str(number), "input_ids": [5, 6]} for number in range(8)]
    loader = DataflowLoader(MapDistributor(items), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="DataLoaderDispatcher would shard it again"):
        list(DataLoaderDispatcher(loader))
