"""Balance: costs of rows and a seeded order -> rows of each step and rank, so that ranks finish a step together.

In data-parallel training, all ranks wait for the slowest rank of a step. `balanced_steps` therefore

    1. cuts the seeded permutation of the rows into windows and sorts the rows of each window by cost,
    2. makes a round of each `ranks` consecutive rows, which have similar costs: one row for each rank,
    3. puts the rounds in a seeded order, makes a step of `rows` rounds, and assigns the largest row of each round to
       the rank with the lowest cost so far.

Short and long rows stay mixed over the steps, and within a step of several rounds; every row is used exactly once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImbalance:
    """Time of the slowest rank / mean rank in the steps of an epoch, as numbers of at least 1.0.

    Attributes:
        mean: time of all steps, each as long as its slowest rank, divided by the mean time of the ranks.
        p50, p99, max: percentiles of the single steps, and the largest value.
    """

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, costs: npt.ArrayLike, steps: Int64) -> "StepImbalance":
        """Summarize steps, int64 (S, ranks, rows), of rows with these costs, float (n,); all 1.0 without steps."""
        of_steps = step_imbalances(costs, steps) if len(steps) else np.ones(1)
        p50, p99 = np.percentile(of_steps, (50, 99)).tolist()
        return cls(mean=imbalance(costs, steps), p50=p50, p99=p99, max=float(of_steps.max()))


def balanced_steps(
    costs: npt.ArrayLike, order: Int64, *, ranks: int, rows: int, window: int, rng: np.random.Generator
) -> tuple[Int64, Int64]:
    """Assign rows to steps and ranks.

    Args:
        costs: float (n,), cost of each row.
        order: int64 (n,), a permutation of the rows.
        ranks: number of data-parallel ranks.
        rows: number of rows per step and rank, in all micro batches of the step.
        window: number of steps that are sorted together; more steps balance better and mix less.
        rng: generator that shuffles rounds and ranks.

    Returns:
        (steps int64 (S, ranks, rows), remaining rows int64 (r,), r < ranks * rows): every row once. `steps[:, :, k]`
        is a round, whose rows have similar costs on all ranks, so a micro batch of some of the rounds is balanced too.
    """
    values = np.asarray(costs, dtype=np.float64)
    width = ranks * rows
    count = len(order) // width
    steps = np.empty((count, ranks, rows), dtype=np.int64)
    for start in range(0, count, window):
        stop = min(start + window, count)
        in_window = order[start * width : stop * width]
        # A stable sort of the seeded order: rows of equal cost stay shuffled, and the result is reproducible.
        by_cost = in_window[np.argsort(-values[in_window], kind="stable")].reshape(-1, ranks)
        rounds = by_cost[rng.permutation(len(by_cost))].reshape(stop - start, rows, ranks)
        balanced = _by_rank(values[rounds], rounds)
        steps[start:stop] = np.take_along_axis(
            balanced, rng.permuted(_indices(stop - start, ranks), axis=1)[:, :, None], axis=1
        )
    return steps, order[count * width :]


def _by_rank(costs: Float64, rounds: Int64) -> Int64:
    """Assign the rows of each round to ranks, the largest row to the rank with the lowest cost so far.

    Args:
        costs: float64 (steps, rounds, ranks), falling in each round.
        rounds: int64 of the same shape, the rows.

    Returns:
        int64 (steps, ranks, rounds).
    """
    steps, count, ranks = rounds.shape
    if count == 1:
        return rounds.transpose(0, 2, 1)
    assigned = np.empty((steps, ranks, count), dtype=np.int64)
    sums = np.zeros((steps, ranks))
    # The round with the largest differences is first, so that later rounds compensate them.
    by_spread = np.argsort(costs[:, :, -1] - costs[:, :, 0], axis=1, kind="stable")
    every = np.arange(steps)
    for k in range(count):
        chosen = by_spread[:, k]
        least = np.argsort(sums, axis=1, kind="stable")
        assigned[every[:, None], least, chosen[:, None]] = rounds[every, chosen]
        sums[every[:, None], least] += costs[every, chosen]
    return assigned


def _indices(steps: int, ranks: int) -> Int64:
    return np.tile(np.arange(ranks), (steps, 1))


def step_imbalances(costs: npt.ArrayLike, steps: Int64) -> Float64:
    """Time of the slowest rank of each step / mean rank, float64 (S,); 1.0 for a step without cost.

    Args:
        costs: float (n,), cost of each row.
        steps: int64 (S, ranks, rows), row indices.
    """
    by_rank = np.asarray(costs, dtype=np.float64)[steps].sum(axis=2)
    mean = by_rank.mean(axis=1)
    return np.where(mean > 0, by_rank.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)


def imbalance(costs: npt.ArrayLike, steps: Int64) -> float:
    """Time of all steps, each as long as its slowest rank, divided by the mean time of the ranks; 1.0 without steps.

    Args:
        costs: float (n,), cost of each row.
        steps: int64 (S, ranks, rows), row indices.
    """
    by_rank = np.asarray(costs, dtype=np.float64)[steps].sum(axis=2)
    return float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum()) if by_rank.sum() > 0 else 1.0
