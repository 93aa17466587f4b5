"""ThroughputMetrics: the batches of a training loop in, a dict of throughput values for its log out."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from energon_packed.loading.costs.model import CostModel, RowSizes
from energon_packed.loading.monitoring.counts import BatchCounts, CountedBatch, count_batch
from energon_packed.loading.ranks import all_gather_object
from energon_packed.options import as_integer, optional_integer

_Batch = TypeVar("_Batch")
_MOST_UNREAD = 1024  # steps whose batches are kept as they are
_MOST_STEPS = 16384  # steps for the values over ranks


@dataclass(slots=True)
class _RankCounts:
    """Counts of a rank since the last summary.

    Attributes:
        steps: number of steps.
        batches, samples, tokens, targets, padding: sums over the batches.
        wait: seconds that the loop waited for batches.
        seconds: seconds of the steps.
        sources: tokens by dataset.
        step_tokens, step_costs: tokens and cost of each of the last `_MOST_STEPS` optimizer steps.
    """

    steps: int = 0
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    padding: int = 0
    wait: float = 0.0
    seconds: float = 0.0
    sources: Counter[str] = field(default_factory=Counter)
    step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    step_costs: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))


class ThroughputMetrics:
    """Count tokens, targets, padding, sources and time of the batches of a training loop, over all ranks.

        metrics = ThroughputMetrics(seq_len=4096)
        for batch in metrics.watch(loader):
            ...
            log(metrics.summary())

    A batch is a PackedBatch, the dict of `transformers_inputs()` or `megatron_inputs()`, a layout of Megatron, a batch
    of TRL, or (name, batch) of a JointLoader. Counting does not wait for a device.

    Args:
        seq_len: tokens that fit in a row; None leaves out the utilization.
        packs_per_batch: packs that are joined in one batch.
        micro_batches: batches of a rank in an optimizer step (gradient accumulation).
        cost: cost of a row, for the imbalance of the ranks; by default the constants of CostModel.
        group: process group of the ranks that read different data; by default all processes.

    Raises:
        ConfigError: a number below 1.

    Examples:
        >>> metrics = ThroughputMetrics(seq_len=8)
        >>> sample = EncodedSample(input_ids=np.arange(6), labels=np.arange(6))
        >>> batches = list(metrics.watch([PaddingFreeCollator().collate([sample])]))
        >>> metrics.summary()["data/utilization"]
        0.75
    """

    def __init__(
        self,
        seq_len: int | None = None,
        *,
        packs_per_batch: int = 1,
        micro_batches: int = 1,
        cost: CostModel | None = None,
        group: Any = None,
    ) -> None:
        self.seq_len = optional_integer(seq_len, "seq_len")
        self.packs_per_batch = as_integer(packs_per_batch, "packs_per_batch")
        self.micro_batches = as_integer(micro_batches, "micro_batches")
        self.cost = cost or CostModel()
        self.group = group
        self._time: float | None = None  # at which the time of the next step starts
        self._step: list[CountedBatch | BatchCounts] = []  # the current step
        self._steps: list[list[CountedBatch | BatchCounts]] = []  # ended steps
        self._counts = _RankCounts()

    @property
    def steps(self) -> int:
        """Optimizer steps of this rank since the last summary."""
        return self._counts.steps + len(self._steps) + (len(self._step) >= self.micro_batches)

    def watch(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Iterate over the same batches, and count each with the time spent waiting for it.

        Raises:
            BatchError: as `add`.
        """
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:  # no loader yields None
                return
            self.add(batch, wait=time.perf_counter() - start)
            yield batch

    def add(self, batch: Any, *, wait: float = 0.0) -> None:
        """Count a batch.

        Args:
            batch: a batch of any type of the class docstring.
            wait: seconds that the training loop waited for it.

        Raises:
            BatchError: a batch of another type.
        """
        self.add_counts(count_batch(batch), wait=wait)

    def add_counts(self, counts: CountedBatch | BatchCounts, *, wait: float = 0.0) -> None:
        """Count a batch that a worker process has counted; the arguments are as for `add`."""
        if len(self._step) == self.micro_batches:
            self.end_step()
        if self._time is None:
            self._time = time.perf_counter() - wait
        self._step.append(counts)
        self._counts.wait += wait

    def end_step(self) -> None:
        """End an optimizer step that has fewer than `micro_batches` batches, or whose time ends now."""
        if self._step:
            self._steps.append(self._step)
            self._step = []
        if len(self._steps) >= _MOST_UNREAD:  # `summary` is seldom called, or never
            self._fold()
        now = time.perf_counter()
        self._counts.seconds += now - (now if self._time is None else self._time)
        self._time = now

    def end_wait(self) -> None:
        """Count the time since the end of the last step as waiting for batches."""
        if self._time is not None:
            self._counts.wait += time.perf_counter() - self._time

    def restart_timer(self) -> None:
        """Leave out the time since the end of the last step, such as the time of an evaluation."""
        self._time = time.perf_counter()

    def summary(self) -> dict[str, float]:
        """Return values of the steps since the last call, equal on all ranks of the group; {} without a step.

        Every rank of the group must call it. It is one collective operation. The page Metrics defines the names; a
        share is a sum over all ranks and steps, divided by a sum. Lengths and imbalance of the ranks are of the last
        16,384 steps.
        """
        if self._step:
            self.end_step()
        self._fold()
        ranks: list[_RankCounts] = all_gather_object(self._counts, self.group)
        self._counts = _RankCounts()
        self.restart_timer()
        steps = max(rank.steps for rank in ranks)
        if not steps:
            return {}
        # A rank without a step that others have counts as 0.
        tokens_of, costs_of = (
            np.array(list(zip_longest(*(getattr(rank, name) for rank in ranks), fillvalue=0)), dtype=np.float64)
            for name in ("step_tokens", "step_costs")
        )
        tokens, targets, padding, batches = (
            sum(getattr(rank, name) for rank in ranks) for name in ("tokens", "targets", "padding", "batches")
        )
        packs = batches * self.packs_per_batch
        seconds = max(max(rank.seconds for rank in ranks), 1e-9)
        values = {
            "perf/global_seq_len_avg": float(tokens_of.mean()),
            "perf/global_seq_len_min": float(tokens_of.min(axis=1).mean()),
            "perf/global_seq_len_max": float(tokens_of.max(axis=1).mean()),
            "perf/tokens_per_s": tokens / seconds,
            "perf/targets_per_s": targets / seconds,
            "perf/imbalance": float(costs_of.max(axis=1).sum() / (costs_of.mean(axis=1).sum() or 1.0)),
            "data/tokens_per_step": tokens / steps,
            "data/samples_per_pack": sum(rank.samples for rank in ranks) / packs,
            "data/supervised_share": targets / max(1, tokens),
            "data/padding": padding / (tokens + padding),
            "data/wait_s": sum(rank.wait for rank in ranks) / len(ranks) / steps,
        }
        if self.seq_len is not None:
            values["data/utilization"] = tokens / (packs * self.seq_len)
        sources = sum((rank.sources for rank in ranks), Counter())
        known = max(1, sources.total())
        return values | {f"data/source/{name}": count / known for name, count in sorted(sources.items())}

    def _fold(self) -> None:
        """Add the ended steps to the counts, read from their device."""
        counts = self._counts
        counts.steps += len(self._steps)
        for step in self._steps:
            batches = [batch.read() if isinstance(batch, CountedBatch) else batch for batch in step]
            counts.batches += len(batches)
            for batch in batches:
                counts.samples += batch.samples
                counts.tokens += batch.tokens
                counts.targets += batch.targets
                counts.padding += batch.padding
                counts.sources.update(batch.sources)
            counts.step_tokens.append(sum(batch.tokens for batch in batches))
            sizes = {
                "tokens": [batch.tokens + batch.padding for batch in batches],
                "squares": [batch.squares for batch in batches],
                "patches": [batch.patches for batch in batches],
                "patch_squares": [batch.patch_squares for batch in batches],
            }
            rows = RowSizes(**{name: np.array(values, dtype=np.int64) for name, values in sizes.items()})
            counts.step_costs.append(float(self.cost.costs(rows).sum()))
        self._steps.clear()
