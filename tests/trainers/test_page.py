"""The blocks of docs/trainers.md that need two processes or other packages, run with torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.launched import ROOT, tiny_qwen2

for name in ("lightning", "deepspeed"):
    pytest.importorskip(name, reason="make test-trainers installs it")
_BLOCK = re.compile(r'^```py title="(\w+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
BLOCKS = dict(_BLOCK.findall((ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "left"), [("lightning", "checkpoints"), ("fabric", "checkpoint")])
def test_block_of_lightning(name: str, left: str, text_packs: list[Path], tmp_path: Path) -> None:
    run(name, text_packs[0], tmp_path)
    assert (tmp_path / left).exists()


def test_block_of_deepspeed(text_packs: list[Path], tmp_path: Path) -> None:
    run("deepspeed", text_packs[0], tmp_path)
    assert (tmp_path / "checkpoint" / "latest").exists()


def test_block_of_ddp(text_packs: list[Path], tmp_path: Path) -> None:
    run("ddp", text_packs[0], tmp_path)
    assert {path.name for path in tmp_path.glob("loader-*.pt")} == {"loader-0.pt", "loader-1.pt"}


def run(name: str, packs: Path, folder: Path) -> None:
    """Run a block in a folder with `tokens` and `model`."""
    (folder / "tokens").symlink_to(packs)
    tiny_qwen2().save_pretrained(folder / "model")
    (folder / "block.py").write_text(f'if __name__ == "__main__":\n{_indented(BLOCKS[name])}', encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29529"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*command, "block.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[max(0, done.stderr.find("Traceback")) :][:3000]


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in code.splitlines())
