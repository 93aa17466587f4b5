"""Run a block of a page with two ranks, and compare the gradient of its first step with the samples one by one."""

import json
from pathlib import Path

from tests.integrations.launched import launch, tiny_qwen2


def check_block(name: str, left: str, packs: Path, folder: Path, *, page: str = "trainers.md", rows: int = 4) -> None:
    """Check that the gradient of a block is that of the mean over all targets of its first step.

    Args:
        name: title of the block, which reads the folders `tokens` and `model`.
        left: file or folder that the block writes.
        packs: packed tokens, with at least `rows` packs for each rank.
        folder: an empty folder to run in.
        page: of the block.
        rows: micro batches of a step of each rank.

    Raises:
        AssertionError: the gradient differs, or the block failed.
    """
    (folder / "tokens").symlink_to(packs)
    tiny_qwen2().save_pretrained(folder / "model")
    jobs = {name: ("block", {"folder": str(folder), "page": page, "name": name})}
    for rank in launch("loss_runs", json.dumps(jobs), out=folder):
        assert rank[name]["error"] < 1e-5
        assert len(rank[name]["targets"]) == rows
    assert (folder / left).exists()
