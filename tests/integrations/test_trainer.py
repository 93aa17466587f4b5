"""The stock transformers.Trainer trains on a PackedDataset: epochs, no max_steps, two processes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from energon_packed import PackedDataset


def test_trainer_in_two_processes(pack_demo: Any, tokenizer_dir: Path, encoder: Any, tmp_path: Path) -> None:
    data = pack_demo(seq_len=512).shards
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    command += ["-m", "tests.integrations.trainer_script", str(data), str(tokenizer_dir), str(tmp_path)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    dataset = PackedDataset(data, encoder)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    steps_per_epoch = -(-len(dataset) // 4)  # 2 packs on each of 2 processes
    assert [rank["steps"] for rank in ranks] == [2 * steps_per_epoch] * 2
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]

    everything = {sample.id for index in range(len(dataset)) for sample in dataset[index]}
    for epoch in (0, 1):
        part = slice(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        seen = Counter(name for rank in ranks for batch in rank["seen"][part] for name in batch)
        assert set(seen) == everything
        # accelerate fills the last step up with packs from the start, and nothing else is seen twice.
        again = sum(seen.values()) - len(everything)
        assert again <= max(len(dataset[index]) for index in range(len(dataset))) * 3
    assert ranks[0]["seen"][0] != ranks[0]["seen"][steps_per_epoch]  # shuffled anew
