"""Epochs whose packs two ranks do not divide, with each `epoch_end`: every trainer records what it trained on.

python -m tests.integrations.epoch_end_runs OUT PACKS
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Trainer

from energon_packed import (
    Consumed,
    DataflowLoader,
    FileShardDistributor,
    MapDistributor,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    PoolPacker,
    TrainerStream,
    TrainerStreamCallback,
    get_packed_loader,
    packed_training_arguments,
    prepare_loader,
)
from tests.integrations.launched import report, tiny_qwen2
from tests.loading.flows import ITEMS, part_of

EPOCHS = 2
CHOICES = ("repeat", "drop", "error")
QUIET: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
QUIET |= {"logging_strategy": "no", "per_device_train_batch_size": 1, "num_train_epochs": EPOCHS}


def recorded() -> tuple[Any, list[list[int]]]:
    """A model, and the samples that are targets of each row that it gets."""
    model, seen = tiny_qwen2(), list[list[int]]()

    def record(model: Any, arguments: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():  # otherwise it is a check before the first step
            seen.append(inputs["input_ids"][inputs["labels"] != -100].unique().tolist())

    model.register_forward_pre_hook(record, with_kwargs=True)
    return model, seen


def trained(kind: Any, out: str, data: Any, **arguments: Any) -> list[list[int]]:
    """Train with a Trainer."""
    model, seen = recorded()
    callbacks = [TrainerStreamCallback(data)] if isinstance(data, TrainerStream) and kind is Trainer else []
    args = packed_training_arguments(out, data, **QUIET, **arguments)
    trainer = kind(model, args, train_dataset=data, data_collator=PaddingFreeCollator(), callbacks=callbacks)
    trainer.train()
    return seen[: trainer.state.global_step]


def looped(loader: Any) -> list[list[int]]:
    """Train with DDP."""
    model, seen = recorded()
    replica = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(EPOCHS):
        for batch in loader:
            inputs = batch if isinstance(batch, dict) else batch.transformers_inputs()
            loss = replica(**inputs).loss
            assert loss.isfinite()
            loss.backward()
    return seen


def accelerated(loader: Any) -> list[list[int]]:
    """Train with accelerate."""
    accelerator, (model, seen) = Accelerator(cpu=True), recorded()
    loader, model = prepare_loader(accelerator, loader), accelerator.prepare(model)
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
    return seen


def stream(**options: Any) -> DataflowLoader:
    """A stream of 3 files: rank 0 has 2 of them."""
    files = [range(0, 6), range(6, 9), range(9, ITEMS)]
    return DataflowLoader(FileShardDistributor(files, part_of), packer=PoolPacker(16, pool_size=2), **options)


def main() -> None:
    out, packs = sys.argv[1:]

    def order(**options: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(PackedDataset(packs)), **options)

    def energon(**options: Any) -> Any:
        return get_packed_loader(packs, epochs=1, num_workers=0, **options)

    runs: dict[str, Callable[..., list[list[int]]]] = {}
    for name, make in {"order": order, "energon": energon, "stream": stream}.items():
        runs[f"DDP, {name}"] = lambda make=make, **end: looped(make(**end))
    for name, make in {"order": order, "energon": energon, "stream": stream}.items():
        runs[f"accelerate, {name}"] = lambda make=make, **end: accelerated(make(**end))
    runs["TrainerStream, order"] = lambda **end: trained(Trainer, out, TrainerStream(lambda: order(**end)))
    runs["TrainerStream, energon"] = lambda **end: trained(Trainer, out, TrainerStream(lambda: energon(**end)))
    # The length of a stream is not known in advance: as many steps as the loop with DDP made.
    runs["TrainerStream, stream"] = lambda **end: trained(
        Trainer,
        out,
        TrainerStream(lambda: stream(**end)),
        max_steps=99 if end["epoch_end"] == "error" else len(found[f"DDP, stream, {end['epoch_end']}"]),
    )
    runs["Consumed, order"] = lambda **end: looped(Consumed(order(**end)))
    runs["Consumed, energon"] = lambda **end: looped(Consumed(energon(**end)))

    found: dict[str, Any] = {}
    for name, run in runs.items():
        for choice in CHOICES:
            try:
                found[f"{name}, {choice}"] = run(epoch_end=choice)
            except Exception as error:
                found[f"{name}, {choice}"] = f"{type(error).__name__}: {error}"
    for drops in (False, True):
        found[f"PackedTrainer, {'drop' if drops else 'repeat'}"] = trained(
            PackedTrainer, out, PackedDataset(packs), dataloader_drop_last=drops
        )
        found[f"Trainer, {'drop' if drops else 'repeat'}"] = trained(
            Trainer, out, PackedDataset(packs), dataloader_drop_last=drops
        )
    report(out, found)


if __name__ == "__main__":
    main()
