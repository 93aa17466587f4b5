"""Balance: costs of rows and a seeded order -> rows of each step and rank, so that ranks finish a step together.

In data-parallel training, all ranks wait for the slowest rank of a step. `balanced_steps` therefore

    1. cuts the seeded permutation of the rows into windows and sorts the rows of each window by cost,
    2. makes a step of each `ranks * rows` consecutive rows, which have similar costs,
    3. puts the steps of a window in a seeded order and assigns the rows of a step to seeded ranks.

Short and long rows stay mixed over the steps of a window, and every row is used exactly once.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
HIDDEN_SIZE = 4096
"""Hidden size of a model of 7 to 8 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Estimated compute cost of a row, in units of a token through the dense layers.

    The cost is `token * tokens + square * squares + patch * patches`. `squares` is the sum of the squared lengths of
    the row's samples, because attention is blocked by sample. Measure the constants of a model with `fit`.

    Args:
        token: cost of a token in the dense layers.
        square: cost of attention per squared token. The default is 1 / (12 h) for h = 4096: dense layers need 24 h^2
            floating point operations per token and layer (h hidden units, 4h in the MLP), causal attention needs 2 h
            per square (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
            appendix).
        patch: cost of a patch of an image or a video. The default is a vision tower of 0.7 billion parameters next to
            a model of 7 billion.

    Raises:
        ConfigError: a constant below 0, or all 0.
    """

    token: float = 1.0
    square: float = 1 / (12 * HIDDEN_SIZE)
    patch: float = 0.1

    def __post_init__(self) -> None:
        values = {"token": self.token, "square": self.square, "patch": self.patch}
        for name, value in values.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"`{name}` must be a number >= 0, got {value}.")
        if not any(values.values()):
            raise ConfigError("`token`, `square` and `patch` must not all be 0. Set one of them.")

    def costs(self, sizes: "RowSizes") -> Float64:
        """Cost of each row, float64 (P,)."""
        costs = self.token * sizes.tokens + self.square * sizes.squares + self.patch * sizes.patches
        return np.asarray(costs, dtype=np.float64)

    @classmethod
    def fit(cls, sizes: "RowSizes", seconds: npt.ArrayLike) -> "CostModel":
        """Fit the constants to measured times: least squares of the relative error, with constants >= 0.

        Args:
            sizes: sizes of P measured rows of different lengths, P at least 3.
            seconds: time of each row, forward and backward, shape (P,), above 0.

        Raises:
            ConfigError: too few times, or a time that is not above 0.
        """
        times = np.asarray(seconds, dtype=np.float64)
        columns = np.stack([sizes.tokens, sizes.squares, sizes.patches], axis=1).astype(np.float64)
        if times.shape != (len(columns),) or len(times) < 3 or not (times > 0).all():
            shown = np.array2string(times, threshold=6)
            raise ConfigError(
                f"`seconds` must be a time above 0 for each of 3 or more rows, got {shown} for {len(columns)} rows."
            )
        # Dividing by the times makes the errors relative. The best non-negative solution is the unconstrained solution
        # of some subset of the columns, and there are only 7 subsets, so no solver is needed.
        scaled, target = columns / times[:, None], np.ones(len(times))
        best: tuple[float, Float64] | None = None
        for count in (1, 2, 3):
            for chosen in combinations(range(3), count):
                solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
                error = float(((scaled[:, chosen] @ solution - target) ** 2).sum())
                # More constants must be clearly better, so that noise of the arithmetic does not select them.
                if (solution >= 0).all() and solution.any() and (best is None or error < best[0] - 1e-12):
                    constants = np.zeros(3)
                    constants[list(chosen)] = solution
                    best = error, constants
        assert best is not None, "the solution of a single column is above 0"
        token, square, patch = best[1].tolist()
        return cls(token=token, square=square, patch=patch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSizes:
    """Sizes of P rows that determine their cost.

    Attributes:
        tokens: int64 (P,), tokens of each row.
        squares: int64 (P,), sum of the squared lengths of the samples of each row.
        patches: int64 (P,), patches of the images and videos of each row.
    """

    tokens: Int64
    squares: Int64
    patches: Int64

    def __getitem__(self, rows: Int64) -> "RowSizes":
        return RowSizes(tokens=self.tokens[rows], squares=self.squares[rows], patches=self.patches[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Time of the slowest rank of a step / mean rank: 1.0 is balanced, 1.5 is 50% longer than necessary.

    Attributes:
        before: imbalance of the shuffled order.
        after: imbalance of the balanced order.
    """

    before: float
    after: float

    def __str__(self) -> str:
        return f"imbalance {self.before:.3f} -> {self.after:.3f} (slowest rank of a step / mean rank)"


def balanced_steps(
    costs: npt.ArrayLike, order: Int64, *, ranks: int, rows: int, window: int, rng: np.random.Generator
) -> tuple[Int64, Int64]:
    """Assign rows to steps and ranks.

    Args:
        costs: float (n,), cost of each row.
        order: int64 (n,), a permutation of the rows.
        ranks: number of data-parallel ranks.
        rows: number of rows per step and rank.
        window: number of steps that are sorted together; more steps balance better and mix less.
        rng: generator that shuffles steps and ranks.

    Returns:
        (steps int64 (S, ranks, rows), remaining rows int64 (r,), r < ranks * rows): every row once.
    """
    values = np.asarray(costs, dtype=np.float64)
    width = ranks * rows
    count = len(order) // width
    steps = np.empty((count, ranks, rows), dtype=np.int64)
    for start in range(0, count, window):
        stop = min(start + window, count)
        in_window = order[start * width : stop * width]
        # A stable sort of the seeded order: rows of equal cost stay shuffled, and the result is reproducible.
        by_cost = in_window[np.argsort(-values[in_window], kind="stable")].reshape(stop - start, width)
        for index, step in zip(rng.permutation(np.arange(start, stop)).tolist(), by_cost, strict=True):
            steps[index] = _by_rank(values[step], step, ranks, rows)[rng.permutation(ranks)]
    return steps, order[count * width :]


def _by_rank(costs: Float64, step: Int64, ranks: int, rows: int) -> Int64:
    """Assign the rows of a step, largest first, each to the rank with the lowest cost so far; int64 (ranks, rows)."""
    if rows == 1:
        return step.reshape(ranks, 1)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    sums = np.zeros(ranks)
    for cost, row in zip(costs.tolist(), step.tolist(), strict=True):
        rank = int(np.argmin(sums))
        assigned[rank].append(row)
        sums[rank] = sums[rank] + cost if len(assigned[rank]) < rows else np.inf  # a full rank is never the minimum
    return np.array(assigned, dtype=np.int64)


def imbalance(costs: npt.ArrayLike, steps: Int64) -> float:
    """Time of all steps, each as long as its slowest rank, divided by the mean time of the ranks; 1.0 without steps.

    Args:
        costs: float (n,), cost of each row.
        steps: int64 (S, ranks, rows), row indices.
    """
    by_rank = np.asarray(costs, dtype=np.float64)[steps].sum(axis=2)
    return float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum()) if by_rank.sum() > 0 else 1.0
