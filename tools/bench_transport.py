"""Benchmark the transport of batches from a worker process, against torch's transport of the same tensors.

    python tools/bench_transport.py [--json transport.json] [--rounds 5]

Measures the CPU time of both processes for one row: rows of 4,096 text tokens, and rows with pixels of 0.5 and 8 MiB.
Every run is a new process. Rounds are interleaved, and ratios are medians over rounds.
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
    """Collator that returns a dict, which the loader does not pack: torch sends every tensor in shared memory."""

    def collate(self, samples: Sequence[EncodedSample]) -> Any:
        batch = super().collate(samples)
        return {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}


def cpu() -> float:
    """CPU seconds of this process and its finished children."""
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def rows(pixel_mib: float, count: int) -> list[list[EncodedSample]]:
    """Rows of 4,096 tokens, with pixels in each sample if `pixel_mib` is not 0."""
    rng = np.random.default_rng(0)
    patches = int(pixel_mib * (1 << 20) / 4 / _PATCH / _SAMPLES)
    samples = []
    for _ in range(16):
        row = []
        for index in range(_SAMPLES):
            ids = rng.integers(0, 150_000, _SEQ_LEN // _SAMPLES)
            labels = np.where(np.arange(len(ids)) < 200, -100, ids)
            images: dict[str, Any] = {}
            if patches:
                images = {
                    "pixel_values": torch.randn(patches, _PATCH),
                    "image_grid_thw": torch.tensor([[1, 1, patches]]),
                }
            row.append(EncodedSample(id=f"sample-{index}", input_ids=ids, labels=labels, **images))
        samples.append(row)
    return [samples[index % len(samples)] for index in range(count)]


def run(transport: str, kind: str) -> float:
    """CPU milliseconds per row, including the start of the worker."""
    mib, count = _KINDS[kind]
    collator = _Tensors() if transport == "torch" else PaddingFreeCollator()
    workers = 0 if transport == "one process" else 1
    loader = DataflowLoader(MapDistributor(rows(mib, count)), collator=collator, num_workers=workers)
    before = cpu()
    received = sum(1 for _ in loader)
    if received != count:
        raise SystemExit(f"{received} of {count} rows arrived")
    del loader  # stops its worker, so that its CPU time is counted
    return 1e3 * (cpu() - before) / count


def child(transport: str, kind: str) -> float:
    """Call `run` in a new process."""
    command = [sys.executable, __file__, "--child", transport, kind]
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
        rounds = [
            [child(transport, kind) for transport in ("one process", "energon-packed", "torch")]
            for _ in range(options.rounds)
        ]
        alone, packed, torch_ms = (statistics.median(column) for column in zip(*rounds, strict=True))
        details = {"one_process_ms": alone, "energon_packed_ms": packed, "torch_ms": torch_ms}
        ratio = statistics.median(our_ms / torch_ms for _, our_ms, torch_ms in rounds)
        target = "<= 0.5" if kind == "text" else "<= 1.1"
        report.add(f"rows of {kind}: CPU time relative to torch's transport", ratio, "", target, **details)
        report.add(f"rows of {kind}: CPU time of making and sending a row", packed, "ms")
    report.finish()


if __name__ == "__main__":
    main()
