"""The output does not depend on workers and hash seeds; that it does not depend on kills is in `test_kills.py`."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = """
import sys
from pathlib import Path
from energon_packed import PackOptions, pack
source, out, tokenizer, workers, *flavors = sys.argv[1:]
for flavor in flavors:
    pack(PackOptions(
        inputs=(source,), output_dir=Path(out, flavor), tokenizer=Path(tokenizer), seq_len=2048,
        sample_class=flavor, workers=int(workers), max_packs_per_shard=20, max_reject_rate=0.2,
        split={"train": 0.9, "val": 0.1}, shard_prefix="pack"))
"""
FLAVORS = ("PackedCaptioningSample", "PackedTokensSample")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, demo: Any) -> Path:
    """3,000 records in several chunks, some of them broken, some with images."""
    rng = np.random.default_rng(0)
    with_images = [line for line in demo.jsonl.read_text().splitlines() if '"images/' in line]
    path = demo.jsonl.parent / "restart.jsonl"
    with path.open("w") as out:
        for number in range(3_000):
            if number % 150 == 0:
                out.write(with_images[number // 150 % len(with_images)] + "\n")
            elif number % 997 == 0:
                out.write('{"broken": \n')
            else:
                words = " ".join(rng.choice(["red", "kettle", "from", "the", "harbour"], rng.integers(60, 200)))
                out.write(json.dumps({"id": f"r{number}", "prompts": ["Repeat."], "captions": [words]}) + "\n")
    return path


@pytest.fixture(scope="module")
def builds(records: Path, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both flavors, packed by one and by two workers, in processes with other hash seeds."""
    folders = []
    for workers in (1, 2):
        folders.append(tmp_path_factory.mktemp("build"))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(records), folders[-1], tokenizer_dir, str(workers), *FLAVORS],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(workers)},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    return folders


def contents(out: Path) -> dict[str, Any]:
    """Everything that must not differ; `counters` and `tokenizer_engine` tell what this run did itself."""
    shards = out / "webdataset"
    found: dict[str, Any] = {p.name: p.read_bytes() for p in shards.glob("*.tar*")}
    with sqlite3.connect(shards / ".nv-meta" / "index.sqlite") as database:
        for table in ("samples", "sample_parts"):
            found[table] = database.execute(f"SELECT * FROM {table}").fetchall()
    manifest = json.loads((shards / ".nv-meta" / "packing.json").read_text())
    for name in ("counters", "tokenizer_engine"):
        manifest.pop(name)
    names = ("dataset.yaml", "split.yaml", ".info.json", "index.uuid", "sample_loader.py")
    found |= {name: (shards / ".nv-meta" / name).read_bytes() for name in names}
    leftovers = [p.name for p in [*shards.glob(".*.tmp"), *(shards / ".nv-meta").glob(".*.tmp")]]
    ledger = {name: (out / name).read_bytes() for name in ("rejects.jsonl", "lengths.parquet")}
    return found | ledger | {"manifest": manifest, "leftovers": leftovers}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_workers_and_hash_seeds_do_not_matter(builds: list[Path], flavor: str) -> None:
    outputs = []
    for folder in builds:
        outputs.append(contents(folder / flavor))
        assert len(list((folder / flavor).glob(".work/measure-*/*.arrow"))) > 5
    assert len([name for name in outputs[0] if name.endswith(".tar")]) > 5
    assert outputs[0] == outputs[1]
