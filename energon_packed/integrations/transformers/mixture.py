"""MixtureCallback: losses by source of a Trainer -> weights of a mixture, updated, logged, saved and restored."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.transformers.batch_taps import BatchTap
from energon_packed.integrations.transformers.checkpoints import CheckpointCallback
from energon_packed.integrations.transformers.metrics import LogCallback
from energon_packed.loading.collation.batch import (
    PackedBatch,
    Signal,
    padded_bounds,
    source_names,
    sums_by_source,
    target_signals,
    target_weights,
)
from energon_packed.loading.distributors.mixture import MixtureDistributor
from energon_packed.loading.ranks import all_gather_object, group_place
from energon_packed.options import as_integer, check_choice

Rewards = Callable[[dict[str, float]], Mapping[str, float]]
RewardSignal = Literal["loss", "entropy", "gradient_norm", "validation_loss"]


class _Targets(NamedTuple):
    """Targets of a row.

    Attributes:
        labels: int64 (1, T), unshifted.
        weights: float32 (T-1,), weights of the targets at 1..T-1.
        bounds: int32 (S+1,) or longer, boundaries of the samples.
        names: dataset of each of the S samples.
    """

    labels: torch.Tensor
    weights: torch.Tensor
    bounds: torch.Tensor
    names: list[str]


class MixtureCallback(CheckpointCallback, LogCallback):
    """TrainerCallback that updates the weights of a mixture by the losses of its sources.

        mixture = MixtureDistributor(parts, [1, 1], repeat=True, names=names)
        stream = TrainerStream(lambda: DataflowLoader(mixture, packer=PoolPacker(4096)))
        callbacks = [TrainerStreamCallback(stream), MixtureCallback(mixture, every=10)]

    The losses are computed from the output of the forward pass of the training. After every `every` steps, the mean
    loss of each source over all targets of all ranks since the last update is passed to `rewards`, and its result to
    `mixture.update`. The logs get `data/weight/NAME`, `data/loss/NAME` (or the name of another signal),
    `data/reward/NAME`, `data/count/NAME`, the samples since the update before, and `data/rank`. The state of the
    loader contains the weights, and the checkpoint also contains the losses since the last update, so a resumed run
    has the same weights and batches.

    Args:
        mixture: the outermost distributor of the loader. Its `names` are the datasets in `batch.sources`.
        every: optimizer steps between two updates.
        signal: mean of each source in place of its loss: `entropy` of the predicted distributions; `gradient_norm`,
            the norm of the gradient of the loss of a target by its logits; `validation_loss`, from the evaluations of
            a Trainer with `eval_dataset={NAME: dataset}`, which the next update after an evaluation uses.
        rewards: computes rewards by name from the means by name; by default the means. Every rank calls it with the
            same means.
        group: process group of the ranks that read different data; by default all processes.

    Raises:
        ConfigError: `every` is below 1, or `signal` is unknown; while training, a source is not in the mixture, or the
            model returns no logits.
        BatchError: the batches have no sources, or the checkpoint has no losses.

    Examples:
        >>> parts = [MapDistributor([{"text": "A"}]), MapDistributor([{"text": "B"}])]
        >>> mixture = MixtureDistributor(parts, [1, 1], repeat=True, names=["a", "b"])
        >>> callbacks = [MixtureCallback(mixture, every=10)]  # of the Trainer
    """

    key = "energon_packed_mixture"
    remedy = "pass callbacks=[MixtureCallback(mixture)] to the Trainer that saves"

    def __init__(
        self,
        mixture: MixtureDistributor,
        *,
        every: int = 1,
        signal: RewardSignal = "loss",
        rewards: Rewards = dict,
        group: Any = None,
    ) -> None:
        check_choice("signal", signal, RewardSignal)
        self.mixture = mixture
        self.needs_logits = signal != "validation_loss"  # PackedTrainer then does not compute them in pieces
        self._signal: RewardSignal = signal
        self._every, self._rewards, self._group = as_integer(every, "every"), rewards, group
        self._losses: dict[str, float] = {}  # of the last update
        self._last: dict[str, dict[str, float]] = {"reward": {}, "count": {}}  # of the last update
        self._validation: dict[str, float] = {}  # since the last update
        self._sums: dict[str, tuple[float, float, int]] = {}  # of this rank: loss * weight, weight, samples
        self._pending: list[tuple[list[str], torch.Tensor]] = []  # sums of rows, perhaps on a device
        self._counts: Counter[str] = Counter()  # samples of these rows
        self._tap = BatchTap("energon_packed_targets", _targets, self._add)

    def values(self) -> dict[str, float]:
        """Return the weights, and the losses of the last update."""
        named = {"weight": self.mixture.current_weights, self._signal: self._losses, **self._last}
        values = {f"data/{key}/{name}": value for key, means in named.items() for name, value in means.items()}
        return values | {"data/rank": group_place(self._group)[0]}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the losses of a checkpoint, and start to compute losses."""
        self._losses, self._sums, self._pending = {}, {}, []
        self._last, self._validation, self._counts = {"reward": {}, "count": {}}, {}, Counter()
        super().on_train_begin(args, state, control, **kwargs)
        self._tap.attach(kwargs["train_dataloader"], kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the weights after every `every` steps."""
        if state.global_step % self._every:
            return
        if self._signal == "validation_loss" and not self._validation:
            return  # no evaluation since the last update
        ranks = all_gather_object(self._read(), self._group)
        self._sums = {}
        names = sorted({name for sums in ranks for name in sums})
        totals = {name: [math.fsum(column) for column in zip(*_of(name, ranks), strict=True)] for name in names}
        self._losses = {name: loss / weight for name, (loss, weight, _) in totals.items() if weight > 0}
        if self._signal == "validation_loss":
            self._losses, self._validation = self._validation, {}
        rewards = dict(self._rewards(dict(self._losses)))
        counts = {name: int(total[2]) for name, total in totals.items()}
        self._last = {"reward": {name: float(reward) for name, reward in rewards.items()}, "count": dict(counts)}
        self.mixture.update(rewards, counts=counts, group=self._group)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Keep the validation losses of the sources for the next update.

        Raises:
            ConfigError: `signal` is `validation_loss`, and the evaluated dataset is not a source of the mixture.
        """
        if self._signal != "validation_loss":
            return
        losses = {
            key: value for key, value in (metrics or {}).items() if key.startswith("eval_") and key.endswith("loss")
        }
        found = {name: losses[f"eval_{name}_loss"] for name in self.mixture.names if f"eval_{name}_loss" in losses}
        if losses and not found:
            raise ConfigError(
                f"`signal='validation_loss'` needs eval_dataset={{NAME: dataset}} of the Trainer with the names "
                f"{', '.join(self.mixture.names)}, got the metrics {', '.join(losses)}."
            )
        self._validation |= found

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop computing losses."""
        self._tap.detach()

    def state(self) -> dict[str, Any]:
        """Return the losses since the last update, of all ranks."""
        sums = all_gather_object(self._read(), self._group)
        return {"losses": self._losses, "sums": sums, "last": self._last, "validation": self._validation}

    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Continue with saved losses; with another number of ranks, each rank continues with some of them."""
        rank, world_size = group_place(self._group)
        self._losses, self._last, self._validation = dict(state["losses"]), state["last"], dict(state["validation"])
        for sums in state["sums"][rank::world_size]:
            for name, (loss, weight, samples) in sums.items():
                self._sum(name, loss, weight, samples)

    @torch.compiler.disable  # a compiled model would compile it again for another number of samples
    def _add(self, targets: _Targets, output: Any) -> None:
        """Add the losses of a row."""
        self._counts.update(targets.names)
        if self._signal == "validation_loss":
            return
        with torch.no_grad():
            losses = _values(output, targets.labels, self._signal)
            weights = targets.weights.to(losses.device)
            self._pending.append(sums_by_source(losses, weights, targets.bounds, targets.names))

    def _read(self) -> dict[str, tuple[float, float, int]]:
        """The sums of this rank since the last update."""
        for names, sums in self._pending:
            for name, loss, weight in zip(names, *sums.tolist(), strict=True):
                self._sum(name, loss, weight, 0)
        for name, samples in self._counts.items():
            self._sum(name, 0.0, 0.0, samples)
        self._pending, self._counts = [], Counter()
        return self._sums

    def _sum(self, name: str, loss: float, weight: float, samples: int) -> None:
        before = self._sums.get(name, (0.0, 0.0, 0))
        self._sums[name] = (before[0] + loss, before[1] + weight, before[2] + samples)


def _of(name: str, ranks: list[dict[str, tuple[float, float, int]]]) -> list[tuple[float, float, int]]:
    return [sums[name] for sums in ranks if name in sums]


def _targets(batch: Any) -> _Targets:
    if not isinstance(batch, PackedBatch):
        raise BatchError(
            "MixtureCallback needs batches with sources, got a dict without. Pass PaddingFreeCollator() as "
            "`data_collator`."
        )
    bounds = padded_bounds(batch)
    return _Targets(batch.labels, target_weights(batch)[0], bounds, source_names(batch.sources))


def _values(output: Any, labels: torch.Tensor, signal: Signal) -> torch.Tensor:
    """Signals of the targets at 1..T-1, float32 (T-1,)."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise ConfigError(
            "MixtureCallback needs the logits of the model, got none. Turn off kernels that compute the loss without "
            "logits (Liger)."
        )
    return target_signals(logits, labels, signal)
