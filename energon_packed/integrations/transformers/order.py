"""OrderLogCallback: the batches that the model of a Trainer has used -> an order log."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.integrations.transformers.batch_taps import BatchTap
from energon_packed.integrations.transformers.checkpoints import CheckpointCallback, epoch_of
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.monitoring.order_log import LoggedSamples, OrderLog
from energon_packed.loading.ranks import group_place
from energon_packed.loading.state import Position


class OrderLogCallback(CheckpointCallback):
    """TrainerCallback that writes the order log of a Trainer over a PackedDataset: a line for each used micro batch.

        trainer = Trainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator(),
                          callbacks=[OrderLogCallback("order")])

    PackedTrainer and TrainerStream have the argument `order_log` instead, whose lines also have the places of packs.

    Args:
        folder: folder of the log, the same on all processes.

    Raises:
        ConfigError: the data collator does not return the batches of this package, or the folder has the log of
            another run.
        BatchError: training resumes from a checkpoint without the log.

    Examples:
        >>> callbacks = [OrderLogCallback("order-log")]  # of the Trainer
    """

    key = "energon_packed_order_log"
    remedy = "pass callbacks=[OrderLogCallback(DIR)] to the Trainer that saves"

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._log: OrderLog | None = None
        self._at = Position(0, 0)
        self._last = 0  # step of an epoch
        self._tap = BatchTap("energon_packed_names", _samples, self._use)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the log, after the lines of the checkpoint."""
        loader = kwargs["train_dataloader"]
        facts = {"loader": "Trainer", "identity": [args.seed, args.data_seed]}
        self._log, self._at = OrderLog(self._folder, group_place(), lambda: facts), Position(0, 0)
        self._last = len(loader)
        super().on_train_begin(args, state, control, **kwargs)
        self._tap.attach(loader, kwargs["model"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the micro batches of this epoch."""
        if (epoch := epoch_of(state)) != self._at.epoch:
            self._at = Position(epoch, 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the log."""
        self._tap.detach()

    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Continue the log of a checkpoint."""
        assert self._log is not None
        self._at = Position(state["epoch"], state["step"])
        self._log.restore([state], self._at)

    def state(self) -> dict[str, Any]:
        """Return the position in the log, the same on all ranks."""
        assert self._log is not None
        return {"epoch": self._at.epoch, "step": self._at.step, **self._log.state(self._at)}

    def _use(self, samples: LoggedSamples, output: Any) -> None:
        assert self._log is not None
        self._at = replace(self._at, step=self._at.step + 1)
        self._log.add(self._at, samples)
        if self._at.step == self._last:
            self._log.add(self._at, None, end=True)
            self._at = Position(self._at.epoch + 1, 0)


def _samples(batch: PackedBatch | Mapping[str, Any]) -> LoggedSamples:
    if not isinstance(batch, PackedBatch):
        raise ConfigError(
            f"`data_collator` must be a Collator of energon-packed for an order log, got batches of "
            f"{type(batch).__name__}. Pass PaddingFreeCollator()."
        )
    return LoggedSamples.of(batch)
