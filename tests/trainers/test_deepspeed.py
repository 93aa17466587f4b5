"""DeepSpeed ZeRO-2 with two processes: every row once an epoch, and exact resume."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackedDataset
from tests.integrations.launched import launch

pytest.importorskip("deepspeed", reason="make test-trainers installs it")


def test_zero_2_has_every_row_once_an_epoch_and_resumes(text_packs: list[Path], tmp_path: Path) -> None:
    ranks: list[Any] = launch("deepspeed_runs", text_packs[0], port=29527, out=tmp_path, folder="trainers")
    data = PackedDataset(text_packs[0])
    rows = Counter(sum(int(sample.input_ids.sum()) for sample in data[number]) for number in range(len(data)))
    epoch = len(ranks[0]["complete"]) // 2
    for part in (slice(0, epoch), slice(epoch, None)):
        assert Counter(tokens for rank in ranks for tokens, _ in rank["complete"][part]) == rows
    assert Counter(tokens for rank in ranks for tokens in rank["map"]) == rows
    for rank in ranks:
        assert rank["rest"] == rank["complete"][2:]
