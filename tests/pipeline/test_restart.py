"""The output does not depend on workers, hash seeds, or how often the build was killed."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = """
import sys
from pathlib import Path
from energon_packed import PackOptions, pack
source, out, tokenizer, flavor, workers = sys.argv[1:]
options = PackOptions(
    inputs=(source,), output_dir=Path(out), tokenizer=Path(tokenizer), seq_len=2048,
    sample_class=flavor, workers=int(workers), max_packs_per_shard=40, max_reject_rate=0.2,
    split={"train": 0.9, "val": 0.1}, shard_prefix="pack")
options.encoder_loader.load()
print("ready", flush=True)
pack(options)
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, demo: Any) -> Path:
    """14,000 records in several chunks, some of them broken, some with images."""
    rng = np.random.default_rng(0)
    with_images = [line for line in demo.jsonl.read_text().splitlines() if '"images/' in line]
    path = demo.jsonl.parent / "restart.jsonl"
    with path.open("w") as out:
        for number in range(14_000):
            if number % 400 == 0:
                out.write(with_images[number // 400 % len(with_images)] + "\n")
            elif number % 997 == 0:
                out.write('{"broken": \n')
            else:
                words = " ".join(rng.choice(["red", "kettle", "from", "the", "harbour"], rng.integers(60, 200)))
                out.write(json.dumps({"id": f"r{number}", "prompts": ["Repeat."], "captions": [words]}) + "\n")
    return path


def start(source: Path, out: Path, tokenizer: Path, *, workers: int, flavor: str, seed: str = "0") -> Any:
    """A build in a process of its own, waited for until it begins."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(out), str(tokenizer), flavor, str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def finish(process: Any) -> float:
    begin = time.monotonic()
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert out == "done\n"
    return time.monotonic() - begin


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


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
def test_workers_and_hash_seeds_do_not_matter(records: Path, tokenizer_dir: Path, tmp_path: Path, flavor: str) -> None:
    outputs = []
    for number, (workers, seed) in enumerate([(1, "0"), (2, "1"), (2, "2")]):
        out = tmp_path / str(number)
        finish(start(records, out, tokenizer_dir, workers=workers, flavor=flavor, seed=seed))
        outputs.append(contents(out))
    assert len([name for name in outputs[0] if name.endswith(".tar")]) > 5
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
def test_kills_change_nothing(records: Path, tokenizer_dir: Path, tmp_path: Path, flavor: str) -> None:
    finish(start(records, tmp_path / "calm", tokenizer_dir, workers=2, flavor=flavor))
    expected = contents(tmp_path / "calm")
    chunks = len(list((tmp_path / "calm").glob(".work/measure-*/*.arrow")))
    shards = len([name for name in expected if name.endswith(".tar")])
    assert min(chunks, shards) > 5
    rng = random.Random(1)
    out = tmp_path / "killed"
    measuring, writing = 0, 0
    for _ in range(40):
        process = start(records, out, tokenizer_dir, workers=2, flavor=flavor)
        before = count_files(out)
        # Until something more is there, and then a little: while measuring it is a chunk, later a shard.
        enough = sum(before) + (rng.randint(1, chunks // 5) if before[0] < chunks else rng.randint(1, 2))
        while process.poll() is None and sum(count_files(out)) < enough:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        after = count_files(out)
        measuring += before[0] < after[0] < chunks
        writing += 0 < after[1] < shards
        if after[1] == shards:  # too late: from the beginning again
            shutil.rmtree(out)
        if measuring + writing >= 6 and measuring > 1 and writing > 0:
            break
    else:
        pytest.fail(f"only {measuring} kills hit measuring and {writing} writing")
    finish(start(records, out, tokenizer_dir, workers=2, flavor=flavor))
    assert contents(out) == expected


def count_files(out: Path) -> tuple[int, int]:
    """(measured chunks, shards) in an output folder."""
    return len(list(out.glob(".work/measure-*/*.arrow"))), len(list(out.glob("webdataset/*.tar")))


def test_no_worker_outlives_a_killed_build(records: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    process = start(records, tmp_path / "out", tokenizer_dir, workers=2, flavor="PackedCaptioningSample")
    children: list[str] = []
    while not children and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)
