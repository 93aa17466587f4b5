"""Blocks of docs/trainers.md that need other packages, in two processes: the gradient is the mean of the step."""

import json
from pathlib import Path

import pytest

from tests.integrations.launched import launch, tiny_qwen2

for name in ("lightning", "deepspeed"):
    pytest.importorskip(name, reason="make test-trainers installs it")


@pytest.mark.parametrize(
    ("name", "left"), [("lightning", "checkpoints"), ("fabric", "checkpoint"), ("deepspeed", "checkpoint/latest")]
)
def test_block_averages_over_all_targets_of_a_step(name: str, left: str, short_packs: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").symlink_to(short_packs)
    tiny_qwen2().save_pretrained(tmp_path / "model")
    jobs = {name: ("block", {"folder": str(tmp_path), "page": "trainers.md", "name": name})}
    for rank in launch("loss_runs", json.dumps(jobs), port=29529, out=tmp_path):
        assert rank[name]["error"] < 1e-5
        assert len(rank[name]["targets"]) == 4
    assert (tmp_path / left).exists()
