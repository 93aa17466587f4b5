"""Callbacks for transformers.Trainer: isolation before the first step, and the packs of a blend in each epoch."""

from typing import Any

from transformers import TrainerCallback

from energon_packed.integrations.isolation import check_isolation


class IsolationCheck(TrainerCallback):
    """Runs `check_isolation` on the model when training begins: `Trainer(..., callbacks=[IsolationCheck()])`.

    Raises:
        IsolationError: the model does not keep packed samples apart.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Check once; every process does the same."""
        check_isolation(model)


class BlendEpochs(TrainerCallback):
    """Draws the packs of a blend anew in each epoch: `Trainer(..., callbacks=[BlendEpochs(dataset)])`.

    The Trainer tells its sampler the number of the epoch, and not the data. Resuming draws the epoch that was saved.

    Args:
        dataset: PackedDataset over a Metadataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the packs of this epoch."""
        self.dataset.set_epoch(int((state.epoch or 0) + 1e-6))
