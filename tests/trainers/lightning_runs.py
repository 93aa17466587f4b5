"""What users of Lightning and Fabric write: run by torchrun in test_lightning.py.

python -m tests.trainers.lightning_runs OUT PACKS
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from energon_packed import (
    DataflowLoader,
    GatheredLoader,
    MapDistributor,
    PackedDataset,
    PaddingFreeCollator,
    get_packed_loader,
)
from tests.integrations.launched import report, tiny_qwen2

LOADERS = {
    "energon": lambda packs: get_packed_loader(packs, epochs=1, num_workers=0),
    "dataflow": lambda packs: DataflowLoader(MapDistributor(PackedDataset(packs))),
}


class Module(lightning.LightningModule):
    """A language model that remembers the tokens of its rows, and its losses."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.model = tiny_qwen2()
        self.make = make
        self.seen: list[list[float]] = []

    def train_dataloader(self) -> Any:  # Lightning calls it when the process group exists
        return self.make()

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.model(**batch).loss
        self.seen.append([batch["input_ids"].sum().item(), loss.item()])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def fit(folder: Path, make: Any, *, steps: int = -1, resume: str | None = None) -> list[list[float]]:
    """Two epochs, or `steps` steps; a checkpoint at each step."""
    module = Module(make)
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
    ).fit(module, ckpt_path=resume)
    return module.seen


def fabric(folder: Path, make: Any, stop: int) -> dict[str, Any]:
    """Two epochs; and the same, saved after `stop` steps and restored."""
    launcher = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    launcher.launch()

    def run(loader: Any, steps: int) -> list[list[float]]:
        seen: list[list[float]] = []
        while len(seen) < steps:
            for batch in loader:
                loss = model(**batch).loss
                launcher.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append([batch["input_ids"].sum().item(), loss.item()])
                if len(seen) == steps:
                    break
        return seen

    def begin() -> Any:
        plain = tiny_qwen2()
        return launcher.setup(plain, torch.optim.AdamW(plain.parameters(), lr=5e-3))

    model, optimizer = begin()
    complete = run(make(), 2 * len(make()))
    model, optimizer = begin()
    loader = make()
    run(loader, stop)
    launcher.save(folder / "fabric", {"model": model, "optimizer": optimizer, "loader": loader})
    model, optimizer = begin()
    loader = make()
    launcher.load(folder / "fabric", {"model": model, "optimizer": optimizer, "loader": loader})
    return {"complete": complete, "rest": run(loader, len(complete) - stop)}


def map_style(packs: Path) -> list[float]:
    """Two epochs of a DataLoader, to which Lightning adds a DistributedSampler."""
    make = lambda: torch.utils.data.DataLoader(  # noqa: E731
        PackedDataset(packs), shuffle=True, collate_fn=PaddingFreeCollator()
    )
    return [tokens for tokens, _ in fit(Path(sys.argv[1]) / "map", make)]


def main() -> None:
    out, packs = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    result: dict[str, Any] = {"map": map_style(packs)}
    for name, loader in LOADERS.items():
        make = lambda loader=loader: GatheredLoader(loader(packs))  # noqa: E731
        complete = fit(out / name, make)
        rests = {}
        for step in (2, len(complete) // 2, len(complete) - 1):
            fit(out / f"{name}{step}", make, steps=step)
            rests[step] = fit(out / f"{name}{step}", make, resume=str(out / f"{name}{step}" / f"step={step}.ckpt"))
        result[name] = {"complete": complete, "rests": rests, "fabric": fabric(out, make, 2)}
    report(str(out), result)


if __name__ == "__main__":
    main()
