"""The Ray engine on a real cluster of three nodes: the same bytes, whatever happens to a node."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackOptions, Progress, pack
from tests.conftest import Packer
from tests.internals import main
from tests.pipeline.embedded import rows, write_parquet
from tests.pipeline.faults import ROOT
from tests.pipeline.undisturbed import Build, chunks, shards_done
from tests.pipeline.undisturbed import contents as packed_files
from tests.video_demo import VideoDemo

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

_NODES: list[Any] = []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    # Only functions of atexit refer to the nodes later. A process that multiprocessing of Python 3.13 forks drops the
    # functions and ends with SIGSEGV, because a node closes connections whose threads are not in that process.
    _NODES.extend(cluster.list_all_nodes())
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def contents(root: Path) -> dict[str, str]:
    """Digest of every file of the result."""
    files = [*(root / "webdataset").glob("*"), root / "lengths.parquet", root / "rejects.jsonl"]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}


class _KillsANode(Progress):
    """Takes a node away as soon as it has written something."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.stage = ""
        self.killed = False

    def start(self, stage: str, total: int, unit: str) -> None:
        self.stage = stage

    def advance(self, units: int, records: int = 0) -> None:
        if self.stage == "write" and not self.killed:
            self.killed = True
            node = next(iter(self.cluster.worker_nodes))
            self.cluster.remove_node(node, allow_graceful=False)


def test_three_nodes_write_what_one_process_writes_even_when_one_dies(
    cluster: Any, demo: Any, tokenizer_dir: Path, pack_demo: Packer, tmp_path: Path
) -> None:
    import ray

    local = pack_demo(max_packs_per_shard=1, seq_len=512)
    assert len(list(local.shards.glob("*.tar"))) > 20
    settings = {
        "inputs": (str(demo.jsonl),),
        "tokenizer": tokenizer_dir,
        "seq_len": 512,
        "max_packs_per_shard": 1,
        "shard_prefix": "pack",
        "max_reject_rate": 0.2,
        "engine": "ray",
        "ray_address": cluster.address,
    }
    whole = pack(PackOptions(output_dir=tmp_path / "whole", **settings))
    assert contents(whole.shards.parent) == contents(local.shards.parent)
    assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 3
    tokens = {"sample_class": "PackedTokensSample", "overlong": "truncate", "seq_len": 256, "max_packs_per_shard": 9}
    stored = pack(PackOptions(output_dir=tmp_path / "tokens", **settings | tokens))
    assert contents(stored.shards.parent) == contents(pack_demo(**tokens).shards.parent)

    progress = _KillsANode(cluster)
    hurt = pack(PackOptions(output_dir=tmp_path / "hurt", **settings), progress=progress)
    assert progress.killed
    assert contents(hurt.shards.parent) == contents(local.shards.parent)
    assert not list(hurt.shards.rglob(".*.tmp"))
    assert hurt.manifest.shards == local.manifest.shards


def test_without_ray_the_pip_command_is_told(
    demo: Any, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ["pack", str(demo.jsonl), "-o", str(tmp_path), "--tokenizer", str(tokenizer_dir), "--seq-len", "512"]
    monkeypatch.setattr(sys, "argv", ["energon-packed", *arguments, "--engine", "ray"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: --engine ray needs Ray; run pip install 'energon-packed[ray]'\n"


def test_sources_with_adapters_of_their_own(
    cluster: Any, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters lie in the folder where the command runs; workers find them there."""
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "ray_adapter.py").write_text(
        "def loud(record):\n    return {**record, 'answer': record['answer'].upper()}\n"
    )
    monkeypatch.chdir(tmp_path)
    sources = [{"path": "rows.jsonl", "weight": 1.5}, {"path": "rows.jsonl", "adapter": "ray_adapter:loud"}]
    settings: dict[str, Any] = {"sources": sources, "tokenizer": tokenizer_dir, "seq_len": 256, "shard_prefix": "p"}
    local = pack(output_dir=tmp_path / "local", workers=1, **settings)
    there = pack(output_dir=tmp_path / "there", engine="ray", ray_address=cluster.address, **settings)
    assert contents(there.shards.parent) == contents(local.shards.parent)
    assert local.manifest.packed + local.manifest.rejects["not_sampled"] == 90
    assert [one.weight for one in there.manifest.sources] == [1.5, 1.0]


def test_images_that_are_in_no_file_are_stored_by_all_nodes(cluster: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    data = write_parquet(tmp_path, rows(200, different=30))
    settings: dict[str, Any] = {"tokenizer": tokenizer_dir, "seq_len": 256, "shard_prefix": "p", "media": "reference"}
    settings["max_shard_bytes"] = 16384
    local = pack(data, output_dir=tmp_path / "local", workers=1, **settings)
    there = pack(data, output_dir=tmp_path / "there", engine="ray", ray_address=cluster.address, **settings)
    assert packed_files(there.shards.parent) == packed_files(local.shards.parent)
    assert there.manifest.counters["media_shards_written"] > 4


def test_videos_are_measured_and_written_by_all_nodes(cluster: Any, video_demo: VideoDemo, tmp_path: Path) -> None:
    options = {"engine": "ray", "ray_address": cluster.address}
    for name, changes in (("files", {}), ("frames", {"extract_frames": True})):
        there = pack(video_demo.jsonl, **video_demo.options(tmp_path / name, **options, **changes))
        assert contents(there.shards.parent) == contents(video_demo.packed(**changes).shards.parent)


class _KillsAWorker(Progress):
    """Kills a process that has a task, once in each stage."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.stage = ""
        self.killed: set[str] = set()

    def start(self, stage: str, total: int, unit: str) -> None:
        self.stage = stage

    def advance(self, units: int, records: int = 0) -> None:
        if self.stage not in self.killed and (found := workers(self.cluster, "ray::_call")):
            self.killed.add(self.stage)
            found[0].kill()


def workers(cluster: Any, title: str) -> list[Any]:
    """Worker processes of a cluster whose title begins with `title`."""
    import psutil

    found = []
    for node in cluster.list_all_nodes():
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        with suppress(psutil.NoSuchProcess):
            found += [one for one in raylet.children() if one.cmdline()[:1] and one.cmdline()[0].startswith(title)]
    return found


DRIVER = """
import json, sys
from pathlib import Path
from tests.pipeline.faults import Fault, Hook
Hook(Fault(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
sys.argv = ["energon-packed", *sys.argv[4:]]
from tests.internals import main
main()
"""


def done_at(out: Path) -> float:
    """When the last file of the result got its name."""
    return max(file.stat().st_ctime for file in out.rglob("*") if file.is_file())


OF_RAY = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+ E \d+ \d+\] \w+\.cc:\d+: ")  # its log, where the cluster leaves first
KILLS = int(os.environ.get("ENERGON_PACKED_KILLS", "1"))


@pytest.mark.parametrize("number", range(KILLS))
def test_kills_change_nothing(cluster: Any, undisturbed: Build, tmp_path: Path, number: int) -> None:
    """The driver dies, with all workers or without; it is interrupted; or a worker dies, which costs nothing."""
    kind = ("kill", "interrupt", "kill_all", "terminate")[number % 4]
    out, rng = tmp_path / "out", random.Random(number)
    stage = (r"/measure-", r"/\.run\.json", r"/\.nv-meta/\.")[number % 3]
    fault = {
        "at": 0,
        "path": stage,
        "kind": kind.removesuffix("_all"),
        "delay": rng.uniform(0, 0.3) * (number % 3 < 2),
    }
    arguments = undisturbed.arguments(out, "--engine", "ray", "--ray-address", cluster.address, "--quiet")
    given = [json.dumps(fault), str(out), str(tmp_path / "notes"), *map(str, arguments)]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, *given],
        capture_output=True, text=True, cwd=ROOT, timeout=180, start_new_session=True,
    )  # fmt: skip
    assert (tmp_path / "notes").exists(), ran.stderr
    if kind.startswith("kill"):
        assert ran.returncode == -9
    else:
        by = " by SIGTERM" if kind == "terminate" else ""
        lines = f"error: interrupted{by}; run the same command again to resume"
        told = [line for line in ran.stderr.splitlines() if line and not OF_RAY.match(line)]
        if fault["delay"] and ran.returncode == 0:  # then it was done before the signal came
            assert (told, packed_files(out)) == ([], undisturbed.files)
            assert done_at(out) < float((tmp_path / "notes").read_text())
        else:
            assert (ran.returncode, told) == (143 if by else 130, [lines])
        assert not [path for path in out.rglob("owner.json")]
    if kind == "kill_all":
        for worker in [*workers(cluster, "ray::_call"), *workers(cluster, "ray::IDLE")]:  # not the agents of a node
            worker.kill()
    there, done = chunks(out), shards_done(out)
    progress = _KillsAWorker(cluster)
    result = pack(
        str(undisturbed.folder / "data" / "part*.jsonl"), output_dir=out, tokenizer=undisturbed.tokenizer, seq_len=512,
        engine="ray", ray_address=cluster.address, workers=2, max_packs_per_shard=3, shard_prefix="s",
        sample_class="PackedCaptioningSample", progress=progress,
    )  # fmt: skip
    assert packed_files(out) == undisturbed.files
    counters = result.manifest.counters
    assert counters["reused"] >= sum(there.values())  # a task may end after its driver
    assert counters["shards_reused"] >= done
    assert counters["shards_reused"] + counters["shards_written"] == len(result.manifest.shards)
    assert counters["measured"] + counters["reused"] == 48
    print(number, kind, fault, there, done, counters, progress.killed)
