"""WeightSchedule: from which item on changed weights hold, the same whenever workers read ahead.

A change is announced in the main process, and holds from a step of every worker that no worker can have begun: torch
asks a worker for a step only when one of an earlier step was handed out, at most `in_flight` of them ahead.

    main       handed out: 0 1 2 | announce(w): from step 2 + 1 + in_flight of each worker
    worker     ... step 5: items up to 811 are in batches, up to 843 may be read  ->  w holds from item 843 on

The worker turns the step into an item: the number of items behind its steps so far, and `read_ahead` more. Its state
holds that item, so that one who resumes draws the same items.
"""

from collections.abc import Sequence
from typing import Any

import torch

from energon_packed.dataflow.distributors.bandit import ExponentialWeights

Weights = list[float]


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
        self._pending: list[tuple[int, Weights]] = []  # announced, and not in the states of all workers
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
            self.base, self._pending = list(self._latest), []
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
        self._pending = [one for one in self._pending if one[0] != step] + [(step, self._latest)]
        if len(self._slots):
            self._write(step, self._latest)
        elif self.in_flight is None:  # read without a loader: from the next item on
            self._changes = [(0, self._latest)]

    def state_dict(self) -> dict[str, Any]:
        """Plain types; what workers took up is in their states."""
        handed = sorted(self._handed.items())
        pending = [[step, weights] for step, weights in self._pending]
        of = {"base": self.base, "latest": self._latest, "pending": pending, "handed": [list(one) for one in handed]}
        return of | {"learner": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the next `begin` shows it to workers."""
        self.learner.load_state_dict(state["learner"])
        self.base, self._latest = list(state["base"]), list(state["latest"])
        self._pending = [(int(step), list(weights)) for step, weights in state["pending"]]
        self._handed = {int(worker): int(steps) for worker, steps in state["handed"]}

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
        """Of the worker behind the step that it makes, in plain types."""
        return {"made": self._made, "changes": [list(one) for one in self._changes]}

    def weights_at(self, number: int) -> Weights:
        """The weights that item `number` of the share is drawn with."""
        for first, weights in reversed(self._changes):
            if first <= number:
                return weights
        return self._changes[0][1]
