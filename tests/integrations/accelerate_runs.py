"""What users of accelerate write: run by `accelerate launch` in test_accelerate.py.

python -m tests.integrations.accelerate_runs OUT PACKS
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

from energon_packed import (
    ConfigError,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PaddingFreeCollator,
    get_packed_loader,
    prepare_loader,
)
from tests.integrations.launched import report, tiny_qwen2

IDS = "sample_ids"


class Named(PaddingFreeCollator):
    """Adds the numbers of the samples to the inputs, as a tensor that accelerate may gather."""

    def __call__(self, features: Any) -> Any:
        samples = [sample for pack in features for sample in pack]
        numbers = torch.tensor([[int(str(sample.id).split("-")[1]) for sample in samples]])
        return self.collate(samples).transformers_inputs() | {IDS: numbers}


def settings(packs: Path) -> dict[str, Any]:
    """Samples of one epoch with each setting, or the message."""
    found: dict[str, Any] = {}
    for split in (False, True):
        for dispatch in (False, True):
            config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            loader = torch.utils.data.DataLoader(
                PackedDataset(packs), batch_size=2 if split else 1, shuffle=True, collate_fn=Named()
            )
            model, loader = accelerator.prepare(tiny_qwen2(), loader)
            try:
                seen = []
                for batch in loader:
                    seen += batch.pop(IDS)[0].tolist()
                    accelerator.backward(model(**batch).loss)
                found[f"{split} {dispatch}"] = seen
            except ConfigError as error:
                found[f"{split} {dispatch}"] = str(error)
            accelerator.free_memory()
    return found


def tokens(loader: Any, count: int | None = None) -> list[Any]:
    """Tokens of the next batches of a loader, and whether accelerate takes each for the last one of the epoch."""
    found = []
    for batch in loader:
        found.append([batch["input_ids"].sum().item(), loader.end_of_dataloader])
        if len(found) == count:
            break
    return found


def own_loaders(folder: Path, packs: Path, make: Any) -> dict[str, Any]:
    """Epochs, a broken iteration, a checkpoint and skipped batches of a loader that deals packs to ranks itself."""
    accelerator = Accelerator(cpu=True)
    untouched = make()
    loader = prepare_loader(accelerator, make())
    epochs = [tokens(loader), tokens(loader)]
    found: dict[str, Any] = {"epochs": epochs, "length": len(loader)}
    found["as it is"] = accelerator.prepare(untouched) is untouched and accelerator.prepare(loader) is loader
    broken = prepare_loader(accelerator, make())
    found["broken"] = tokens(broken, 1) + tokens(broken) + tokens(broken)
    found["skipped"] = tokens(skip_first_batches(prepare_loader(accelerator, make()), 2))
    found["resumed"] = {}
    for used in (0, 2, len(loader), len(loader) + 1):
        saving = Accelerator(cpu=True)
        first = prepare_loader(saving, make())
        saving.register_for_checkpointing(first)
        for count in (min(used, len(loader)), used - len(loader)):
            if count > 0:
                tokens(first, count)
        checkpoint = str(folder / f"checkpoint-{used}")
        saving.save_state(checkpoint)
        saving.wait_for_everyone()
        loading = Accelerator(cpu=True)
        second = prepare_loader(loading, make())
        loading.register_for_checkpointing(second)
        loading.load_state(checkpoint)
        found["resumed"][used] = tokens(second)
    return found


def main() -> None:
    out, packs = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    result = {"settings": settings(packs)}
    place: dict[str, Any] = {"num_workers": 0}
    loaders = {
        "energon": lambda: get_packed_loader(packs, epochs=1, **place),
        "dataflow": lambda: DataflowLoader(MapDistributor(PackedDataset(packs)), **place),
    }
    for name, make in loaders.items():
        result[name] = own_loaders(Path(out) / name, packs, make)
    report(out, result)


if __name__ == "__main__":
    main()
