"""WeightSchedule: from which item on changed weights hold, the same whenever workers read ahead.

A change is announced in the main process, and holds from a step of every worker that no worker can have begun: torch
asks a worker for a step only when one of an earlier step was handed out, at most `in_flight` of them ahead.

    main       handed out: 0 1 2 | announce(w): from step 2 + 1 + in_flight of each worker
    worker     ... step 5: items up to 811 are in batches, up to 843 may be read  ->  w holds from item 843 on

The worker turns the step into an item: the number of items after its steps so far, and `read_ahead` more. Its state
holds that item, so that one who resumes draws the same items.

ExponentialWeights: weights of data sources that follow rewards, by an exponential-weights bandit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


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


Weights = list[float]
Announced = tuple[int, Weights]
"""(step of every worker, weights that hold from there on)."""


class _Event:
    """A change in the main process. Events form a chain, and Python frees those before the oldest `Mark`.

    Attributes:
        base: weights of an epoch that began; None for an announcement.
        announced: in it.
        following: the next event.
    """

    __slots__ = ("announced", "base", "following")

    def __init__(self, base: Weights | None = None, announced: Sequence[Announced] = ()) -> None:
        self.base, self.announced = base, announced
        self.following: _Event | None = None


class Mark(NamedTuple):
    """A schedule after one step.

    Attributes:
        base: weights at the beginning of the epoch.
        handed: steps of each worker that were handed out.
        pending: announced, and not in the states of all workers.
        coming: base and announcements of epochs that the run of the loaded state had begun, and this run has not.
        last: the last event until then.
    """

    base: Weights
    handed: dict[int, int]
    pending: list[Announced]
    coming: list[tuple[Weights, list[Announced]]]
    last: _Event


class WeightSchedule:
    """Changes of K weights, announced in the main process and taken up by its workers.

    Args:
        learner: whose weights these are; its state is part of the schedule's.
        read_ahead: items that a worker reads together.

    Attributes:
        base: weights at the beginning of the epoch.
        in_flight: steps of one worker that may be asked for before one of them is handed out; None until a loader
            reads the mixture.
        is_inner: it belongs to a mixture in a mixture, whose steps nobody counts.
    """

    def __init__(self, learner: ExponentialWeights, read_ahead: int) -> None:
        weights = learner.weights
        self.learner = learner
        self.base: Weights = list(weights)
        self.read_ahead = read_ahead
        self.in_flight: int | None = None
        self.is_inner = False
        self._handed: dict[int, int] = {}  # steps of each worker that were handed out
        self._pending: list[Announced] = []  # not in the states of all workers
        self._coming: list[tuple[Weights, list[Announced]]] = []  # epochs that the run of the state had begun
        self._last = _Event()
        self._latest: Weights = list(weights)
        self._slots = torch.zeros((0, 1 + len(weights)), dtype=torch.float64)  # (step + 1, weights), seen by workers
        self._base = torch.zeros(len(weights), dtype=torch.float64)
        torch.Tensor.share_memory_(self._base)  # type: ignore[no-untyped-call]
        self._made = 0  # in a worker: steps that it made
        self._changes: list[tuple[int, Weights]] = [(0, self.base)]  # in a worker: (from this item on, weights)

    # --- main process ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before workers are asked for steps."""
        if not self._handed:  # a new epoch: what was announced holds from its first item on
            self.base, self._pending = self._coming.pop(0) if self._coming else (list(self._latest), [])
            self._note(_Event(base=self.base, announced=list(self._pending)))
        size = 2 * ((self.in_flight or 0) + 2)
        if len(self._slots) != size:
            self._slots = torch.zeros((size, 1 + len(self.base)), dtype=torch.float64)
            torch.Tensor.share_memory_(self._slots)  # type: ignore[no-untyped-call]
        self._slots.zero_()
        self._base.copy_(torch.tensor(self.base, dtype=torch.float64))
        for step, weights in self._pending:
            self._write(step, weights)

    def handed_out(self, worker: int) -> None:
        """A step of a worker was handed out, and its state with it."""
        self._handed[worker] = self._handed.get(worker, 0) + 1
        newest = max(self._handed.values())  # workers take turns: none that runs is behind by two steps
        if self._pending:
            self._pending = [one for one in self._pending if one[0] >= newest - 1]

    def end_epoch(self) -> None:
        """Every worker ended."""
        self._handed = {}

    def next_step(self) -> int:
        """The first step of a worker that a change announced now can hold for."""
        return max(self._handed.values(), default=0) + (self.in_flight or 0)

    def announce(self, step: int, weights: Sequence[float]) -> None:
        """Weights that hold from a step of every worker on, `next_step()` or a later one."""
        self._latest = list(weights)
        self._pending = _with(self._pending, (step, self._latest))
        self._note(_Event(announced=[(step, self._latest)]))
        if len(self._slots):
            self._write(step, self._latest)
        elif self.in_flight is None:  # read without a loader: from the next item on
            self._changes = [(0, self._latest)]

    def mark(self) -> "Mark":
        """The present, for `state_dict` of later."""
        return Mark(self.base, dict(self._handed), list(self._pending), list(self._coming), self._last)

    def state_dict(self, mark: "Mark | None" = None) -> dict[str, Any]:
        """Plain types; what workers took up is in their states.

        Args:
            mark: after an earlier step, for a trainer that reads ahead: the state has the steps of then, and all
                updates until now. None stands for the present.
        """
        mark = mark or self.mark()
        epochs, coming = [(mark.base, list(mark.pending))], list(mark.coming)
        event = mark.last.following
        while event is not None:  # each change holds from the same step as in this run
            if event.base is not None:
                epochs.append((event.base, list(event.announced)))
                del coming[:1]
            else:
                base, pending = epochs[-1]
                epochs[-1] = base, _with(pending, *event.announced)
            event = event.following
        plain = [[base, [[step, weights] for step, weights in pending]] for base, pending in epochs + coming]
        handed = [list(one) for one in sorted(mark.handed.items())]
        return {"epochs": plain, "latest": self._latest, "handed": handed, "learner": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the next `begin` shows it to workers."""
        self.learner.load_state_dict(state["learner"])
        self._latest = list(state["latest"])
        self._coming = [
            (list(base), [(int(step), list(weights)) for step, weights in pending])
            for base, pending in state["epochs"]
        ]
        self.base, self._pending = self._coming.pop(0)
        self._handed = {int(worker): int(steps) for worker, steps in state["handed"]}
        self._last = _Event()

    def _note(self, event: "_Event") -> None:
        self._last.following = event
        self._last = event

    def _write(self, step: int, weights: Weights) -> None:
        slot = self._slots[step % len(self._slots)]
        slot[1:] = torch.tensor(weights, dtype=torch.float64)
        slot[0] = step + 1

    # --- worker ----------------------------------------------------------------------------------------------------

    def start(self, state: dict[str, Any] | None) -> None:
        """Begin the epoch of a share, or continue from its `stream_state`."""
        self._made = state["made"] if state else 0
        self._changes = [(int(item), list(one)) for item, one in state["changes"]] if state else []
        if not state:
            self._changes = [(0, self._base.tolist() if self.in_flight is not None else self._latest)]

    def before_step(self, number: int) -> None:
        """Take up what holds from the next step on.

        Args:
            number: of the first item that is in no step and in no packer.
        """
        if len(self._slots):
            slot = self._slots[self._made % len(self._slots)].tolist()
            if slot[0] == self._made + 1:
                self._changes.append((number + self.read_ahead, slot[1:]))
        self._made += 1
        while len(self._changes) > 1 and self._changes[1][0] <= number:
            del self._changes[0]

    def stream_state(self) -> dict[str, Any]:
        """Of the worker after the step that it makes, in plain types."""
        return {"made": self._made, "changes": [list(one) for one in self._changes]}

    def weights_at(self, number: int) -> Weights:
        """The weights that item `number` of the share is drawn with."""
        for first, weights in reversed(self._changes):
            if first <= number:
                return weights
        return self._changes[0][1]


def _with(pending: list[Announced], *more: Announced) -> list[Announced]:
    """Announcements, of which a later one replaces an earlier one of the same step."""
    for step, weights in more:
        pending = [one for one in pending if one[0] != step] + [(step, weights)]
    return pending
