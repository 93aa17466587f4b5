"""The parts of the benchmarks that use internal names still run."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"


def test_the_driver_of_a_large_run_can_be_benchmarked() -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import bench_pack; exec(bench_pack._DRIVER)"
    done = subprocess.run([sys.executable, "-c", code, str(TOOLS), "5000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, bytes_per_record, shards = map(float, done.stdout.split())
    assert seconds > 0
    assert bytes_per_record > 0
    assert shards == 1
