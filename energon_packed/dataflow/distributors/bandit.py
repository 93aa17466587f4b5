"""ExponentialWeights: weights of data sources that follow rewards, by an exponential-weights bandit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class ExponentialWeights:
    """EXP3 with a moving average of the rewards, for K sources.

    A. Albalak et al., "Efficient Online Data Mixing For Language Model Pre-Training", 2023 (arXiv:2312.02406),
    algorithm 1, which follows P. Auer et al., "The Nonstochastic Multiarmed Bandit Problem", 2002. Update t gives
    source i, where it has a reward r_i, the estimate R_i, and all sources the weights of step t + 1:

        R_i  <-  a * R_i + (1 - a) * r_i / w_i
        e_t   =  min(1 / K, sqrt(ln K / (K * t))),  e_0 = 1 / K
        w_i  <-  (1 - K * e_(t+1)) * p_i * exp(e_t * R_i) / sum_j p_j * exp(e_t * R_j)  +  K * e_(t+1) * p_i

    p are the weights of the beginning, with the sum 1. Where all are 1 / K, this is the paper's formula; others are
    a prior, in place of its uniform distribution. The more updates there are, the less is explored: e_t goes to 0.

    Args:
        prior: p, K numbers above 0.
        smoothing: a, 0 to below 1.
    """

    def __init__(self, prior: Sequence[float], smoothing: float) -> None:
        self.prior = [one / math.fsum(prior) for one in prior]
        self.smoothing = smoothing
        self.updates = 0
        self.estimates = [0.0] * len(prior)
        self.weights = list(self.prior)

    def update(self, rewards: Mapping[int, float]) -> None:
        """Follow the rewards of some sources, by number."""
        for source, reward in rewards.items():
            estimate = self.smoothing * self.estimates[source]
            self.estimates[source] = estimate + (1 - self.smoothing) * reward / self.weights[source]
        self.updates += 1
        rate, explored = self._rate(self.updates), len(self.prior) * self._rate(self.updates + 1)
        highest = max(self.estimates)
        scores = [p * math.exp(rate * (r - highest)) for p, r in zip(self.prior, self.estimates, strict=True)]
        total = math.fsum(scores)
        self.weights = [
            (1 - explored) * score / total + explored * p for p, score in zip(self.prior, scores, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"updates": self.updates, "estimates": list(self.estimates), "weights": list(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.updates = int(state["updates"])
        self.estimates, self.weights = list(state["estimates"]), list(state["weights"])

    def _rate(self, step: int) -> float:
        sources = len(self.prior)
        return min(1 / sources, math.sqrt(math.log(sources) / (sources * step)))
