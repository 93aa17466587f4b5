"""ThroughputMetrics: the batches of a training loop in, a dict of throughput values for its log out."""

import time
from collections.abc import Iterable, Iterator

from energon_packed.encoding import IGNORE_INDEX
from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.ranks import all_gather_object


class ThroughputMetrics:
    """Count tokens, samples and waiting time of the batches of this rank; `summary` returns means per step.

        metrics = ThroughputMetrics(seq_len=4096)
        for batch in metrics.watch(loader):
            ...
            log(metrics.summary())

    Args:
        seq_len: tokens that fit in a row; None leaves out the utilization.
        packs_per_batch: packs that are joined in one batch.
    """

    def __init__(self, seq_len: int | None = None, *, packs_per_batch: int = 1) -> None:
        self._capacity = None if seq_len is None else seq_len * packs_per_batch
        self._packs = packs_per_batch
        self._reset()

    def watch(self, batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        """Iterate over the same batches, and count each with the time spent waiting for it."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:  # no loader yields None
                return
            self.add(batch, wait=time.perf_counter() - start)
            yield batch

    def add(self, batch: PackedBatch, *, wait: float = 0.0) -> None:
        """Count a batch.

        Args:
            batch: batch of a loader.
            wait: seconds that the training loop waited for it.
        """
        self._steps += 1
        self._tokens += batch.num_tokens
        self._samples += batch.num_samples
        self._targets += int((batch.labels != IGNORE_INDEX).sum())
        self._wait += wait

    def summary(self) -> dict[str, float]:
        """Return means over the steps since the last call; {} if no rank had a step. Call it on all ranks together.

        `data/tokens_per_step`, `data/utilization` (0 to 1), `data/samples_per_pack`, `data/supervised_share` (targets
        per token), `data/wait_s` (seconds per step), and `perf/global_seq_len_avg`, `_min` and `_max`: tokens per step
        over all ranks of torch.distributed.
        """
        steps, tokens = self._steps, self._tokens
        per_rank = all_gather_object(tokens / steps if steps else 0.0)
        values: dict[str, float] = {}
        if steps:
            values = {
                "data/tokens_per_step": tokens / steps,
                "data/samples_per_pack": self._samples / steps / self._packs,
                "data/supervised_share": self._targets / max(1, tokens),
                "data/wait_s": self._wait / steps,
            }
            if self._capacity is not None:
                values["data/utilization"] = tokens / (steps * self._capacity)
        if any(per_rank):
            # Ranks with fewer tokens wait for the others, so the spread between ranks is reported beside the mean.
            values["perf/global_seq_len_avg"] = sum(per_rank) / len(per_rank)
            values["perf/global_seq_len_min"], values["perf/global_seq_len_max"] = min(per_rank), max(per_rank)
        self._reset()
        return values

    def _reset(self) -> None:
        self._steps = self._tokens = self._samples = self._targets = 0
        self._wait = 0.0
