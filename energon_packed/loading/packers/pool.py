"""PoolPacker: the offline planner over a buffer of samples.

BalancedPoolPacker: on the fly, all ranks get rows of similar cost at the same step.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BatchError
from energon_packed.loading.packers.base import Packer, check_overlong, check_positive
from energon_packed.packing import pack_lengths
from energon_packed.packing.balance import CostModel, RowSizes
from energon_packed.pipeline.options import Overlong


class PoolPacker(Packer):
    """Collects `pool_size` samples, packs them by best fit, and keeps the emptiest row for the next round.

    With algorithm `window_N`, windows of N samples are packed on their own, as offline: pool_size is N.

    Args:
        max_tokens: tokens per row.
        pool_size: samples in the buffer; more pack better, and cost memory and reading at a restore.
        algorithm, max_samples, multiple: as for `pack_lengths`.
        max_images, max_patches: images, and patches of them, in one row; None for no limit.
        overlong: what happens to samples that fit no row: `error`, `drop` or `truncate`.

    Raises:
        ConfigError: an argument is out of range.
    """

    keeps = True

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
        overlong: Overlong = "error",
    ) -> None:
        check_positive(pool_size=pool_size, max_images=max_images, max_patches=max_patches)
        pack_lengths([], max_tokens, algorithm=algorithm, max_samples=max_samples, multiple=multiple)
        self.max_tokens, self.multiple = max_tokens, multiple
        self.longest = max_tokens - max_tokens % multiple
        self.buffer_size = pool_size
        self.max_images, self.max_patches = max_images, max_patches
        check_overlong(overlong)
        self.overlong = overlong
        if window := re.fullmatch(r"window_(\d+)", algorithm):
            self.buffer_size, self.carry_over_last = int(window[1]), False
        self._options = {"algorithm": algorithm, "max_samples": max_samples, "multiple": multiple}

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return groups of sample numbers, each of at most `max_tokens` tokens; the emptiest is the last one.

        Raises:
            BatchError: a sample is longer than `longest`.
        """
        plan = pack_lengths(lengths, self.max_tokens, **self._options)  # type: ignore[arg-type]
        if len(plan.overlong):
            raise BatchError(f"{len(plan.overlong)} of the samples are longer than `longest` {self.longest}")
        groups = list(plan)
        if groups and self._options["algorithm"] != "sequential":
            emptiest = int(np.argmin([int(lengths[group].sum()) for group in groups]))
            groups.append(groups.pop(emptiest))
        return groups


Int64 = npt.NDArray[np.int64]


class BalancedPoolPacker(PoolPacker):
    """PoolPacker whose pool gives the same number of rows in each round, in an order of cost that all ranks share.

        round 1            round 2             rank 0 and rank 1, step by step
        c1 < c2 < c3 < c4  d1 < d2 < d3 < d4   row 3, row 1, row 4, row 2 | row 3, row 1, ...

    Ranks know nothing of each other: row i of a round has the i-th cost of its pool on every rank, so that the longest
    rows meet, and the shortest. The fullest rows of a pool come first; samples of the others wait in it, and are part
    of the loader's state.

    Args:
        max_tokens: tokens per row.
        rows_per_round: rows; most of what a pool gives, which is `pool_size` divided by the samples of a row. More
            balance better.
        cost: of a row.
        options: as for PoolPacker, such as `pool_size`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self, max_tokens: int, *, rows_per_round: int = 16, cost: CostModel | None = None, **options: Any
    ) -> None:
        super().__init__(max_tokens, **options)
        check_positive(rows_per_round=rows_per_round)
        self.rows_per_round = rows_per_round
        self._cost = cost or CostModel()
        self.carry_over_last = True
        self.constants = {"token": self._cost.token, "square": self._cost.square, "patch": self._cost.patch}
        self._places = np.random.default_rng(rows_per_round).permutation(rows_per_round)

    def should_flush(self, waiting: int) -> bool:
        """Again for each eighth of the pool, where it held too few rows."""
        return (waiting - self.buffer_size) % max(1, self.buffer_size // 8) == 0

    def pop_ready(self, groups: list[Int64], sizes: RowSizes, *, final: bool) -> tuple[list[Int64], list[Int64]]:
        """As `Packer.pop_ready`: none, or `rows_per_round`; the end of the epoch gives all, in rounds."""
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
