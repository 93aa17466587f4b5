"""BalancedPoolPacker: on the fly, all ranks get rows of similar cost at the same step."""

from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.packers.base import check_positive
from energon_packed.dataflow.packers.pool import PoolPacker
from energon_packed.packing.balance import CostModel, RowSizes

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
        self.keeps = True
        self.constants = {"token": self._cost.token, "square": self._cost.square, "patch": self._cost.patch}
        self._places = np.random.default_rng(rows_per_round).permutation(rows_per_round)

    def is_due(self, waiting: int) -> bool:
        """Again for each eighth of the pool, where it held too few rows."""
        return (waiting - self.buffer_size) % max(1, self.buffer_size // 8) == 0

    def release(self, groups: list[Int64], sizes: RowSizes, *, final: bool) -> tuple[list[Int64], list[Int64]]:
        """As `Packer.release`: none, or `rows_per_round`; the end of the epoch gives all, in rounds."""
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
