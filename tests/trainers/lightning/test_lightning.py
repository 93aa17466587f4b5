"""Lightning and Fabric."""

from pathlib import Path

import pytest

from tests.trainers.blocks import check_block
from tests.trainers.harness import Data, prove

KINDS = {
    "energon": "Lightning, `Consumed` over `get_packed_loader`",
    "dataflow": "Lightning, `Consumed` over `DataflowLoader`",
    "fabric": "Fabric, `Consumed`",
}


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_is_exact(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    # Lightning and Fabric save no states of random number generators.
    result = prove(
        "lightning", trainer_data, tmp_path, kind=kind, title=KINDS[kind], packages=("lightning",), dropout=0.0
    )
    result.assert_exact(dropout="differs")


def test_lightning_reads_every_pack_of_a_data_loader(trainer_data: Data, tmp_path: Path) -> None:
    result = prove("lightning", trainer_data, tmp_path, kind="map", title="", packages=(), resume=False)
    result.assert_every_sample(repeats=True)
    result.assert_losses()
    result.assert_gradients()


@pytest.mark.parametrize(("name", "left"), [("lightning", "checkpoints"), ("fabric", "checkpoint")])
def test_block(name: str, left: str, short_packs: Path, tmp_path: Path) -> None:
    check_block(name, left, short_packs, tmp_path)
