"""The parts of the benchmarks that use internal names still run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oldest import needs_isolated_qwen2_5_vl
from tests.processes import run_python

TOOLS = Path(__file__).parents[1] / "tools"


def test_the_driver_of_a_large_run_can_be_benchmarked() -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import bench_pack; exec(bench_pack._DRIVER)"
    done = subprocess.run([sys.executable, "-c", code, str(TOOLS), "5000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, bytes_per_record, shards = map(float, done.stdout.split())
    assert seconds > 0
    assert bytes_per_record > 0
    assert shards == 1


_PEER = "import sys; sys.path.insert(0, sys.argv.pop(1)); import contract, peer_{0}; contract.run(peer_{0}.main)"


@pytest.mark.parametrize(
    ("peer", "kind"),
    [("packed", "text"), *(pytest.param(p, "images", marks=needs_isolated_qwen2_5_vl) for p in ("packed", "energon"))],
)
def test_a_peer_of_the_comparison_trains_on_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str, kind: str
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    import bench_compare
    from benchlib import image_records, text_records

    images = kind == "images"
    data = list(image_records(tmp_path / "images", 12) if images else text_records(20))
    texts = [str(turn["content"]) for record in data for turn in record["messages"]]
    model = bench_compare.write_model(tmp_path / "model", texts, images=images)
    records = tmp_path / "records.jsonl"
    records.write_text("\n".join(json.dumps(record) for record in bench_compare.marked(iter(data))))
    common = {"model": str(model), "records": str(records), "folder": str(tmp_path / "work"), "seq_len": 1024}
    (tmp_path / "work").mkdir()
    lines = {}
    for phase, resume_from in (("prepare", 0), ("train", 0), ("train", 4)):
        rows = tmp_path / f"rows-{resume_from}"
        spec = bench_compare.Spec(
            phase=phase, variant="", rows=str(rows), images=images, save_every=2, resume_from=resume_from, **common
        )
        (tmp_path / "spec.json").write_text(json.dumps(vars(spec)))
        done = run_python(_PEER.format(peer), TOOLS / "compare", tmp_path / "spec.json")
        assert done.returncode == 0, done.stderr
        lines[resume_from] = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    values = bench_compare.describe(lines[0], 1024, 2)
    assert values["whole"] == len(data)
    assert values["leakage"] < 1e-5
    assert values["compared"] > 5
    assert values["padding"] == 0
    assert 0.7 < values["utilization"] <= 1
    kept = ("samples", "loss", "weights")
    expected, resumed = ([[line.get(name) for name in kept] for line in run] for run in (lines[0][4:], lines[4]))
    if peer == "energon":  # its loader continues with another epoch
        del expected[-1], resumed[len(expected) :]
    assert resumed == expected
