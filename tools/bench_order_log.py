"""Benchmark the order log: CPU time of a line, against loading the row and against a training step.

    python tools/bench_order_log.py [--json order_log.json] [--rounds 7]

A row has 16 samples of 256 stored tokens. The step is forward and backward of a Qwen2 model with 2 layers of width 64
on one thread of the CPU: a step of a larger model takes longer, also on a GPU. CPU times are the least of several
rounds.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchlib import Report, arguments
from transformers import Qwen2Config, Qwen2ForCausalLM

from energon_packed import DataflowLoader, MapDistributor, PackedDataset, PackOptions, pack
from energon_packed.encoding import StoredTokens

_ROWS, _SAMPLES, _LENGTH = 400, 16, 256


def packed(folder: Path) -> PackedDataset:
    """Write rows of 16 samples of 256 tokens."""
    tokens = list(range(_LENGTH))
    with (folder / "data.jsonl").open("w") as file:
        for number in range(_ROWS * _SAMPLES):
            file.write(json.dumps({"id": f"conversation-{number:08d}", "input_ids": tokens, "labels": tokens}) + "\n")
    options: dict[str, Any] = {"sample_class": "PackedTokensSample", "workers": 1, "encoder": StoredTokens()}
    pack(PackOptions(inputs=(str(folder / "data.jsonl"),), output_dir=folder, seq_len=_SAMPLES * _LENGTH, **options))
    return PackedDataset(folder)


def cpu_of(function: Callable[[], object]) -> float:
    """CPU seconds of a call, system time included."""
    start = time.process_time()
    function()
    return time.process_time() - start


def row(dataset: PackedDataset, log: Path) -> tuple[float, float]:
    """CPU seconds of a row with its line, and of the line: the median, as caches are cold after loading the row."""
    loader = DataflowLoader(MapDistributor(dataset), order_log=log)
    order_log: Any = loader.order_log
    add, lines = order_log.add, list[float]()
    order_log.add = lambda *line, **entries: lines.append(cpu_of(lambda: add(*line, **entries)))
    batches = iter(loader)
    next(batches)  # opens the tars, and writes the header
    return cpu_of(lambda: sum(1 for _ in batches)) / (len(loader) - 1), statistics.median(lines)


def training_step(batch: Any) -> float:
    """CPU seconds of forward and backward of a small model."""
    config = Qwen2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model, inputs = Qwen2ForCausalLM(config), batch.transformers_inputs()
    return cpu_of(lambda: model(**inputs).loss.backward())


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, "order_log")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of which the least counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("order log", options.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = packed(folder)
        rounds = [row(dataset, folder / f"log{n}") for n in range(options.rounds)]
        loading, line = map(min, zip(*rounds, strict=True))
        size = (folder / "log0" / "order-00000-000.jsonl").stat().st_size / len(dataset)
        batch = next(iter(DataflowLoader(MapDistributor(dataset))))
    step = min(training_step(batch) for _ in range(options.rounds))
    report.add("CPU time of a line", line * 1e6, "us")
    report.add("size of a line", size, "bytes")
    report.add("loading a row, with its line", loading * 1e6, "us")
    report.add("line / loading a row", line / loading)
    report.add("training step of 2 layers", step * 1e3, "ms")
    report.add("line / training step", line / step, target="<= 0.01")
    report.finish()


if __name__ == "__main__":
    main()
