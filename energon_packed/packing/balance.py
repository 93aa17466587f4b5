"""Balance: rows of one step cost the same on all ranks, which wait for the slowest of them.

    order     a seeded permutation of the rows
    windows   of it are sorted by cost, and each `ranks * rows` consecutive ones are one step
    steps     of a window come in a seeded order, and the rows of a step go to seeded ranks

Rows of similar cost meet at the same step, short and long ones are mixed over the steps, and every row is there once.
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
"""Of a model of 7 to 8 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a row costs: `token * tokens + square * squares + patch * patches`.

    `squares` are the squared lengths of the row's samples, summed: attention is blocked by sample. The defaults are in
    units of a token's way through the dense layers, of 24 h^2 floating point operations a layer (h hidden units, 4h in
    the MLP); causal attention adds 2 h for each square, so `square` is 1 / (12 h), here for h = 4096 (D. Narayanan et
    al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, appendix). `patch` is the vision tower
    of 0.7 billion parameters beside it. Measure your own with `fit`.

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
                raise ConfigError(f"`{name}` of the cost is {value}; it must be at least 0")
        if not any(values.values()):
            raise ConfigError("all constants of the cost are 0; set `token`, `square` or `patch`")

    def costs(self, sizes: "RowSizes") -> Float64:
        """Cost of each row, float64 (P,)."""
        found = self.token * sizes.tokens + self.square * sizes.squares + self.patch * sizes.patches
        return np.asarray(found, dtype=np.float64)

    @classmethod
    def fit(cls, sizes: "RowSizes", seconds: npt.ArrayLike) -> "CostModel":
        """The constants, none below 0, that explain measured times best: least squares of the relative error.

        Args:
            sizes: of P measured rows, P at least 3, of different shapes.
            seconds: time of each row, forward and backward, shape (P,), above 0.

        Raises:
            ConfigError: too few times, or one that is not above 0.
        """
        times = np.asarray(seconds, dtype=np.float64)
        columns = np.stack([sizes.tokens, sizes.squares, sizes.patches], axis=1).astype(np.float64)
        if times.shape != (len(columns),) or len(times) < 3 or not (times > 0).all():
            raise ConfigError(f"`seconds` has shape {times.shape}; pass a time above 0 for each of 3 or more rows")
        scaled, target = columns / times[:, None], np.ones(len(times))
        best: tuple[float, Float64] | None = None
        for count in (1, 2, 3):
            for chosen in combinations(range(3), count):
                found = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
                error = float(((scaled[:, chosen] @ found - target) ** 2).sum())
                if (found >= 0).all() and found.any() and (best is None or error < best[0] - 1e-12):
                    constants = np.zeros(3)
                    constants[list(chosen)] = found
                    best = error, constants
        assert best is not None, "one constant alone is above 0"
        token, square, patch = best[1].tolist()
        return cls(token=token, square=square, patch=patch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSizes:
    """What decides the cost of P rows.

    Attributes:
        tokens: int64 (P,).
        squares: int64 (P,), squared lengths of the samples of each row, summed.
        patches: int64 (P,), patches of the images of each row.
    """

    tokens: Int64
    squares: Int64
    patches: Int64

    def __getitem__(self, rows: Int64) -> "RowSizes":
        return RowSizes(tokens=self.tokens[rows], squares=self.squares[rows], patches=self.patches[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How much longer a step takes than its mean rank needs: 1.0 is none, 1.5 is half as long again.

    Attributes:
        before: of the order that the seed gives.
        after: of the balanced one.
    """

    before: float
    after: float

    def __str__(self) -> str:
        return f"imbalance {self.before:.3f} -> {self.after:.3f} (slowest rank of a step / mean rank)"


def balanced_steps(
    costs: npt.ArrayLike, order: Int64, *, ranks: int, rows: int, window: int, rng: np.random.Generator
) -> tuple[Int64, Int64]:
    """Rows of every step and rank.

    Args:
        costs: float (n,), of each row.
        order: int64 (n,), a permutation of the rows.
        ranks: data-parallel ranks.
        rows: of one step on one rank.
        window: steps that are sorted together; more balance better and mix less.
        rng: of the places of steps and ranks.

    Returns:
        (steps int64 (S, ranks, rows), rest int64 (r,) with r below ranks * rows): every row once.
    """
    values = np.asarray(costs, dtype=np.float64)
    width = ranks * rows
    count = len(order) // width
    steps = np.empty((count, ranks, rows), dtype=np.int64)
    for start in range(0, count, window):
        stop = min(start + window, count)
        part = order[start * width : stop * width]
        part = part[np.argsort(-values[part], kind="stable")].reshape(stop - start, width)
        for place, step in zip(rng.permutation(np.arange(start, stop)).tolist(), part, strict=True):
            steps[place] = _dealt(values[step], step, ranks, rows)[rng.permutation(ranks)]
    return steps, order[count * width :]


def _dealt(costs: Float64, step: Int64, ranks: int, rows: int) -> Int64:
    """The rows of a step, int64 (ranks, rows): the largest first, each to the rank with the least so far."""
    if rows == 1:
        return step.reshape(ranks, 1)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    sums = np.zeros(ranks)
    for cost, row in zip(costs.tolist(), step.tolist(), strict=True):
        rank = int(np.argmin(sums))
        dealt[rank].append(row)
        sums[rank] = sums[rank] + cost if len(dealt[rank]) < rows else np.inf
    return np.array(dealt, dtype=np.int64)


def imbalance(costs: npt.ArrayLike, steps: Int64) -> float:
    """Time of all steps, each as long as its slowest rank, over the mean time of the ranks; 1.0 without a step.

    Args:
        costs: float (n,), of each row.
        steps: int64 (S, ranks, rows).
    """
    of_ranks = np.asarray(costs, dtype=np.float64)[steps].sum(axis=2)
    return float(of_ranks.max(axis=1).sum() / of_ranks.mean(axis=1).sum()) if of_ranks.sum() > 0 else 1.0
