"""Benchmark the speed and the packing quality of the planner.

    python tools/bench_planner.py [--json planner.json]

Compares 200,000 lengths with the loop of TRL's best-fit-decreasing packing and 10 million lengths with NumPy's stable
argsort of the same int32 array, and with the same lengths in groups of two. Reports the packs above the lower bound
ceil(tokens / capacity) for each algorithm.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from benchlib import Report, arguments, median_seconds, run_peer

from energon_packed import pack_lengths

_FEW, _MANY = 200_000, 10_000_000
CAPACITIES = (4096, 32768)

# Times the loop of `_pack_bfd`, from the creation of its segment tree to the gathering of rows. The lists are empty
# and their lengths are patched in, since 200,000 rows of up to 32,768 tokens would not fit in memory.
_TRL = """
import json, sys, time
import numpy as np, pyarrow as pa, pyarrow.compute as pc
import trl.data_utils as trl

class Stop(Exception): pass

class Compute:
    def __getattr__(self, name):
        return getattr(pc, name)
    def list_value_length(self, column):
        return pa.array(lengths, pa.int32())
    def filter(self, column, mask):
        return column
    def list_slice(self, column, start, stop):
        return column
    @property
    def take(self):
        marks.append(time.perf_counter())
        raise Stop(len(sys._getframe(1).f_locals["bins"]))

tree = trl._SegmentTree.__init__
def started(self, *args):
    tree(self, *args)
    marks.append(time.perf_counter())
trl._SegmentTree.__init__ = started
trl.pc = Compute()
results = {}
for name, lengths in np.load(sys.argv[1]).items():
    marks = []
    column = pa.ListArray.from_arrays(np.zeros(len(lengths) + 1, np.int32), pa.array([], pa.int32()))
    try:
        trl._pack_bfd(pa.table({"input_ids": column}), int(name.rsplit("@")[1]))
    except Stop as stop:
        results[name] = {"seconds": marks[1] - marks[0], "packs": stop.args[0]}
print(json.dumps(results))
"""

# Planning in a separate process: increase of peak resident memory per length.
_MEMORY = """
import resource, sys
import numpy as np
from energon_packed import pack_lengths
sys.path.insert(0, sys.argv[1])
from bench_planner import mixtures
pack_lengths([1, 2], 4)
lengths = mixtures(int(sys.argv[2]), 4096, only="lognormal")["lognormal"]
with open("/proc/self/clear_refs", "w") as stream:
    stream.write("5")
resident = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024
before = resident("VmRSS")
plan = pack_lengths(lengths, 4096)
print((resident("VmHWM") - before) / len(lengths))
"""


def mixtures(count: int, capacity: int, only: str | None = None) -> dict[str, np.ndarray]:
    """Two typical and two hard length distributions: int32 (count,) each."""
    rng = np.random.default_rng(0)
    makers = {
        "lognormal": lambda: rng.lognormal(5.5, 0.9, count),
        "VLM mixture": lambda: np.where(
            rng.random(count) < 0.6, rng.normal(900, 250, count), rng.lognormal(4.8, 0.7, count)
        ),
        "near half": lambda: rng.normal(capacity / 2, capacity / 40, count),
        "long tail": lambda: capacity * rng.beta(0.4, 2.5, count),
    }
    names = makers if only is None else [only]
    return {name: np.clip(makers[name](), 1, capacity).astype(np.int32) for name in names}


def against_trl(report: Report, work: Path) -> None:
    """Compare speed with TRL's loop, and the number of packs with TRL's and with the lower bound."""
    cases = {f"{name}@{c}": values for c in CAPACITIES for name, values in mixtures(_FEW, c).items()}
    work.mkdir(parents=True, exist_ok=True)
    np.savez(work / "lengths.npz", **cases)
    peer = run_peer(work, _TRL, work / "lengths.npz")
    for name, lengths in cases.items():
        capacity = int(name.rsplit("@")[1])
        seconds = median_seconds(lambda lengths=lengths, c=capacity: pack_lengths(lengths, c), 5)
        plan = pack_lengths(lengths, capacity)
        bound = -(-plan.tokens // capacity)
        hard = name.startswith(("near half", "long tail"))
        report.add(f"{name}: speedup over TRL", peer[name]["seconds"] / seconds, "x", ">= 80", seconds=seconds)
        report.add(f"{name}: packs in excess of TRL", plan.num_packs - peer[name]["packs"], "", "<= 0")
        report.add(
            f"{name}: packs above the lower bound", 100 * (plan.num_packs / bound - 1), "%", "" if hard else "<= 0.02"
        )


def against_sort(report: Report) -> None:
    """Compare planning of ten million lengths with sorting them, and measure the memory."""
    for capacity in CAPACITIES:
        for name, lengths in mixtures(_MANY, capacity).items():
            sort = median_seconds(lambda lengths=lengths: np.argsort(lengths, kind="stable"))
            plan = median_seconds(lambda lengths=lengths, c=capacity: pack_lengths(lengths, c))
            metric = f"{name}@{capacity}, 10 million: time relative to argsort"
            report.add(metric, plan / sort, "", "<= 0.3", seconds=plan, argsort_seconds=sort)
            groups = np.repeat(np.arange(_MANY // 2), 2)
            pairs = median_seconds(lambda lengths=lengths, c=capacity, g=groups: pack_lengths(lengths, c, groups=g))
            metric = f"{name}@{capacity}, 10 million: time in groups of 2 relative to single samples"
            report.add(metric, pairs / plan, "", "<= 1.5", seconds=pairs)
    here = str(Path(__file__).resolve().parent)
    command = [sys.executable, "-c", _MEMORY, here, str(_MANY)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report.add("10 million: memory per length", json.loads(done.stdout), "bytes", "<= 40")


def main() -> None:
    """Run the benchmarks and print the results."""
    options = arguments(__doc__, "planner").parse_args()
    report = Report("planner", options.json)
    pack_lengths([1, 2], 4), pack_lengths([1, 2], 4, groups=[0, 0])  # compile
    against_trl(report, options.work)
    against_sort(report)
    report.finish()


if __name__ == "__main__":
    main()
