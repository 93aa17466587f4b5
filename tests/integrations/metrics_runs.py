"""Trainers with MetricsCallback and MixtureCallback, in one process group: run by 2 ranks in test_metrics_callback.py.

ARGUMENTS: OUT MODE PACKS BLEND IMAGES IMAGE_TOKENIZER; with MODE `killed`, only the mixture, until SIGKILL
"""

import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from energon_packed import (
    ChatEncoder,
    CostModel,
    DataflowLoader,
    EncodedSample,
    MapDistributor,
    MetricsCallback,
    MixtureCallback,
    MixtureDistributor,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    PoolPacker,
    SampleSource,
    ThroughputMetrics,
    TrainerStream,
    TrainerStreamCallback,
    packed_training_arguments,
    prepare_loader,
)
from tests.integrations.launched import report, tiny_qwen2
from tests.integrations.trainer_runs import ONE_EPOCH, QUIET, SFT
from tests.loading.models import tiny_model

QUIET_RUN = QUIET | {"save_strategy": "no"}
MIXTURE_STEPS, SAVED, KILLED = 10, 3, 5


class Reported(TrainerCallback):
    """Keeps the logs of a reporter, which the Trainer calls before the callbacks of the user."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def logs_of(trainer: Any) -> list[dict[str, float]]:
    """The logs of a training."""
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def map_style(folder: Path, packs: Path) -> list[dict[str, float]]:
    """The stock Trainer with its own default arguments, a worker process and gradient accumulation."""
    arguments = QUIET_RUN | ONE_EPOCH | {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    return logs_of(
        Trainer(
            tiny_qwen2(),
            TrainingArguments(str(folder), **arguments),
            train_dataset=PackedDataset(packs),
            data_collator=PaddingFreeCollator(),
            callbacks=[MetricsCallback(seq_len=384)],
        )
    )


def ordered(folder: Path, blend: Path) -> dict[str, Any]:
    """PackedTrainer over a blend, with evaluations between the steps, padding, and a reporter."""
    data = PackedDataset(blend)
    args = packed_training_arguments(
        str(folder),
        data,
        **QUIET_RUN,
        **ONE_EPOCH | {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1},
    )
    reporter = Reported()
    trainer = PackedTrainer(
        tiny_qwen2(),
        args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=PaddingFreeCollator(pad_to=400),
        callbacks=[reporter],
    )
    MetricsCallback(384, cost=CostModel(token=1, square=0, patch=0)).add_to(trainer)
    logs = logs_of(trainer)
    tokens: Counter[str] = Counter()
    for sample in (sample for number in range(len(data)) for sample in data[number]):
        tokens[sample.source.dataset] += len(sample)
    reported = [sorted(name for name in entry if "/" in name) for entry in reporter.logs if "loss" in entry]
    return {"ordered": logs, "blend": tokens, "reported": reported}


def images(folder: Path, packs: Path, tokenizer: Path) -> list[dict[str, float]]:
    """TRL's trainer with a vision-language model and gradient accumulation."""
    encoder = ChatEncoder.from_pretrained(tokenizer)
    model = tiny_model("qwen2_5_vl", encoder, "sdpa").train()
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    return logs_of(
        SFTTrainer(
            model,
            SFTConfig(
                str(folder),
                **QUIET_RUN
                | ONE_EPOCH
                | {"gradient_accumulation_steps": 2, "bf16": False, "label_smoothing_factor": 0.1},
                **SFT,
            ),
            train_dataset=PackedDataset(packs, encoder).to_hf(),
            data_collator=PaddingFreeCollator(),
            processing_class=AutoTokenizer.from_pretrained(tokenizer),
            callbacks=[MetricsCallback()],
        )
    )


def other_collator(folder: Path) -> list[dict[str, float]]:
    """Features, and a collator of Transformers."""
    features = [{"input_ids": [2] * n, "labels": [2] * n} for n in range(10, 18)]
    args = TrainingArguments(str(folder), **QUIET_RUN, **ONE_EPOCH | {"per_device_train_batch_size": 2})
    collator = DataCollatorWithFlattening()
    data: Any = features
    return logs_of(
        Trainer(tiny_qwen2(), args, train_dataset=data, data_collator=collator, callbacks=[MetricsCallback()])
    )


def accelerated(packs: Path) -> dict[str, float]:
    """The lines of the page, over one epoch."""
    accelerator = Accelerator(cpu=True)
    loader = prepare_loader(
        accelerator, DataflowLoader(MapDistributor(PackedDataset(packs))), to_inputs=lambda batch: batch
    )
    metrics = ThroughputMetrics(seq_len=384)
    for _ in metrics.watch(loader):
        pass
    return metrics.summary()


def samples(name: str, seed: int) -> list[EncodedSample]:
    """Samples of a source; those of `b` are easier."""
    rng = np.random.default_rng(seed)
    found = []
    for number, length in enumerate(rng.integers(5, 60, 40).tolist()):
        ids = rng.integers(2, 2000 if name == "a" else 5, length)
        source = SampleSource(name, {})
        found.append(EncodedSample(id=f"{name}{number}", input_ids=ids, labels=ids.copy(), source=source))
    return found


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


class Seen(PaddingFreeCollator):
    """Remembers the samples of every row that the Trainer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Any] = []

    def __call__(self, features: Any) -> Any:
        self.ids.append(features[0].ids)
        return super().__call__(features)


def mixture(folder: Path, *, kill: int = 0, resume: bool = False, dropout: float = 0.1, **arguments: Any) -> Any:
    """Logs and rows of a learned mixture, with an update after every second step."""
    parts = [MapDistributor(samples(name, seed)) for seed, name in enumerate("ab")]
    learned = MixtureDistributor(parts, [1, 1], repeat=True, names=["a", "b"], smoothing=0.1)
    stream = TrainerStream(lambda: DataflowLoader(learned, packer=PoolPacker(128, pool_size=8), num_workers=1))
    settings = QUIET | {"max_steps": MIXTURE_STEPS, "gradient_accumulation_steps": 2, "save_steps": SAVED} | arguments
    args = packed_training_arguments(str(folder), stream, **settings)
    callbacks: list[Any] = [TrainerStreamCallback(stream), MixtureCallback(learned, every=2, rewards=strong)]
    collator = Seen()
    trainer = Trainer(
        tiny_qwen2(dropout=dropout),
        args,
        train_dataset=stream,
        data_collator=collator,
        callbacks=[*callbacks, *([KillAt(kill)] if kill else [])],
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "logs": logs,
        "ids": collator.ids,
        "weights": sum(p.double().sum().item() for p in trainer.model.parameters()),
    }


def strong(losses: dict[str, float]) -> dict[str, float]:
    """Rewards that move the weights within a few updates."""
    return {name: 3 * loss for name, loss in losses.items()}


def main() -> None:
    out, mode = sys.argv[1:3]
    packs, blend, image_packs, image_tokenizer = map(Path, sys.argv[3:])
    folder = Path(out)
    torch.set_num_threads(1)
    if mode == "killed":
        mixture(folder / "killed", kill=KILLED)
    result = ordered(folder / "ordered", blend) | {
        "map_style": map_style(folder / "map", packs),
        "images": images(folder / "images", image_packs, image_tokenizer),
        "other_collator": other_collator(folder / "other"),
        "accelerated": accelerated(packs),
        "mixture": mixture(folder / "mixture"),
        "resumed": mixture(folder / "killed", resume=True),
        "still": mixture(folder / "still", dropout=0.0, learning_rate=0.0, max_steps=2, save_steps=100),
    }
    report(out, result)
