"""BalancedSampler: the aligned order of training for loaders that take a sampler."""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from energon_packed.dataflow.distributors.map import Balance, check_balance
from energon_packed.dataflow.order import Order, check_sizes
from energon_packed.dataflow.share import place_of
from energon_packed.errors import ConfigError
from energon_packed.packing.balance import CostModel, Imbalance


class BalancedSampler(torch.utils.data.Sampler[int]):
    """Distributed sampler that gives all ranks packs of similar compute cost in each step.

        sampler = BalancedSampler(dataset, batch_size=2)            # rank and world size from torch.distributed
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=PaddingFreeCollator())
        print(sampler.imbalance)                                    # imbalance 1.412 -> 1.007

    The cost of a pack is `CostModel`: its tokens, the squared lengths of its samples, and its patches. The order
    depends on seed and epoch alone, so a loader resumes by skipping what was used, as StatefulDataLoader does.

    Args:
        dataset: PackedDataset, or what `plan_in_memory` returns.
        num_replicas, rank: data-parallel place; by default from torch.distributed. `rank="all"` gives the order of
            all ranks, batch by batch, for accelerate and the Trainer, which assign batches to ranks.
        batch_size: packs of one step on one rank.
        balance: `attention`.
        cost: of a pack.
        shuffle, seed: a new order every epoch; call `set_epoch`.
        drop_last: drop the packs after the last full step; False repeats some, so that all ranks have as many, and
            every pack comes at least once.

    Raises:
        ConfigError: `balance` is unknown, a number is below 1, or the dataset has no `row_sizes()`.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | Literal["all"] | None = None,
        *,
        batch_size: int = 1,
        balance: Balance = "attention",
        cost: CostModel | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_balance(balance)
        if rank == "all":
            self.rank: int | None = None
            self.ranks = place_of(None, None)[1] if num_replicas is None else num_replicas
        else:
            self.rank, self.ranks = place_of(rank, num_replicas)
        for name, value in (("ranks", self.ranks), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {value}.")
        check_sizes(dataset)
        self.rows, self.seed, self.drop_last, self.epoch = batch_size, seed, drop_last, 0
        self.order = Order(_Indexed(dataset), shuffle=shuffle, cost=cost or CostModel())

    def set_epoch(self, epoch: int) -> None:
        """Order anew, as DistributedSampler's."""
        self.epoch = epoch

    @property
    def imbalance(self) -> Imbalance:
        """Slowest rank / mean rank of the current epoch, before and after balancing."""
        return self.order.imbalance(self.epoch, self.seed, self.order.segment(self.ranks, self.rows))

    def __iter__(self) -> Iterator[int]:
        ranks, width = self.ranks, self.ranks * self.rows
        order = self.order.epoch_order(self.epoch, self.seed, [self.order.segment(ranks, self.rows)])
        full = len(order) // width * width
        steps = order[:full].reshape(-1, self.rows, ranks)  # rank r has every `ranks`-th item of a step
        rest = order[full:] if not self.drop_last else order[:0]
        if self.rank is None:
            yield from steps.transpose(0, 2, 1).reshape(-1).tolist()
            yield from rest.tolist()
            return
        yield from steps[:, :, self.rank].reshape(-1).tolist()
        missing = -len(rest) % ranks
        yield from [*rest.tolist(), *(order[place % len(order)].item() for place in range(missing))][
            self.rank :: ranks
        ]

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.ranks * self.rows)
        rest = 0 if self.drop_last else rest
        if self.rank is None:
            return full * self.ranks * self.rows + rest
        return full * self.rows + -(-rest // self.ranks)


class _Indexed:
    """A dataset by the indices of its present epoch, which samplers give: a blend has other packs in each epoch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.row_sizes = dataset.row_sizes

    def __len__(self) -> int:
        return len(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Draw the packs of the epoch."""
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
