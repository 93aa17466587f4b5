"""torchtitan's Trainer."""

import contextlib
from pathlib import Path
from typing import Any

from tests.docs.pages import code_block
from tests.trainers.harness import Data, prove


def test_torchtitan_is_exact(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = Data(tmp_path / "data", "qwen3")
    title = "[torchtitan](#torchtitan), `PackedDataLoader`, FSDP"
    result = prove("torchtitan", data, tmp_path, title=title, packages=("torchtitan",), dropout=0.0)
    result.assert_exact(dropout="not in its models")


def test_block(trainer_data: Data, tmp_path: Path) -> None:
    (tmp_path / "tokens").symlink_to(trainer_data.folder / "packs")
    names: dict[str, Any] = {}
    exec(compile(code_block("trainers.md", "torchtitan"), "torchtitan", "exec"), names)
    config = names["qwen3_packed"]()
    with contextlib.chdir(tmp_path):
        loader = config.dataloader.build(
            dp_world_size=2, dp_rank=0, tokenizer=None, seq_len=512, local_batch_size=3, snapshot_every_n_steps=10
        )
        inputs, labels = next(iter(loader))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (3, 512)
    tokens = inputs["input"].roll(-1, dims=1)
    assert labels[labels != -100].equal(tokens[labels != -100]), "labels are the next tokens"
