"""WorkerStreams: what torch's DataLoader iterates, and how batches go from a worker to the main process."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.elastic import Rest, RestOfEpoch
from energon_packed.dataflow.reweighted import ReweightedRest
from energon_packed.dataflow.share import Share
from energon_packed.dataflow.worker_stream import Roles, Step, WorkerStream
from energon_packed.errors import ConfigError, EnergonPackedError

_SMALL = 1 << 20  # bytes of a tensor that goes through the pipe of its worker


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
    """In each worker process, the steps of its share.

    Args:
        roles: of the dataflow.
        share: of the rank; each worker takes its own.
        by_pipe: small tensors of a batch go to the main process as arrays; `as_tensors` makes tensors of them again.
    """

    def __init__(self, roles: Roles, share: Share, *, by_pipe: bool) -> None:
        self.roles = roles
        self.share = share
        self.by_pipe = by_pipe
        self._epoch = torch.zeros(1, dtype=torch.int64)
        torch.Tensor.share_memory_(self._epoch)  # type: ignore[no-untyped-call]  # seen by persistent workers
        self._start = Start(0, 0, [None] * share.num_workers, None)
        self._by_loader = False

    @contextmanager
    def begin(self, start: Start) -> Iterator[None]:
        """Set where the iteration begins that is made inside; only workers that start now see more than its epoch."""
        self._epoch[0] = start.epoch
        self._start = start
        self._by_loader = True
        try:
            yield
        finally:
            self._by_loader = False

    def __iter__(self) -> Iterator[Step | Exception]:
        if not self._by_loader:
            raise ConfigError(
                "the data of a DataflowLoader is iterated by another loader, which loses its order, state and ranks: "
                "do not pass a DataflowLoader to accelerator.prepare or Trainer; iterate it directly, and move each "
                "batch to the device"
            )
        return self._of_worker()

    def _of_worker(self) -> Iterator[Step | Exception]:
        info = torch.utils.data.get_worker_info()
        epoch = int(self._epoch[0])
        start = self._start if self._start.epoch == epoch else Start(epoch, 0, [None] * self.share.num_workers, None)
        physical = 0 if info is None else info.id
        # torch takes the first batch from worker 0: the worker whose turn it is must be that one.
        worker = (physical + start.next_worker) % self.share.num_workers
        saved = start.states[worker]
        share = replace(self.share, worker=worker, epoch=epoch)
        roles = self.roles
        if start.rest is not None:
            rest = Rest.from_plain(start.rest)
            kind: Any = RestOfEpoch if rest.weights is None else ReweightedRest
            roles = roles._replace(distributor=kind(roles.distributor, rest))
        if info is not None:
            gc.freeze()  # what the main process had loaded is not searched for garbage again and again
            gc.set_threshold(100_000)
        try:
            for step in WorkerStream(roles, share, None if saved is None else json.loads(saved)):
                if info is not None and self.by_pipe:
                    _as_arrays(step.batch)
                yield step
        except EnergonPackedError as error:  # torch would turn it into a traceback
            yield error


def _as_arrays(batch: Any) -> None:
    """Make arrays of small tensors: through the pipe they cost a tenth of a shared memory file for each."""
    if isinstance(batch, PackedBatch):
        for one in fields(batch):  # it has slots
            value = getattr(batch, one.name)
            if isinstance(value, torch.Tensor) and value.nbytes <= _SMALL and value.dtype != torch.bfloat16:
                setattr(batch, one.name, value.numpy())


def as_tensors(batch: Any) -> None:
    """The inverse of `_as_arrays`."""
    if isinstance(batch, PackedBatch):
        for one in fields(batch):
            value = getattr(batch, one.name)
            if isinstance(value, np.ndarray):
                setattr(batch, one.name, torch.from_numpy(value))
