"""Lightning and Fabric with two processes: every row once an epoch, and exact resume from one checkpoint."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackedDataset
from tests.integrations.launched import launch

pytest.importorskip("lightning", reason="make test-trainers installs it")


@pytest.fixture(scope="module")
def ranks(text_packs: list[Path], tmp_path_factory: Any) -> list[Any]:
    return launch(
        "lightning_runs", text_packs[0], port=29525, out=tmp_path_factory.mktemp("lightning"), folder="trainers"
    )


@pytest.mark.parametrize("kind", ["energon", "dataflow"])
def test_lightning_and_fabric_have_every_row_once_an_epoch_and_resume(
    ranks: list[Any], text_packs: list[Path], kind: str
) -> None:
    data = PackedDataset(text_packs[0])
    rows = Counter(sum(int(sample.input_ids.sum()) for sample in data[number]) for number in range(len(data)))
    for run in (lambda rank: rank[kind]["complete"], lambda rank: rank[kind]["fabric"]["complete"]):
        epoch = len(run(ranks[0])) // 2
        for part in (slice(0, epoch), slice(epoch, None)):
            assert Counter(tokens for rank in ranks for tokens, _ in run(rank)[part]) == rows
    for rank in ranks:
        found = rank[kind]
        assert len(found["rests"]) == 3
        for step, rest in found["rests"].items():
            assert rest == found["complete"][int(step) :], f"Lightning, after step {step}"
        assert found["fabric"]["rest"] == found["fabric"]["complete"][2:]


def test_map_style_data_have_every_row_once_an_epoch(ranks: list[Any], text_packs: list[Path]) -> None:
    data = PackedDataset(text_packs[0])
    rows = Counter(sum(int(sample.input_ids.sum()) for sample in data[number]) for number in range(len(data)))
    epoch = len(data) // 2
    for part in (slice(0, epoch), slice(epoch, None)):
        assert Counter(tokens for rank in ranks for tokens in rank["map"][part]) == rows
