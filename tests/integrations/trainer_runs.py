"""What users of transformers.Trainer write, in one process group: run by 2 ranks in test_trainer_runs.py.

tests/trainers/huggingface has the stock Trainer over a PackedDataset, and over a TrainerStream of one epoch.

ARGUMENTS: OUT PACKS BLEND TOKENIZER IMAGES IMAGE_TOKENIZER CHECKPOINT
"""

import hashlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    DataflowLoader,
    MapDistributor,
    PackedBatch,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    SetEpochCallback,
    TrainerStream,
    TrainerStreamCallback,
    check_training_arguments,
    get_packed_loader,
    packed_training_arguments,
)
from tests.integrations.launched import report, tiny_qwen2
from tests.loading.models import tiny_model

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 5e-3,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_only_model": False,
}

ONE_EPOCH: dict[str, Any] = {"per_device_train_batch_size": 1, "num_train_epochs": 1}
SFT: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}


class Recording(PaddingFreeCollator):
    """Remembers the samples of every batch that the Trainer reads."""

    def __init__(self, *, of_stream: bool = False) -> None:
        super().__init__()
        self.of_stream = of_stream
        self.seen: list[list[str | None]] = []

    def __call__(self, features: Any) -> Any:
        if isinstance(features[0], PackedBatch):
            self.seen.append(features[0].ids)
        elif not self.of_stream:  # otherwise it is a row of the validation data
            packs = [pack["pack"] if isinstance(pack, dict) else pack for pack in features]
            self.seen.append([sample.id for pack in packs for sample in pack])
        return super().__call__(features)


class StopAt(TrainerCallback):
    """Ends the run after a step, as a killed job."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Draws(TrainerCallback):
    """Takes random numbers at every step, other ones on each rank, as dropout does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(1 + args.process_index)


class Used(TrainerCallback):
    """Counts the micro batches that were trained on until each step."""

    def __init__(self) -> None:
        self.used = 0
        self.until: dict[int, int] = {}

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.used += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.used += 1
        self.until[state.global_step] = self.used


def train(
    folder: Path,
    data: Any,
    *,
    stop: int = 0,
    resume: str | None = None,
    validation: Any = None,
    packed: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Steps, samples and losses of one run; with validation data, or `packed`, by PackedTrainer without callbacks."""
    by_length = arguments.pop("by_length", False)
    if validation is not None:
        arguments |= {"eval_strategy": "steps", "eval_steps": 2}
    args = packed_training_arguments(str(folder), data, **(QUIET | arguments))
    collator = Recording(of_stream=isinstance(data, TrainerStream))
    used = Used()
    callbacks: list[Any] = [used, StopAt(stop)] if stop else [used]
    packed |= validation is not None
    if packed:
        callbacks.append(Draws())
    elif isinstance(data, TrainerStream):
        callbacks.append(TrainerStreamCallback(data))
    elif len(data.blend) > 1:
        callbacks.append(SetEpochCallback(data))
    if by_length:
        args.train_sampling_strategy = "group_by_length"  # on finished arguments, as the page says
    kind = PackedTrainer if packed else Trainer
    trainer = kind(
        tiny_qwen2(dropout=0.1),
        args,
        train_dataset=data,
        eval_dataset=validation,
        data_collator=collator,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    found = {"steps": trainer.state.global_step, "seen": collator.seen, "losses": losses, "used": used.used}
    return found | {"evaluated": evaluated, "until": used.until, "weights": digest(trainer.model)}


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of all weights, bit by bit."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        found.update(name.encode() + weight.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def twice(folder: Path, make: Any, **arguments: Any) -> dict[str, Any]:
    """A run without interruption, and one that is stopped after step 3 or 4 and resumed."""
    complete = train(folder / "complete", make(), save_steps=1000, **{"save_strategy": "no"} | arguments)
    first = train(folder / "parts", make(), stop=4, **arguments)
    second = train(folder / "parts", make(), resume=str(folder / "parts" / "checkpoint-3"), **arguments)
    return {"complete": complete, "first": first, "second": second}


def sft(folder: Path, data: PackedDataset, model: Any, tokenizer: str, **arguments: Any) -> dict[str, Any]:
    """Samples and losses of TRL's trainer: one epoch, and the same stopped and resumed."""
    found = {}
    for name, stop, resume in (("complete", 0, None), ("first", 2, None), ("second", 0, "checkpoint-2")):
        parts = folder / ("complete" if name == "complete" else "parts")
        collator = Recording()
        trainer = SFTTrainer(
            model(),
            SFTConfig(str(parts), **(QUIET | {"save_steps": 2, "bf16": False} | arguments), **SFT),
            train_dataset=data.to_hf(),
            data_collator=collator,
            processing_class=AutoTokenizer.from_pretrained(tokenizer),
            callbacks=[StopAt(stop)] if stop else [],
        )
        trainer.train(resume_from_checkpoint=str(parts / resume) if resume else None)
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        used = trainer.state.global_step
        until = {step: step for step in range(1, used + 1)}
        found[name] = {"steps": used, "seen": collator.seen, "losses": losses, "used": used, "until": until}
    return found


def evaluation(folder: Path, packs: Path) -> dict[str, float]:
    """The loss of the validation split by PackedTrainer, with 1 and 4 packs in a row, and by the stock Trainer."""
    data = PackedDataset(packs, split="val")
    found = {}
    for name, kind, size in (("1", PackedTrainer, 1), ("4", PackedTrainer, 4), ("Trainer", Trainer, 1)):
        args = packed_training_arguments(
            str(folder), data, use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=size
        )
        trainer = kind(tiny_qwen2(), args, eval_dataset=data, data_collator=PaddingFreeCollator())
        found[name] = trainer.evaluate()["eval_loss"]
    return found


def refusals(folder: Path, packs: Path) -> list[str]:
    """Messages about arguments and data that contradict each other."""

    def caught(run: Any) -> str:
        try:
            run()
        except (ConfigError, BatchError) as error:
            return str(error)
        return "accepted"

    data = PackedDataset(packs)
    stream = TrainerStream(lambda: get_packed_loader(packs, epochs=1, num_workers=0))
    alone = TrainerStream(get_packed_loader(packs, epochs=1, num_workers=0, rank=0, world_size=1))
    dispatched = packed_training_arguments(str(folder), data, **QUIET)
    dispatched.accelerator_config.dispatch_batches = True
    dispatched.accelerator_config.use_seedable_sampler = False
    streamed = packed_training_arguments(str(folder), stream, **QUIET)

    def stock(data: Any, args: Any) -> Any:
        return lambda: Trainer(tiny_qwen2(), args, train_dataset=data, data_collator=PaddingFreeCollator()).train()

    found = [caught(stock(data, dispatched)), caught(stock(alone, streamed))]
    streamed.accelerator_config.dispatch_batches = None
    found.append(caught(stock(stream, streamed)))
    streamed.max_steps = -1
    streamed.ignore_data_skip = False
    found.append(caught(lambda: check_training_arguments(streamed, stream)))
    return found


def sft_images(folder: Path, packs: Path, tokenizer: Path) -> dict[str, Any]:
    """The same with a vision-language model.

    Qwen2.5-VL is saved with the names of its first release, which a resumed Trainer does not find again (missing keys,
    a warning alone, Transformers 5.23; QwenLM/Qwen3-VL issue 1763, ms-swift issue 7947).
    """
    encoder = ChatEncoder.from_pretrained(tokenizer)

    def model() -> Any:
        made = tiny_model("qwen2_5_vl", encoder, "sdpa").train()
        made.save_pretrained = partial(made.save_pretrained, save_original_format=False)
        return made

    return sft(folder, PackedDataset(packs, encoder), model, str(tokenizer), **ONE_EPOCH)


def main() -> None:
    out, packs, blend, tokenizer, images, image_tokenizer, checkpoint = sys.argv[1], *map(Path, sys.argv[2:])
    folder = Path(out)
    torch.set_num_threads(1)
    map_style = {"per_device_train_batch_size": 1, "num_train_epochs": 2}
    result: dict[str, Any] = {
        "ordered": twice(folder / "ordered", lambda: PackedDataset(packs), packed=True, **map_style),
        "grouped": twice(folder / "grouped", lambda: PackedDataset(packs), packed=True, by_length=True, **map_style),
        "ordered_blend": twice(
            folder / "ordered_blend",
            lambda: PackedDataset(blend),
            packed=True,
            gradient_accumulation_steps=2,
            dataloader_num_workers=1,
            **map_style,
        ),
        "blend": twice(folder / "blend", lambda: PackedDataset(blend), **map_style),
        "stream_of_blend": twice(
            folder / "stream_of_blend",
            lambda: TrainerStream(lambda: get_packed_loader(blend, num_workers=0)),
            max_steps=6,
            gradient_accumulation_steps=2,
        ),
        "dataflow": twice(
            folder / "dataflow",
            lambda: TrainerStream(lambda: DataflowLoader(MapDistributor(PackedDataset(packs)))),
            num_train_epochs=2,
            validation=PackedDataset(packs, split="val"),
        ),
        "sft": sft(folder / "sft", PackedDataset(packs), tiny_qwen2, str(tokenizer), **ONE_EPOCH),
        "sft_images": sft_images(folder / "sft_images", images, image_tokenizer),
        "continued": train(
            folder / "continued",
            PackedDataset(packs),
            resume=str(checkpoint),
            packed=True,
            save_strategy="no",
            **map_style,
        ),
        "folder": str(folder),
        "evaluation": evaluation(folder / "evaluation", packs),
        "refusals": refusals(folder / "refusals", packs),
    }
    report(out, result)
