"""`accelerate launch` with two processes, in one launch: four settings, and loaders that deal packs themselves."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackedDataset
from tests.integrations.launched import launch


@pytest.fixture(scope="module")
def ranks(text_packs: list[Path], tmp_path_factory: Any) -> list[Any]:
    out = tmp_path_factory.mktemp("accelerate")
    return launch("accelerate_runs", text_packs[0], out=out, launcher="accelerate")


@pytest.mark.parametrize("setting", ["False False", "True False"])
def test_every_sample_once_an_epoch(ranks: list[Any], text_packs: list[Path], setting: str) -> None:
    data = PackedDataset(text_packs[0])
    everything = {int(str(sample.id).split("-")[1]): 1 for number in range(len(data)) for sample in data[number]}
    assert Counter(name for rank in ranks for name in rank["settings"][setting]) == everything


@pytest.mark.parametrize("setting", ["False True", "True True"])
def test_dispatching_is_one_line_on_every_rank(ranks: list[Any], setting: str) -> None:
    for rank in ranks:
        message = rank["settings"][setting]
        assert message.startswith("`dispatch_batches=True` splits tensors between processes")
        assert "DataLoaderConfiguration(dispatch_batches=False)" in message
        assert "\n" not in message


@pytest.mark.parametrize("kind", ["energon", "dataflow"])
def test_loaders_of_a_rank_are_prepared_unsplit(ranks: list[Any], text_packs: list[Path], kind: str) -> None:
    data = PackedDataset(text_packs[0])
    rows = [sum(int(sample.input_ids.sum()) for sample in data[number]) for number in range(len(data))]
    for epoch in (0, 1):
        given = [batch for rank in ranks for batch in rank[kind]["epochs"][epoch]]
        assert sorted(tokens for tokens, _ in given) == sorted(rows)
    for rank in ranks:
        found = rank[kind]
        assert found["as it is"] is True
        first, second = found["epochs"]
        assert [last for _, last in first] == [False] * (found["length"] - 1) + [True]
        assert found["broken"] == first + second
        assert found["skipped"] == first[2:]
        stream = first + second
        assert len(found["resumed"]) == 4
        for used, rest in ((int(used), rest) for used, rest in found["resumed"].items()):
            end = found["length"] if used < found["length"] else 2 * found["length"]
            assert rest == stream[used:end], f"after {used} batches"
