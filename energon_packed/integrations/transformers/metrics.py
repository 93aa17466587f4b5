"""MetricsCallback: the batches that a Trainer has used -> throughput, padding, imbalance and sources in its logs."""

from abc import ABC, abstractmethod
from typing import Any

from transformers import TrainerCallback

from energon_packed.integrations.transformers.batch_taps import BatchTap
from energon_packed.loading.costs.model import CostModel
from energon_packed.loading.monitoring.counts import BatchCounts, count_batch
from energon_packed.loading.monitoring.metrics import ThroughputMetrics


class LogCallback(TrainerCallback, ABC):
    """Base class of callbacks that add values to the logs of training. A subclass implements `values`."""

    @abstractmethod
    def values(self) -> dict[str, float]:
        """Return values by their names in the log; every rank must call it."""

    def add_to(self, trainer: Any) -> None:
        """Add this callback to a Trainer, before the reporters of `report_to`, which then report the values too.

        The Trainer calls `callbacks=[...]` after its reporters (TensorBoard, Weights & Biases, ...). The values of
        these callbacks are in `trainer.state.log_history` and in the output of the Trainer, but not in the reports.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the values to a log of training, and to the log history."""
        if logs is None or "loss" not in logs:  # of an evaluation, or of the end of the training
            return
        values = self.values()
        logs.update(values)
        state.log_history[-1].update(values)


class MetricsCallback(LogCallback):
    """TrainerCallback that adds the values of `ThroughputMetrics` to the logs of Trainer, PackedTrainer or SFTTrainer.

        MetricsCallback(seq_len=4096).add_to(trainer)       # or callbacks=[MetricsCallback(seq_len=4096)]

    It counts the micro batches that the model has used, on all ranks, when they are collated. Times do not include
    evaluations and checkpoints.

    Args:
        seq_len, cost, group: as for ThroughputMetrics.
        packs_per_batch: packs that are joined in one row; by default `per_device_train_batch_size`. For a
            TrainerStream, `micro_batch_size` of its loader.

    Examples:
        >>> callbacks = [MetricsCallback()]  # of the Trainer
    """

    def __init__(
        self,
        seq_len: int | None = None,
        *,
        packs_per_batch: int | None = None,
        cost: CostModel | None = None,
        group: Any = None,
    ) -> None:
        self._metrics = ThroughputMetrics(seq_len, packs_per_batch=packs_per_batch or 1, cost=cost, group=group)
        self._packs = packs_per_batch
        self._tap = BatchTap("energon_packed_counts", _counts, lambda counts, _: self._metrics.add_counts(counts))

    def values(self) -> dict[str, float]:
        """Return the values since the last log."""
        return self._metrics.summary()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting."""
        self._metrics.packs_per_batch = self._packs or args.per_device_train_batch_size
        self._metrics.micro_batches = args.gradient_accumulation_steps
        self._metrics.restart_timer()
        self._tap.attach(kwargs["train_dataloader"], kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the time in which the Trainer read the batches of the step."""
        self._metrics.end_wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step."""
        self._metrics.end_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the time of an evaluation."""
        self._metrics.restart_timer()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the time of a checkpoint."""
        self._metrics.restart_timer()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop counting."""
        self._tap.detach()


def _counts(batch: Any) -> BatchCounts:
    return count_batch(batch).read()
