"""Samples in a buffer to rows by the offline planner (best fit), while the data streams.

| packer | rows |
|---|---|
| PoolPacker | best fit over a pool of samples; the emptiest row waits for the next round |
| BalancedPoolPacker | as PoolPacker, and all ranks get rows of similar cost at the same step |
"""

import re
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from energon_packed.errors import BatchError
from energon_packed.keywords import PoolKeywords
from energon_packed.loading.costs.model import CostModel, RowSizes
from energon_packed.loading.packers.base import Packer
from energon_packed.options import as_integer, check_choice, optional_integer
from energon_packed.packing import pack_lengths
from energon_packed.packing.balance import Int64
from energon_packed.pipeline.options import GroupBy, Overlong


class PoolPacker(Packer):
    """Collect `pool_size` samples, pack them by best fit, and keep the emptiest row for the next round.

    With algorithm `window_N`, windows of N samples are packed separately, as offline: pool_size is N.

    Args:
        max_tokens: tokens per row.
        pool_size: samples in the buffer; more samples pack better, but need memory, and are read again at a restore.
        algorithm, max_samples, multiple: as for `pack_lengths`.
        max_images, max_patches: images, and patches of images and videos, in one row; None for no limit.
        group_by: `media` fills each row with samples of one kind: text, images, videos or audio.
        overlong: handling of samples that fit no row: `error`, `drop` or `truncate`.
        size_fn: size of a sample in place of its tokens, for the samples of a custom processor.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> [row.tolist() for row in PoolPacker(8).select(np.array([5, 4, 3, 4]))]
        [[1, 3], [0, 2]]
    """

    carry_over_last = True

    def __init__(
        self,
        max_tokens: int,
        *,
        pool_size: int = 256,
        algorithm: str = "bfd",
        max_samples: int | None = None,
        multiple: int = 1,
        max_images: int | None = None,
        max_patches: int | None = None,
        group_by: GroupBy = "none",
        overlong: Overlong = "error",
        size_fn: Callable[[Any], int] | None = None,
    ) -> None:
        self.max_tokens, self.multiple = as_integer(max_tokens, "max_tokens"), as_integer(multiple, "multiple")
        # The planner checks its options here, before any worker process starts.
        pack_lengths([], max_tokens, algorithm=algorithm, max_samples=max_samples, multiple=multiple)
        self.longest = self.max_tokens - self.max_tokens % self.multiple
        self.buffer_size = as_integer(pool_size, "pool_size")
        self.max_images = optional_integer(max_images, "max_images")
        self.max_patches = optional_integer(max_patches, "max_patches")
        check_choice("overlong", overlong, Overlong)
        check_choice("group_by", group_by, GroupBy)
        self.overlong, self.group_by, self.size_fn = overlong, group_by, size_fn
        if window := re.fullmatch(r"window_(\d+)", algorithm):
            self.buffer_size, self.carry_over_last = int(window[1]), False
        self._options: dict[str, Any] = {"algorithm": algorithm, "max_samples": max_samples, "multiple": multiple}

    def select(self, lengths: Int64) -> list[Int64]:
        """Return groups of sample indices, each of at most `max_tokens` tokens; the emptiest group is the last.

        Raises:
            BatchError: a sample is longer than `longest`.
        """
        assert self.max_tokens is not None
        plan = pack_lengths(lengths, self.max_tokens, **self._options)
        if len(plan.overlong):
            raise BatchError(
                f"samples must have at most {self.longest} tokens, got {len(plan.overlong)} longer samples."
            )
        groups = list(plan)
        # The last group waits for more samples. The sequential algorithm leaves its open row there by itself.
        if groups and self._options["algorithm"] != "sequential":
            emptiest = int(np.argmin([int(lengths[group].sum()) for group in groups]))
            groups.append(groups.pop(emptiest))
        return groups


class BalancedPoolPacker(PoolPacker):
    """PoolPacker that emits rows in cost order, so that all ranks process rows of similar cost in the same step.

        round 1            round 2             rank 0 and rank 1, step by step
        c1 < c2 < c3 < c4  d1 < d2 < d3 < d4   row 3, row 1, row 4, row 2 | row 3, row 1, ...

    Ranks do not communicate: in each round, every rank emits the same number of rows, ordered by cost in the same way,
    so that the rows of a step have similar cost. The fullest rows of a pool are emitted. Samples of the other rows
    stay in the pool, and are part of the loader state.

    Args:
        max_tokens: tokens per row.
        rows_per_round: rows emitted together, below the rows of a full pool (`pool_size` divided by the samples of a
            row). A larger number balances better.
        cost: cost model of a row.
        options: the other arguments of PoolPacker, except `group_by` and `size_fn`.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> [row.tolist() for row in BalancedPoolPacker(8).select(np.array([5, 4, 3, 4]))]
        [[1, 3], [0, 2]]
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        rows_per_round: int = 16,
        cost: CostModel | None = None,
        **options: Unpack[PoolKeywords],
    ) -> None:
        super().__init__(max_tokens, **options)
        self.rows_per_round = as_integer(rows_per_round, "rows_per_round")
        self._cost = cost or CostModel()
        self.carry_over_last = True  # in windows, too: rows wait for their round
        self.constants = self._cost.constants()
        # A fixed permutation, equal on all ranks: rows would otherwise become longer within each round.
        self._places = np.random.default_rng(rows_per_round).permutation(rows_per_round)

    def should_flush(self, waiting: int) -> bool:
        """Return True for a full pool, and after each further eighth of it if it had too few rows."""
        return (waiting - self.buffer_size) % max(1, self.buffer_size // 8) == 0

    def pop_ready(self, groups: list[Int64], sizes: RowSizes, *, final: bool) -> tuple[list[Int64], list[Int64]]:
        """Return `rows_per_round` groups, no group if there are fewer, or all groups at the end of the epoch."""
        count = self.rows_per_round
        fullest = np.argsort(-sizes.tokens, kind="stable")
        chosen = fullest if final else fullest[: count if len(groups) >= count else 0]
        costs = self._cost.costs(sizes)
        ready: list[Int64] = []
        for start in range(0, len(chosen), count):
            part = chosen[start : start + count]
            part = part[np.argsort(costs[part], kind="stable")]
            ready += [groups[part[place]] for place in self._places.tolist() if place < len(part)]
        waiting = [groups[row] for row in fullest[len(chosen) :].tolist()]
        return ready, [np.sort(np.concatenate(waiting))] if waiting else []
