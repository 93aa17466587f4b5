"""Benchmark a training step with logits of all tokens, of the targets alone, and with the loss in pieces.

    python tools/bench_targets.py [--json targets.json] [--tokens 2048] [--rounds 5] [--kinds all head]

    all      logits of all tokens, and the loss of the model
    targets  logits of the targets alone, and the loss of the model
    pieces   logits of the targets alone, and the loss in pieces
    head     logits and loss in pieces, as PackedTrainer computes them for most models

Each run is a new process: forward and backward pass of a Qwen2 model (hidden size 256, 4 layers, random weights) for
one packed row. Rounds of all kinds are interleaved, and the medians of the CPU times are compared. The memory of a
step is the growth of the peak of the process from before the first step.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchlib import Report, arguments

_STEPS = 3
_VOCABULARIES = (32_000, 152_000)
_SHARES = (0.1, 0.5, 1.0)
_KINDS = ("all", "targets", "pieces", "head")


def run(kind: str, vocabulary: int, share: float, tokens: int, dtype: str) -> dict[str, float]:
    """Measure CPU seconds of a step and the growth of the peak memory in bytes."""
    import numpy as np
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from energon_packed import EncodedSample, PaddingFreeCollator
    from energon_packed.integrations.transformers.model_loss import loss_in_pieces

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, num_attention_heads=4, num_key_value_heads=2, **sizes))
    model.to(getattr(torch, dtype))
    rng = np.random.default_rng(0)
    samples = []
    for size in np.full(8, tokens // 8):
        ids = rng.integers(0, vocabulary, size)
        labels = np.where(np.arange(size) >= size * (1 - share), ids, -100)
        samples.append(EncodedSample(input_ids=ids, labels=labels))
    logits: Any = "all" if kind == "all" else "targets"
    inputs = PaddingFreeCollator().collate(samples).transformers_inputs(logits=logits)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = _peak(reset=True)
    seconds = []
    for _ in range(_STEPS):
        start = time.process_time()
        with loss_in_pieces(model, head=kind == "head") if kind in ("pieces", "head") else contextlib.nullcontext():
            model(**inputs).loss.backward()
        seconds.append(time.process_time() - start)
    return {"seconds": statistics.median(seconds), "bytes": _peak() - before}


def _peak(*, reset: bool = False) -> int:
    """Return the peak resident memory in bytes; `reset` starts it at the present memory (Linux, proc(5))."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) * 1024


def bench(report: Report, kinds: list[str], tokens: int, rounds: int, dtype: str) -> None:
    """Compare the kinds for each vocabulary and each share of supervised tokens."""
    for vocabulary in _VOCABULARIES:
        for share in _SHARES:
            results = [[child(kind, vocabulary, share, tokens, dtype) for kind in kinds] for _ in range(rounds)]
            seconds, memory = (
                [statistics.median(result[i][name] for result in results) for i in range(len(kinds))]
                for name in ("seconds", "bytes")
            )
            for kind, time_of, size in zip(kinds[1:], seconds[1:], memory[1:], strict=True):
                title = f"vocabulary {vocabulary:,}, {share:.0%} supervised, {kind}"
                rate = {"per_second": tokens / time_of}
                report.add(f"{title}: tokens/s relative to {kinds[0]}", seconds[0] / time_of, "x", ">= 0.97", **rate)
                report.add(f"{title}: memory relative to {kinds[0]}", size / memory[0], "x", "<= 1.03", bytes=size)


def child(*values: object) -> dict[str, float]:
    """Run one measurement in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, values)], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Run the benchmark, or one measurement in a child."""
    if sys.argv[1:2] == ["--child"]:
        kind, vocabulary, share, tokens, dtype = sys.argv[2:]
        print(json.dumps(run(kind, int(vocabulary), float(share), int(tokens), dtype)))
        return
    parser: argparse.ArgumentParser = arguments(__doc__, "targets")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS, help="the first is the reference")
    options = parser.parse_args()
    report = Report("targets", options.json)
    bench(report, options.kinds, options.tokens, options.rounds, options.dtype)
    report.finish()


if __name__ == "__main__":
    main()
