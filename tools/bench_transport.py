"""Benchmark how batches travel from a worker process, against torch's own transport of the same tensors.

    python tools/bench_transport.py [--json transport.json] [--rounds 5]

CPU time of both processes for one row, for rows of 4,096 text tokens and for rows with pixels of 0.5 and 8 MiB. Every
run is a process of its own. Rounds are interleaved; ratios are medians over rounds.
"""

import json
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from benchlib import Report, arguments

from energon_packed import DataflowLoader, EncodedSample, MapDistributor, PaddingFreeCollator

_SEQ_LEN = 4096
_SAMPLES = 8  # in a row
_PATCH = 1176  # elements of a patch of Qwen2.5-VL
_KINDS = {"text": (0.0, 2000), "pixels of 0.5 MiB": (0.5, 500), "pixels of 8 MiB": (8.0, 150)}  # MiB and rows


class _Tensors(PaddingFreeCollator):
    """Returns a dict, of which the loader knows nothing: torch sends every tensor in shared memory."""

    def collate(self, samples: Sequence[EncodedSample]) -> Any:
        batch = super().collate(samples)
        return {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}


def cpu() -> float:
    """CPU seconds of this process and of children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def rows(pixel_mib: float, count: int) -> list[list[EncodedSample]]:
    """Rows of 4,096 tokens, with pixels in each sample if `pixel_mib` is not 0."""
    rng = np.random.default_rng(0)
    patches = int(pixel_mib * (1 << 20) / 4 / _PATCH / _SAMPLES)
    found = []
    for _ in range(16):
        row = []
        for number in range(_SAMPLES):
            ids = rng.integers(0, 150_000, _SEQ_LEN // _SAMPLES)
            labels = np.where(np.arange(len(ids)) < 200, -100, ids)
            images: dict[str, Any] = {}
            if patches:
                images = {
                    "pixel_values": torch.randn(patches, _PATCH),
                    "image_grid_thw": torch.tensor([[1, 1, patches]]),
                }
            row.append(EncodedSample(id=f"sample-{number}", input_ids=ids, labels=labels, **images))
        found.append(row)
    return [found[number % len(found)] for number in range(count)]


def run(way: str, kind: str) -> float:
    """CPU milliseconds per row, the start of the worker included."""
    mib, count = _KINDS[kind]
    collator = _Tensors() if way == "torch" else PaddingFreeCollator()
    workers = 0 if way == "one process" else 1
    loader = DataflowLoader(MapDistributor(rows(mib, count)), collator=collator, num_workers=workers)
    before = cpu()
    received = sum(1 for _ in loader)
    if received != count:
        raise SystemExit(f"{received} of {count} rows arrived")
    del loader  # its worker ends, and its CPU time is counted
    return 1e3 * (cpu() - before) / count


def child(way: str, kind: str) -> float:
    """`run` in a new process."""
    command = [sys.executable, __file__, "--child", way, kind]
    return float(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def main() -> None:
    """Run the benchmark and print the results."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run(sys.argv[2], sys.argv[3])))
        return
    parser = arguments(__doc__, "transport")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = Report("transport", options.json)
    for kind in _KINDS:
        rounds = [[child(way, kind) for way in ("one process", "ours", "torch")] for _ in range(options.rounds)]
        alone, ours, torchs = (statistics.median(column) for column in zip(*rounds, strict=True))
        details = {"one_process_ms": alone, "ours_ms": ours, "torch_ms": torchs}
        ratio = statistics.median(own / other for _, own, other in rounds)
        target = "<= 0.5" if kind == "text" else "<= 1.1"
        report.add(f"rows of {kind}: CPU time relative to torch's transport", ratio, "", target, **details)
        report.add(f"rows of {kind}: CPU time of making and sending a row", ours, "ms")
    report.finish()


if __name__ == "__main__":
    main()
