"""Lightning and Fabric with Consumed, as on docs/trainers.md; and Lightning with a DataLoader."""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from energon_packed import (
    Consumed,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PaddingFreeCollator,
    get_packed_loader,
    step_targets,
)
from tests.trainers.recorder import Recorder, Spec

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}


def make_loader(spec: Spec) -> Any:
    if spec.kind == "map":
        return torch.utils.data.DataLoader(PackedDataset(spec.packs), shuffle=True, collate_fn=PaddingFreeCollator())
    if spec.kind == "dataflow":
        return Consumed(DataflowLoader(MapDistributor(PackedDataset(spec.packs))))
    return Consumed(get_packed_loader(spec.packs, epochs=1, num_workers=0))


class Module(lightning.LightningModule):
    """A language model whose gradient is the mean over the targets of a step."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.model, self.targets = spec, spec.load_model(), torch.tensor(0.0)
        self.recorder = Recorder(spec)
        self.recorder.watch(self.model)

    def train_dataloader(self) -> Any:  # called when the process group exists
        return make_loader(self.spec)

    def training_step(self, batch: Any, number: int) -> Any:
        self.targets = self.targets + step_targets([batch])
        loss = self.model(**batch | {"num_items_in_batch": 1}).loss  # the sum over the targets
        self.recorder.record(batch, loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.trainer.accumulate_grad_batches / float(self.targets)
        self.targets = torch.tensor(0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.spec.learning_rate)


def fit(spec: Spec) -> None:
    module = Module(spec)
    last = spec.resume and max(
        Path(spec.checkpoints).glob("*.ckpt"), key=lambda file: int(file.stem.partition("=")[2])
    )
    saving = ModelCheckpoint(spec.checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [saving]}
    trainer = lightning.Trainer(max_epochs=spec.epochs, accumulate_grad_batches=spec.accumulation, **OPTIONS, **quiet)
    trainer.fit(module, ckpt_path=str(last) if last else None)
    module.recorder.finish(module.model.state_dict())


def fabric(spec: Spec) -> None:
    launcher = lightning.Fabric(**OPTIONS)
    launcher.launch()
    model, recorder = spec.load_model(), Recorder(spec)
    recorder.watch(model)
    model, optimizer = launcher.setup(model, torch.optim.AdamW(model.parameters(), lr=spec.learning_rate))
    loader, folder = make_loader(spec), Path(spec.checkpoints)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    if spec.resume:
        launcher.load(max(folder.glob("*"), key=lambda file: int(file.name)), state)
    while state["step"] < spec.steps(len(loader)):
        iterator = iter(loader)
        while batches := list(islice(iterator, spec.accumulation)):
            targets = step_targets(batches)
            for batch in batches:
                loss = model(**batch | {"num_items_in_batch": targets}).loss
                recorder.record(batch, float(loss) * float(targets))
                launcher.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            launcher.save(folder / str(state["step"]), state)
    recorder.finish(model.state_dict())


def main(spec: Spec) -> None:
    (fabric if spec.kind == "fabric" else fit)(spec)


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
