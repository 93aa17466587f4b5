"""Rewards to the weights of a mixture, and the item from which on new weights apply in each worker.

ExponentialWeights computes weights from rewards. WeightSchedule passes them from the main process to the workers, so
that two runs draw the same items although workers read ahead: new weights apply from a step that no worker can have
started. Torch requests a step of a worker only after an earlier step was yielded, at most `in_flight` steps ahead.

    main       yielded: 0 1 2 | announce(w): from step 2 + 1 + in_flight of each worker
    worker     ... step 5: items up to 811 are in batches, up to 843 may be read  ->  w applies from item 843 on

The worker turns the step into an item: the number of items after its steps so far, and `read_ahead` more. Its state
contains that item, so that a resumed worker draws the same items.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class ExponentialWeights:
    """Weights of K sources that follow rewards: EXP3 with a moving average of the rewards.

    A. Albalak et al., "Efficient Online Data Mixing For Language Model Pre-Training", 2023 (arXiv:2312.02406),
    algorithm 1, which follows P. Auer et al., "The Nonstochastic Multiarmed Bandit Problem", 2002. Update t computes
    the estimate R_i of each source i with a reward r_i, and the weights of step t + 1 of all sources:

        R_i  <-  a * R_i + (1 - a) * r_i / w_i
        e_t   =  min(1 / K, sqrt(ln K / (K * t))),  e_0 = 1 / K
        w_i  <-  (1 - K * e_(t+1)) * p_i * exp(e_t * R_i) / sum_j p_j * exp(e_t * R_j)  +  K * e_(t+1) * p_i

    p are the initial weights, with the sum 1. If all are 1 / K, this is the formula of the paper; other weights are a
    prior in place of its uniform distribution. With more updates there is less exploration: e_t approaches 0.

    Args:
        prior: p, K numbers above 0.
        smoothing: a, 0 to below 1.
    """

    def __init__(self, prior: Sequence[float], smoothing: float) -> None:
        self.prior = [weight / math.fsum(prior) for weight in prior]
        self.smoothing = smoothing
        self.updates = 0
        self.estimates = [0.0] * len(prior)
        self.weights = list(self.prior)

    def update(self, rewards: Mapping[int, float]) -> None:
        """Update the weights by the rewards of some sources, by index."""
        for source, reward in rewards.items():
            estimate = self.smoothing * self.estimates[source]
            self.estimates[source] = estimate + (1 - self.smoothing) * reward / self.weights[source]
        self.updates += 1
        rate, explored = self._rate(self.updates), len(self.prior) * self._rate(self.updates + 1)
        highest = max(self.estimates)  # subtracted from all exponents, so that exp() cannot overflow
        scores = [p * math.exp(rate * (r - highest)) for p, r in zip(self.prior, self.estimates, strict=True)]
        total = math.fsum(scores)
        self.weights = [
            (1 - explored) * score / total + explored * p for p, score in zip(self.prior, scores, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
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
"""(step of every worker, weights that apply from this step on)."""


class _Event:
    """A change in the main process. Events form a linked list, and Python frees the events before the oldest `Mark`.

    Attributes:
        base: weights of an epoch that started; None for an announcement.
        announced: announcements of the event.
        following: the next event.
    """

    __slots__ = ("announced", "base", "following")

    def __init__(self, base: Weights | None = None, announced: Sequence[Announced] = ()) -> None:
        self.base, self.announced = base, announced
        self.following: _Event | None = None


class Mark(NamedTuple):
    """The state of a schedule after a step.

    Attributes:
        base: weights at the start of the epoch.
        handed: yielded steps of each worker.
        pending: announcements that are not in the states of all workers.
        coming: base and announcements of epochs that the saved run had started, but this run has not.
        last: the last event until then.
    """

    base: Weights
    handed: dict[int, int]
    pending: list[Announced]
    coming: list[tuple[Weights, list[Announced]]]
    last: _Event


class WeightSchedule:
    """Changes of K weights, announced in the main process and applied by its workers.

    Args:
        learner: computes the weights; its state is part of the state of the schedule.
        read_ahead: items that a worker reads together.

    Attributes:
        base: weights at the start of the epoch.
        in_flight: steps of a worker that may be requested before the first of them is yielded; None until a loader
            reads the mixture.
        is_inner: it belongs to a mixture inside a mixture, whose steps are not counted.
    """

    def __init__(self, learner: ExponentialWeights, read_ahead: int) -> None:
        weights = learner.weights
        self.learner = learner
        self.base: Weights = list(weights)
        self.read_ahead = read_ahead
        self.in_flight: int | None = None
        self.is_inner = False
        self._handed: dict[int, int] = {}  # yielded steps of each worker
        self._pending: list[Announced] = []  # not in the states of all workers
        self._coming: list[tuple[Weights, list[Announced]]] = []  # epochs that the saved run had started
        self._last = _Event()
        self._latest: Weights = list(weights)
        # Shared memory, as worker processes may have started before an announcement. Row: (step + 1, weights).
        self._slots = torch.zeros((0, 1 + len(weights)), dtype=torch.float64)
        self._base = torch.zeros(len(weights), dtype=torch.float64)
        torch.Tensor.share_memory_(self._base)  # type: ignore[no-untyped-call]
        self._made = 0  # in a worker: its steps
        self._changes: list[tuple[int, Weights]] = [(0, self.base)]  # in a worker: (first item, weights)

    # --- main process ----------------------------------------------------------------------------------------------

    def start_epoch(self) -> None:
        """Prepare an epoch, or the rest of an epoch, before steps are requested from workers."""
        if not self._handed:  # a new epoch: announced weights apply from its first item on
            self.base, self._pending = self._coming.pop(0) if self._coming else (list(self._latest), [])
            self._note(_Event(base=self.base, announced=list(self._pending)))
        # A slot is reused after `size` steps: by then, every worker has read it.
        size = 2 * ((self.in_flight or 0) + 2)
        if len(self._slots) != size:
            self._slots = torch.zeros((size, 1 + len(self.base)), dtype=torch.float64)
            torch.Tensor.share_memory_(self._slots)  # type: ignore[no-untyped-call]
        self._slots.zero_()
        self._base.copy_(torch.tensor(self.base, dtype=torch.float64))
        for step, weights in self._pending:
            self._write(step, weights)

    def count_step(self, worker: int) -> None:
        """Count a step of a worker that was yielded, together with its state."""
        self._handed[worker] = self._handed.get(worker, 0) + 1
        newest = max(self._handed.values())  # round-robin: a running worker is at most one step late
        if self._pending:
            self._pending = [(step, weights) for step, weights in self._pending if step >= newest - 1]

    def end_epoch(self) -> None:
        """Reset the counts of yielded steps: all workers ended."""
        self._handed = {}

    def next_step(self) -> int:
        """Return the first step of a worker to which a change announced now can apply."""
        return max(self._handed.values(), default=0) + (self.in_flight or 0)

    def announce(self, step: int, weights: Sequence[float]) -> None:
        """Announce weights that apply from a step of every worker on, `next_step()` or later."""
        self._latest = list(weights)
        self._pending = _with(self._pending, (step, self._latest))
        self._note(_Event(announced=[(step, self._latest)]))
        if len(self._slots):
            self._write(step, self._latest)
        elif self.in_flight is None:  # read without a loader: they apply from the next item on
            self._changes = [(0, self._latest)]

    def mark(self) -> "Mark":
        """Return the current state, for a later `state_dict`."""
        return Mark(self.base, dict(self._handed), list(self._pending), list(self._coming), self._last)

    def state_dict(self, mark: "Mark | None" = None) -> dict[str, Any]:
        """Return the state in plain types; the states of workers contain the changes that they applied.

        Args:
            mark: after an earlier step, for a trainer that reads ahead: the state has the steps of the mark, and all
                updates until now. None is the current step.
        """
        mark = mark or self.mark()
        epochs, coming = [(mark.base, list(mark.pending))], list(mark.coming)
        event = mark.last.following
        while event is not None:  # each change applies from the same step as in this run
            if event.base is not None:
                epochs.append((event.base, list(event.announced)))
                del coming[:1]
            else:
                base, pending = epochs[-1]
                epochs[-1] = base, _with(pending, *event.announced)
            event = event.following
        plain = [[base, [[step, weights] for step, weights in pending]] for base, pending in epochs + coming]
        handed = [[worker, steps] for worker, steps in sorted(mark.handed.items())]
        return {"epochs": plain, "latest": self._latest, "handed": handed, "learner": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the next `start_epoch` passes it to workers."""
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
        # The step last: a worker that reads the slot in the meantime must not see old weights with a new step.
        slot[1:] = torch.tensor(weights, dtype=torch.float64)
        slot[0] = step + 1

    # --- worker ----------------------------------------------------------------------------------------------------

    def start(self, state: dict[str, Any] | None) -> None:
        """Start the epoch of a shard, or continue from its `stream_state`."""
        self._made = state["made"] if state else 0
        self._changes = [(int(item), list(weights)) for item, weights in state["changes"]] if state else []
        if not state:
            self._changes = [(0, self._base.tolist() if self.in_flight is not None else self._latest)]

    def before_step(self, number: int) -> None:
        """Apply the weights that were announced for the next step.

        Args:
            number: of the first item that is neither in a step nor in a packer.
        """
        if len(self._slots):
            slot = self._slots[self._made % len(self._slots)].tolist()
            if slot[0] == self._made + 1:
                self._changes.append((number + self.read_ahead, slot[1:]))
        self._made += 1
        while len(self._changes) > 1 and self._changes[1][0] <= number:
            del self._changes[0]

    def stream_state(self) -> dict[str, Any]:
        """Return the state of the worker after its current step, in plain types."""
        return {"made": self._made, "changes": [[item, weights] for item, weights in self._changes]}

    def weights_at(self, number: int) -> Weights:
        """Return the weights by which item `number` of the shard is drawn."""
        for first, weights in reversed(self._changes):
            if first <= number:
                return weights
        return self._changes[0][1]


def _with(pending: list[Announced], *more: Announced) -> list[Announced]:
    """Add announcements; a later announcement replaces an earlier announcement of the same step."""
    for step, weights in more:
        pending = [announced for announced in pending if announced[0] != step] + [(step, weights)]
    return pending
