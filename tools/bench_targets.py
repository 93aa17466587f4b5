"""Benchmark a training step: logits of all tokens, of the targets alone, the loss in pieces; overhead of the loops.

    python tools/bench_targets.py [--json targets.json] [--tokens 2048] [--rounds 5] [--kinds all head]
    python tools/bench_targets.py --overhead 50

    all      logits of all tokens, and the loss of the model
    targets  logits of the targets alone, and the loss of the model
    pieces   logits of the targets alone, and the loss in pieces
    head     logits and loss in pieces, as PackedTrainer computes them for most models

Each run is a new process: forward and backward pass of a Qwen2 model (hidden size 256, 4 layers, random weights) for
one packed row. Rounds of all kinds are interleaved, and the medians of the CPU times are compared. The memory of a
step is the growth of the peak of the process from before the first step.

With --overhead, each step of PackedTrainer, of Trainer and of the plain loop of docs/train-torch.md is followed by a
step of a second tiny model (hidden size 64, 2 layers) with the same tensors, loss and optimizer. The medians of the
ratios of their CPU times are reported; the rows are read in the process of the training.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib import Report, arguments
from compare.contract import peak_memory

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
    before = peak_memory(reset=True)
    seconds = []
    for _ in range(_STEPS):
        start = time.process_time()
        with loss_in_pieces(model, head=kind == "head") if kind in ("pieces", "head") else contextlib.nullcontext():
            model(**inputs).loss.backward()
        seconds.append(time.process_time() - start)
    return {"seconds": statistics.median(seconds), "bytes": peak_memory() - before}


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


def overhead(report: Report, tokens: int, steps: int) -> None:
    """Compare the loops with the bare model."""
    import torch
    from bench_gpu import stored_rows
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from energon_packed import DataflowLoader, MapDistributor, PackedTrainer, PaddingFreeCollator, step_targets
    from energon_packed.integrations.transformers.model_loss import loss_in_pieces

    torch.set_num_threads(1)

    def after(step: Any, reading: list[float], training: list[float], start: float, begin: float) -> float:
        """Add the times of a step, run the same step of the bare model, and return the time after it."""
        end = time.process_time()
        reading.append(begin - start)
        training.append(end - begin)
        step()
        bare.append(time.process_time() - end)
        return time.process_time()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times of a Trainer, which reads before a step begins."""

        def __init__(self, in_pieces: bool) -> None:
            self.start, self.begin, self.inputs = 0.0, 0.0, {}
            self.context = (lambda: loss_in_pieces(second.model, head=True)) if in_pieces else contextlib.nullcontext

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.start = after(
                lambda: second.step(self.inputs, self.context), reading, training, self.start, self.begin
            )

        def keep(self, module: Any, args: Any, inputs: dict[str, Any]) -> None:
            self.inputs = inputs

    with tempfile.TemporaryDirectory() as folder:
        data: Any = stored_rows(Path(folder, "data"), steps, tokens, 4096)
        args = TrainingArguments(
            folder, max_steps=len(data), per_device_train_batch_size=1, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, logging_strategy="no", average_tokens_across_devices=True,
        )  # fmt: skip
        for kind in ("PackedTrainer", "Trainer", "plain loop"):
            reading, training, bare = list[float](), list[float](), list[float]()
            first, second = _Bare(), _Bare()
            if kind == "plain loop":
                start = time.process_time()
                for batch in DataflowLoader(MapDistributor(data), batch_size=1):
                    begin = time.process_time()
                    inputs = batch.transformers_inputs()
                    batch.loss(first.model(**inputs).logits, targets=step_targets([batch])).backward()
                    first.update()
                    start = after(lambda: second.step(inputs), reading, training, start, begin)  # noqa: B023
            else:
                clock = Clock(kind == "PackedTrainer")
                first.model.register_forward_pre_hook(clock.keep, with_kwargs=True)
                trainer = (PackedTrainer if kind == "PackedTrainer" else Trainer)(
                    first.model, args, train_dataset=data, data_collator=PaddingFreeCollator(), callbacks=[clock]
                )
                trainer.train()
            for name, times in (("a step", training), ("reading", reading)):
                pairs = zip(times[3:], bare[3:], strict=True)  # of one moment, as the speed of a machine changes
                ratio = statistics.median(time_of / alone for time_of, alone in pairs)
                report.add(f"{kind}: CPU time of {name} relative to a step of the bare model", ratio, "x")
            report.add(f"{kind}: CPU time of a step of the bare model", 1000 * statistics.median(bare[3:]), "ms")


class _Bare:
    """A tiny model and its optimizer, with the steps of a Trainer alone."""

    def __init__(self) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = Qwen2ForCausalLM(Qwen2Config(vocab_size=4096, num_key_value_heads=2, **sizes)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self, inputs: dict[str, Any], context: Any = contextlib.nullcontext) -> None:
        with context():
            loss = self.model(**inputs).loss
        loss.backward()
        self.update()

    def update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


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
    parser.add_argument("--overhead", type=int, metavar="STEPS", help="measure the overhead of the loops alone")
    options = parser.parse_args()
    report = Report("targets", options.json)
    if options.overhead:
        overhead(report, options.tokens, options.overhead)
        report.finish()
        return
    bench(report, options.kinds, options.tokens, options.rounds, options.dtype)
    report.finish()


if __name__ == "__main__":
    main()
