"""Benchmark a training step: logits of all tokens, of the targets alone, the loss in pieces; overhead of the loops.

    python tools/bench_targets.py [--json targets.json] [--tokens 2048] [--rounds 5] [--kinds all head]
    python tools/bench_targets.py --overhead 200 [--tokens 1024]

    all      logits of all tokens, and the loss of the model
    targets  logits of the targets alone, and the loss of the model
    pieces   logits of the targets alone, and the loss in pieces
    head     logits and loss in pieces, as PackedTrainer computes them for most models

Each run is a new process: forward and backward pass of a Qwen2 model (hidden size 256, 4 layers, random weights) for
one packed row. Rounds of all kinds are interleaved, and the medians of the CPU times are compared. The memory of a
step is the growth of the peak of the process from before the first step.

With --overhead, these loops train tiny models (hidden size 64, 2 layers) on the same rows, one step each in turn:

    model              the model and its optimizer, with tensors in memory; logits and loss in pieces, or all logits
    Trainer            Trainer of Transformers, with tensors in memory, and logits and loss in pieces
    PackedTrainerMixin before Trainer
    PackedTrainer
    plain loop         of docs/train-torch.md, with all logits

The last three read their rows from tars, in the process of the training. The medians of the CPU times of a step with
its row are reported, and the medians of the differences between two loops in the same round, with their intervals of
95%.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from operator import itemgetter
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


_COMPARED = {  # with the same rows, logits, loss and optimizer
    "Trainer": "model",
    "PackedTrainerMixin": "Trainer",
    "PackedTrainer": "Trainer",
    "plain loop": "model, all logits",
}
_FIRST = 3  # steps that are not compared: they check the model and allocate memory
Marks = tuple[Callable[[], None], Callable[[], None]]  # called when a step begins, and when it ends


def overhead(report: Report, tokens: int, rows: int) -> None:
    """Compare loops that take their steps in turn."""
    with tempfile.TemporaryDirectory() as folder:
        times = in_turn(loops(Path(folder), tokens, rows))
    # Milliseconds of each step: of its row, and of the step.
    parts = {
        name: list(zip(*[(1000 * row, 1000 * step) for row, step in found[_FIRST:]], strict=True))
        for name, found in times.items()
    }
    totals = {name: statistics.median(map(sum, zip(*found, strict=True))) for name, found in parts.items()}
    for name, total in totals.items():
        report.add(f"{name}: CPU time of a step with its row", total, "ms")
    for name, other in _COMPARED.items():
        more = 0.0
        for part, own, others in zip(("row", "step"), parts[name], parts[other], strict=True):
            low, middle, high = interval([a - b for a, b in zip(own, others, strict=True)])
            title = f"{name}: {part}, more than {other} ({low:.2f} to {high:.2f})"
            report.add(title, middle, "ms", low=low, high=high)
            more += middle
        title = f"{name}: CPU time of a step with its row relative to {other}"
        report.add(title, 1 + more / totals[other], "x", "<= 1.01" if other == "Trainer" else "")


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median of values, between the ends of its interval of 95% (by the binomial distribution)."""
    ordered, first = sorted(values), max(0, round(len(values) / 2 - 0.98 * len(values) ** 0.5))
    return ordered[first], statistics.median(ordered), ordered[-1 - first]


def loops(folder: Path, tokens: int, rows: int) -> dict[str, Callable[[Marks], None]]:
    """Return loops that train a tiny model on the same rows in the same order, by name."""
    from bench_gpu import stored_rows
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from energon_packed import (
        DataflowLoader,
        MapDistributor,
        PackedTrainer,
        PackedTrainerMixin,
        PaddingFreeCollator,
        step_targets,
    )
    from energon_packed.integrations.transformers.model_loss import loss_in_pieces

    data: Any = stored_rows(folder / "data", rows, tokens, 4096)
    args = TrainingArguments(
        str(folder), max_steps=len(data), per_device_train_batch_size=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, logging_strategy="no", average_tokens_across_devices=True,
        remove_unused_columns=False,
    )  # fmt: skip
    in_order = copy(args)
    in_order.train_sampling_strategy = "sequential"

    class Marked(TrainerCallback):  # type: ignore[misc]
        def __init__(self, marks: Marks) -> None:
            self.begin, self.end = marks

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.end()

    class Mixed(PackedTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    def loader() -> Any:
        return DataflowLoader(MapDistributor(data), batch_size=1, seed=args.seed)

    def trained(kind: Any, args: Any, packs: Any, collator: Any, marks: Marks, *, in_pieces: bool = False) -> None:
        model = _Bare().model
        trainer = kind(model, args, train_dataset=packs, data_collator=collator, callbacks=[Marked(marks)])
        with loss_in_pieces(model, head=True) if in_pieces else contextlib.nullcontext():
            trainer.train()

    def alone(inputs: list[Any], marks: Marks, *, in_pieces: bool = False) -> None:
        bare, (begin, end) = _Bare(), marks
        with loss_in_pieces(bare.model, head=True) if in_pieces else contextlib.nullcontext():
            for row in inputs:
                begin()
                bare.model(**row).loss.backward()
                bare.update()
                end()

    def plain(marks: Marks) -> None:
        bare, (begin, end) = _Bare(), marks
        for batch in loader():
            begin()
            logits = bare.model(**batch.transformers_inputs()).logits
            batch.loss(logits, targets=step_targets([batch])).backward()
            bare.update()
            end()

    collator = PaddingFreeCollator()
    tensors = list(PackedTrainer(_Bare().model, args, train_dataset=data).get_train_dataloader())
    all_logits = [batch.transformers_inputs() for batch in loader()]
    return {
        "model": partial(alone, tensors, in_pieces=True),
        "Trainer": partial(trained, Trainer, in_order, tensors, itemgetter(0), in_pieces=True),
        "PackedTrainerMixin": partial(trained, Mixed, args, data, collator),
        "PackedTrainer": partial(trained, PackedTrainer, args, data, collator),
        "model, all logits": partial(alone, all_logits),
        "plain loop": plain,
    }


def in_turn(loops: dict[str, Callable[[Marks], None]]) -> dict[str, list[tuple[float, float]]]:
    """Run loops in threads, of which one runs at a time, for one step; so the speed of the machine is equal for all.

    Returns:
        for each step of a loop, CPU seconds before it begins, and in it.
    """
    import torch

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    go, done = {name: threading.Semaphore(0) for name in loops}, threading.Semaphore(0)
    ended = set[str]()

    def run(name: str) -> None:
        at: list[float] = []

        def begin() -> None:
            at.append(time.thread_time())

        def end() -> None:
            start, begun = at
            times[name].append((begun - start, time.thread_time() - begun))
            done.release()
            go[name].acquire()
            at[:] = [time.thread_time()]

        torch.set_num_threads(1)
        go[name].acquire()
        begin()
        try:
            loops[name]((begin, end))
        finally:
            ended.add(name)
            done.release()

    with ThreadPoolExecutor(len(loops)) as pool:
        running, names = [pool.submit(run, name) for name in loops], list(loops)
        while names:
            for name in names:
                go[name].release()
                done.acquire()
            names = [name for name in [*names[1:], names[0]] if name not in ended]
        for future in running:
            future.result()
    return times


class _Bare:
    """A tiny model and its optimizer."""

    def __init__(self) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = Qwen2ForCausalLM(Qwen2Config(vocab_size=4096, num_key_value_heads=2, **sizes)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def update(self) -> None:
        """Clip the gradients and update the weights, as Trainer does."""
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
    parser.add_argument("--overhead", type=int, metavar="ROWS", help="compare loops over this many rows instead")
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
