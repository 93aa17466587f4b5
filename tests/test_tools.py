"""The parts of the benchmarks that use our inner names still run."""

import json
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"


def test_the_driver_of_a_large_run_can_be_benchmarked() -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import bench_pack; exec(bench_pack._DRIVER)"
    done = subprocess.run([sys.executable, "-c", code, str(TOOLS), "5000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, bytes_a_record, shards = map(float, done.stdout.split())
    assert seconds > 0
    assert bytes_a_record > 0
    assert shards == 1


def test_images_can_be_benchmarked(tmp_path: Path) -> None:
    command = [sys.executable, TOOLS / "bench_images.py", "--images", "3", "--runs", "1", "--row-pixels", "500000"]
    out = tmp_path / "images.json"
    done = subprocess.run(
        [*command, "--work", tmp_path / "work", "--json", out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    differences = [row for what, row in rows.items() if "largest difference" in what]
    assert len(differences) == 3
    assert all(row["met"] for row in differences)
    speedups = [row for what, row in rows.items() if "speedup" in what]
    assert len(speedups) == 6
    assert all(row["milliseconds"] > 0 and row["installed_milliseconds"] > 0 for row in speedups)
    assert rows["decoding, the same for both"]["value"] > 0
    assert all(row["value"] > 0 for what, row in rows.items() if "peak memory" in what)
