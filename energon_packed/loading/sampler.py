"""BalancedSampler: orders the indices of a dataset so that all ranks process packs of similar cost.

It is for trainers that use a sampler; `DataflowLoader` reads the same order without one.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from energon_packed.loading.costs.model import Balance, cost_model
from energon_packed.loading.datasets.map_data import IndexedData
from energon_packed.loading.epoch_end import EpochEnd, check_epoch_end, check_rest
from energon_packed.loading.order import Order
from energon_packed.loading.ranks import resolve_rank
from energon_packed.options import as_integer, optional_integer
from energon_packed.packing.balance import Imbalance

_TOGETHER = 4096
"""Indices that a sampler computes together."""


class BalancedSampler(torch.utils.data.Sampler[int]):
    """Distributed sampler that assigns packs of similar compute cost to all ranks in each step.

        sampler = BalancedSampler(dataset, batch_size=2)            # rank and world size from torch.distributed
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=PaddingFreeCollator())
        print(sampler.imbalance)                                    # imbalance 1.412 -> 1.007

    `CostModel` estimates the cost from the tokens of a pack, the squared lengths of its samples, and its images. The
    order depends only on seed and epoch, so a loader resumes by skipping used indices, as StatefulDataLoader does.

    Args:
        dataset: PackedDataset or PlannedDataset.
        num_replicas, rank: world size and rank; by default from torch.distributed. `rank="all"` yields the order of
            all ranks, batch by batch, for accelerate and the Trainer, which assign batches to ranks.
        batch_size: packs of a step on a rank.
        balance: a CostModel, `attention` for its default constants, or `tokens`.
        accumulation: steps whose gradients the trainer accumulates, which are aligned together.
        shuffle, seed: draw a new seeded order every epoch; call `set_epoch`.
        epoch_end: the packs after the last full step. `repeat` reads the first packs again, with targets, because a
            sampler returns only indices: all ranks have the same number of packs, and every pack is read at least
            once. `drop` leaves them out, with a warning; `error` raises.

    Raises:
        ConfigError: `balance` or `epoch_end` is unknown, `batch_size` or `num_replicas` is below 1, the dataset has no
            `row_sizes()`, or `epoch_end` is `error` and the packs do not fill all steps.

    Examples:
        >>> dataset = PackedDataset("demo-out", encoder)
        >>> sampler = BalancedSampler(dataset, num_replicas=2, rank=0, batch_size=2)
        >>> len(sampler)
        6
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        *,
        batch_size: int = 1,
        balance: Balance = "attention",
        accumulation: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        epoch_end: EpochEnd = "repeat",
    ) -> None:
        cost = cost_model(balance)
        if rank == "all":
            self.rank: int | None = None
            self.ranks = optional_integer(num_replicas, "num_replicas") or resolve_rank(None, None)[1]
        else:
            self.rank, self.ranks = resolve_rank(rank, num_replicas)
        self.rows, self.seed, self.epoch = as_integer(batch_size, "batch_size"), seed, 0
        check_epoch_end(epoch_end)
        check_rest(epoch_end, len(dataset) % (self.ranks * self.rows), len(dataset), warns=not self.rank)
        self._drops = epoch_end == "drop"
        # By index in the present epoch, which a sampler must return: a blend has other packs in each epoch.
        self.order = Order(IndexedData(dataset), shuffle=shuffle, cost=cost, accumulation=accumulation)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to order, as `DistributedSampler.set_epoch`."""
        self.epoch = epoch

    @property
    def imbalance(self) -> Imbalance:
        """Slowest rank / mean rank of the current epoch, before and after balancing."""
        segment = self.order.segment(self.ranks, self.rows)
        shuffled, aligned = self.order.imbalances(self.epoch, self.seed, segment)
        return Imbalance(before=shuffled.mean, after=aligned.mean)

    def __iter__(self) -> Iterator[int]:
        ranks, width = self.ranks, self.ranks * self.rows
        epoch, size, segments = self.epoch, len(self.order), [self.order.segment(ranks, self.rows)]
        full = size // width * width  # items of full steps
        together = max(1, _TOGETHER // width) * width
        for start in range(0, full, together):
            part = self.order.items(range(start, min(start + together, full)), epoch, self.seed, segments)
            steps = part.reshape(-1, self.rows, ranks)  # rank r has every `ranks`-th item of a step
            of_rank = steps.transpose(0, 2, 1) if self.rank is None else steps[:, :, self.rank]
            yield from of_rank.reshape(-1).tolist()
        places = [*range(full, size)] if not self._drops else []
        if self.rank is not None:
            # As DistributedSampler, fill the last step with the first packs: ranks with fewer steps would hang the
            # others.
            places += [i % size for i in range(-len(places) % ranks)]
            places = places[self.rank :: ranks]
        yield from self.order.numbers(places, epoch, self.seed, segments)

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.ranks * self.rows)
        rest = 0 if self._drops else rest
        if self.rank is None:
            return full * self.ranks * self.rows + rest
        return full * self.rows + -(-rest // self.ranks)
