"""Balanced orders of a dataset: all ranks of a step get rows of similar cost, for samplers and distributors."""

import logging
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.dataflow.share import Share, place_of
from energon_packed.errors import ConfigError
from energon_packed.packing.balance import CostModel, Imbalance, balanced_steps, imbalance

Int64 = npt.NDArray[np.int64]
Balance = Literal["attention"]
WINDOW = 128
"""Steps that are sorted together."""
_log = logging.getLogger(__name__)


class BalancedOrder:
    """Steps of a dataset in which all ranks cost the same.

    Args:
        dataset: with `row_sizes()`: PackedDataset, or what `plan_in_memory` returns.
        ranks: data-parallel ranks.
        rows: of one step on one rank.
        shuffle: a new seeded order every epoch.
        cost: of a row; by default that of attention and the dense layers of a model of 8 billion parameters.

    Attributes:
        imbalance: of the epoch that was ordered last.

    Raises:
        ConfigError: an unknown way to balance, a number below 1, or a dataset that does not know its rows.
    """

    def __init__(self, dataset: Any, *, ranks: int, rows: int, shuffle: bool = True, cost: CostModel | None) -> None:
        for name, value in (("ranks", ranks), ("batch_size", rows)):
            if value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1")
        if not callable(getattr(dataset, "row_sizes", None)):
            raise ConfigError(
                f"`balance` needs the sizes of rows, which {type(dataset).__name__} does not know; use PackedDataset, "
                "or plan_in_memory"
            )
        self.dataset = dataset
        self.ranks, self.rows, self.shuffle = ranks, rows, shuffle
        self.cost = cost or CostModel()
        self.imbalance = Imbalance(before=1.0, after=1.0)
        dataset.row_sizes()  # before workers start, which inherit what was read

    def steps(self, epoch: int, seed: int) -> tuple[Int64, Int64]:
        """(steps int64 (S, ranks, rows), rest int64 (r,)) of an epoch: every row once."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        costs = self.cost.costs(self.dataset.row_sizes())
        rng = np.random.default_rng([seed, epoch, 3])
        order = rng.permutation(len(costs)) if self.shuffle else np.arange(len(costs))
        steps, rest = balanced_steps(costs, order, ranks=self.ranks, rows=self.rows, window=WINDOW, rng=rng)
        before = order[: steps.size].reshape(steps.shape)
        self.imbalance = Imbalance(before=imbalance(costs, before), after=imbalance(costs, steps))
        _log.info("epoch %d over %d ranks: %s", epoch, self.ranks, self.imbalance)
        return steps, rest

    def of_share(self, share: Share) -> Int64:
        """Numbers of the rows of a share, in order: workers take turns, step by step."""
        if share.world_size != self.ranks:
            raise ConfigError(f"the order is balanced over {self.ranks} ranks, and is read by {share.world_size}")
        steps, rest = self.steps(share.epoch, share.seed)
        mine = steps[share.worker :: share.num_workers, share.rank].reshape(-1)
        last = rest[share.rank :: self.ranks] if share.worker == len(steps) % share.num_workers else rest[:0]
        return np.concatenate([mine, last])


class BalancedSampler(torch.utils.data.Sampler[int]):
    """In the place of a DistributedSampler: the ranks of a step get packs of similar cost.

        sampler = BalancedSampler(dataset, batch_size=2)            # rank and world size from torch.distributed
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=PaddingFreeCollator())
        print(sampler.imbalance)                                    # imbalance 1.412 -> 1.007

    The cost of a pack is `CostModel`: its tokens, the squared lengths of its samples, and its patches. The order
    depends on seed and epoch alone, so a loader resumes by skipping what was used, as StatefulDataLoader does.

    Args:
        dataset: PackedDataset, or what `plan_in_memory` returns.
        num_replicas, rank: data-parallel place; by default from torch.distributed. `rank="all"` gives the order of
            all ranks, batch by batch, for what deals batches itself: accelerate and the Trainer.
        batch_size: packs of one step on one rank.
        balance: `attention`.
        shuffle, seed: a new order every epoch; call `set_epoch`.
        drop_last: drop the packs behind the last full step; False repeats some, so that all ranks have as many, and
            every pack comes at least once.
        cost: of a pack.

    Raises:
        ConfigError: see above.
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
        **options: Any,
    ) -> None:
        check_balance(balance)
        settings = {"shuffle": True, "seed": 0, "drop_last": False}
        if unknown := [name for name in options if name not in settings]:
            raise ConfigError(f"unknown option {unknown[0]!r}; use one of {', '.join(settings)}")
        settings |= options
        if rank == "all":
            if num_replicas is None:
                num_replicas = place_of(None, None)[1]
            self.rank: int | None = None
        else:
            self.rank, num_replicas = place_of(rank, num_replicas)
        self.seed, self.drop_last, self.epoch = int(settings["seed"]), bool(settings["drop_last"]), 0
        shuffle = bool(settings["shuffle"])
        self.order = BalancedOrder(dataset, ranks=num_replicas, rows=batch_size, shuffle=shuffle, cost=cost)

    def set_epoch(self, epoch: int) -> None:
        """Order anew, as DistributedSampler's."""
        self.epoch = epoch

    @property
    def imbalance(self) -> Imbalance:
        """Of the current epoch, before and after."""
        self.order.steps(self.epoch, self.seed)
        return self.order.imbalance

    def __iter__(self) -> Iterator[int]:
        steps, rest = self.order.steps(self.epoch, self.seed)
        if self.rank is None:
            numbers = np.concatenate([steps.reshape(-1), rest[: 0 if self.drop_last else len(rest)]])
            return iter(numbers.tolist())
        if len(rest) and not self.drop_last:
            missing = -len(rest) % self.order.ranks
            filler = np.resize(np.concatenate([steps.reshape(-1), rest]), missing)
            rest = np.concatenate([rest, filler])
        last = rest[: 0 if self.drop_last else len(rest)]
        return iter(np.concatenate([steps[:, self.rank].reshape(-1), last[self.rank :: self.order.ranks]]).tolist())

    def __len__(self) -> int:
        packs, ranks, rows = len(self.order.dataset), self.order.ranks, self.order.rows
        full, rest = divmod(packs, ranks * rows)
        rest = 0 if self.drop_last else rest
        if self.rank is None:
            return full * ranks * rows + rest
        return full * rows + -(-rest // ranks)


def check_balance(balance: Any) -> None:
    """Refuse an unknown way to balance.

    Raises:
        ConfigError: it is none.
    """
    if balance != "attention":
        raise ConfigError(f"`balance` is {balance!r}; use attention")
