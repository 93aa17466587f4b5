"""WorkerStreams: what torch's DataLoader iterates, the steps of its share in each worker process."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from energon_packed.dataflow.elastic import Rest, RestOfEpoch
from energon_packed.dataflow.reweighted import ReweightedRest
from energon_packed.dataflow.share import Share
from energon_packed.dataflow.transport import Counts, Message, guarded, messages
from energon_packed.dataflow.worker_stream import Roles, Step, WorkerStream
from energon_packed.errors import ConfigError


class Start(NamedTuple):
    """Where an iteration begins.

    Attributes:
        epoch: number of the epoch.
        next_worker: the one that gives the first batch.
        states: of each worker, JSON; None at the beginning of the epoch.
        rest: what is left of the epoch, where the number of ranks or workers changed in it.
    """

    epoch: int
    next_worker: int
    states: list[str | None]
    rest: dict[str, Any] | None


class WorkerStreams(torch.utils.data.IterableDataset[Any]):
    """In each worker process, the messages with the steps of its share; without one, the steps.

    Args:
        roles: of the dataflow.
        share: of the rank; each worker takes its own.
        in_flight: messages of a worker that torch asks for in advance.
    """

    def __init__(self, roles: Roles, share: Share, in_flight: int) -> None:
        self.roles = roles
        self.share = share
        self.in_flight = in_flight
        self.counts = Counts(share.num_workers)
        self._epoch = torch.zeros(1, dtype=torch.int64)
        torch.Tensor.share_memory_(self._epoch)  # type: ignore[no-untyped-call]  # seen by persistent workers
        self._start = Start(0, 0, [None] * share.num_workers, None)
        self._by_loader = False

    @contextmanager
    def begin(self, start: Start) -> Iterator[None]:
        """Set where the iteration begins that is made inside; only workers that start now see more than its epoch."""
        self._epoch[0] = start.epoch
        self._start = start
        self.counts.begin()
        self._by_loader = True
        try:
            yield
        finally:
            self._by_loader = False

    def __iter__(self) -> Iterator[Step | Message]:
        if not self._by_loader:
            raise ConfigError(
                "the data of a DataflowLoader is iterated by another loader, which loses its order, state and ranks: "
                "do not pass a DataflowLoader to accelerator.prepare or Trainer; iterate it directly, and move each "
                "batch to the device"
            )
        info = torch.utils.data.get_worker_info()
        epoch = int(self._epoch[0])
        start = self._start if self._start.epoch == epoch else Start(epoch, 0, [None] * self.share.num_workers, None)
        physical = 0 if info is None else info.id
        # torch takes the first message from worker 0: the worker whose turn it is must be that one.
        worker = (physical + start.next_worker) % self.share.num_workers
        steps = self._steps(start, worker)
        if info is None:
            return steps
        gc.freeze()  # what the main process had loaded is not searched for garbage again and again
        gc.set_threshold(100_000)
        one_by_one = self.roles.distributor.schedule is not None  # it counts what workers were asked for
        return messages(guarded(steps, physical), worker, self.counts, self.in_flight, one_by_one=one_by_one)

    def _steps(self, start: Start, worker: int) -> Iterator[Step]:
        saved = start.states[worker]
        share = replace(self.share, worker=worker, epoch=start.epoch)
        roles = self.roles
        if start.rest is not None:
            rest = Rest.from_plain(start.rest)
            kind: Any = RestOfEpoch if rest.weights is None else ReweightedRest
            roles = roles._replace(distributor=kind(roles.distributor, rest))
        yield from WorkerStream(roles, share, None if saved is None else json.loads(saved))
