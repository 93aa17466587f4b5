"""MixtureCallback: losses by source of a Trainer -> weights of a mixture, updated, logged, saved and restored."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.transformers.batch_taps import BatchTap
from energon_packed.integrations.transformers.metrics import LogCallback
from energon_packed.integrations.transformers.stream import LoaderState
from energon_packed.loading.batch import PackedBatch, source_names, sums_by_source, target_losses, target_weights
from energon_packed.loading.distributors.mixture import MixtureDistributor
from energon_packed.loading.ranks import all_gather_object, group_place

_CHUNK = 1024  # tokens whose losses are computed together, so that the logits are not copied at once

Rewards = Callable[[dict[str, float]], Mapping[str, float]]


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


class MixtureCallback(LoaderState, LogCallback):
    """TrainerCallback that updates the weights of a mixture by the losses of its sources.

        mixture = MixtureDistributor(parts, [1, 1], repeat=True, names=names)
        stream = TrainerStream(lambda: DataflowLoader(mixture, packer=PoolPacker(4096)))
        callbacks = [TrainerStreamCallback(stream), MixtureCallback(mixture, every=10)]

    The losses are computed from the output of the forward pass of the training. After every `every` steps, the mean
    loss of each source over all targets of all ranks since the last update is passed to `rewards`, and its result to
    `mixture.update`. The logs get `data/weight/NAME` and `data/loss/NAME`. The state of the loader contains the
    weights, and the checkpoint also contains the losses since the last update, so a resumed run has the same weights
    and batches.

    Args:
        mixture: the outermost distributor of the loader. Its `names` are the datasets in `batch.sources`.
        every: optimizer steps between two updates.
        rewards: computes rewards by name from mean losses by name; by default the losses. Every rank calls it with the
            same losses.
        group: process group of the ranks that read different data; by default all processes.

    Raises:
        ConfigError: `every` is below 1; while training, a source is not in the mixture, or the model returns no
            logits.
        BatchError: the batches have no sources, or the checkpoint has no losses.

    Examples:
        >>> parts = [MapDistributor([{"text": "A"}]), MapDistributor([{"text": "B"}])]
        >>> mixture = MixtureDistributor(parts, [1, 1], repeat=True, names=["a", "b"])
        >>> callbacks = [MixtureCallback(mixture, every=10)]  # of the Trainer
    """

    key = "energon_packed_mixture"
    remedy = "pass callbacks=[MixtureCallback(mixture)] to the Trainer that saves"

    def __init__(
        self, mixture: MixtureDistributor, *, every: int = 1, rewards: Rewards = dict, group: Any = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"`every` must be at least 1, got {every}.")
        self.mixture = mixture
        self._every, self._rewards, self._group = every, rewards, group
        self._losses: dict[str, float] = {}  # of the last update
        self._sums: dict[str, tuple[float, float]] = {}  # of this rank: loss * weight, weight
        self._pending: list[tuple[list[str], torch.Tensor]] = []  # sums of rows, perhaps on a device
        self._tap = BatchTap("energon_packed_targets", _targets, self._add)

    def values(self) -> dict[str, float]:
        """Return the weights, and the losses of the last update."""
        named = {"data/weight": self.mixture.current_weights, "data/loss": self._losses}
        return {f"{prefix}/{name}": value for prefix, values in named.items() for name, value in values.items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the losses of a checkpoint, and start to compute losses."""
        self._losses, self._sums, self._pending = {}, {}, []
        super().on_train_begin(args, state, control, **kwargs)
        self._tap.attach(kwargs["train_dataloader"], kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the weights after every `every` steps."""
        if state.global_step % self._every:
            return
        ranks = all_gather_object(self._read(), self._group)
        self._sums = {}
        names = sorted({name for sums in ranks for name in sums})
        totals = {name: [math.fsum(column) for column in zip(*_of(name, ranks), strict=True)] for name in names}
        self._losses = {name: loss / weight for name, (loss, weight) in totals.items() if weight > 0}
        self.mixture.update(self._rewards(dict(self._losses)), group=self._group)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop computing losses."""
        self._tap.detach()

    def state(self) -> dict[str, Any]:
        """Return the losses since the last update, of all ranks."""
        return {"losses": self._losses, "sums": all_gather_object(self._read(), self._group)}

    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Continue with saved losses; with another number of ranks, each rank continues with some of them."""
        rank, world_size = group_place(self._group)
        self._losses = dict(state["losses"])
        for sums in state["sums"][rank::world_size]:
            for name, (loss, weight) in sums.items():
                self._sum(name, loss, weight)

    @torch.compiler.disable  # a compiled model would compile it again for another number of samples
    def _add(self, targets: _Targets, output: Any) -> None:
        """Add the losses of a row."""
        with torch.no_grad():
            losses = _losses(output, targets.labels)
            weights = targets.weights.to(losses.device)
            self._pending.append(sums_by_source(losses, weights, targets.bounds, targets.names))

    def _read(self) -> dict[str, tuple[float, float]]:
        """The sums of this rank since the last update."""
        for names, sums in self._pending:
            for name, loss, weight in zip(names, *sums.tolist(), strict=True):
                self._sum(name, loss, weight)
        self._pending = []
        return self._sums

    def _sum(self, name: str, loss: float, weight: float) -> None:
        losses, weights = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (losses + loss, weights + weight)


def _of(name: str, ranks: list[dict[str, tuple[float, float]]]) -> list[tuple[float, float]]:
    return [sums[name] for sums in ranks if name in sums]


def _targets(batch: Any) -> _Targets:
    if not isinstance(batch, PackedBatch):
        raise BatchError(
            "MixtureCallback needs batches with sources, got a dict without. Pass PaddingFreeCollator() as "
            "`data_collator`."
        )
    bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    return _Targets(batch.labels, target_weights(batch)[0], bounds, source_names(batch.sources))


def _losses(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Losses of the targets at 1..T-1, float32 (T-1,)."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise ConfigError(
            "MixtureCallback needs the logits of the model, got none. Turn off kernels that compute the loss without "
            "logits (Liger)."
        )
    starts = range(0, labels.shape[1] - 1, _CHUNK)
    pieces = [slice(start, start + _CHUNK + 1) for start in starts]
    return torch.cat([target_losses(logits[:, piece], labels[:, piece]) for piece in pieces])
