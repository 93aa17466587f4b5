"""WorkerSteps: the dataset under torch's DataLoader, which yields the steps of each worker process."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from energon_packed.dataflow.planned_steps import PlannedSteps
from energon_packed.dataflow.stream_steps import StreamPosition, StreamSteps
from energon_packed.dataflow.transport import Counts, Message, guarded, messages
from energon_packed.dataflow.worker_stream import Step
from energon_packed.errors import ConfigError

_SECONDS = 2.0  # between two looks at the parent process


class WorkerSteps(torch.utils.data.IterableDataset[Any]):
    """In each worker process, the messages with its steps; without worker processes, the steps.

    Args:
        steps: of this rank.
        in_flight: messages of a worker that torch asks for in advance.
    """

    def __init__(self, steps: PlannedSteps | StreamSteps, in_flight: int) -> None:
        self.plan = steps
        self.in_flight = in_flight
        self.counts = Counts(steps.num_workers)
        self._epoch = torch.zeros(1, dtype=torch.int64)
        torch.Tensor.share_memory_(self._epoch)  # type: ignore[no-untyped-call]  # seen by persistent workers
        self._start: Any = None
        self._by_loader = False

    @contextmanager
    def begin(self, position: Any) -> Iterator[None]:
        """Set where the iteration begins that is made inside; only workers that start now see more than its epoch."""
        self._epoch[0] = position.epoch
        # A mark keeps every update of a mixture since then, and workers do not need it.
        self._start = replace(position, mark=None) if isinstance(position, StreamPosition) else position
        self.plan.roles.failures.start(is_whole=not position.step and not getattr(position, "shards", ()))
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
        start: Any = self._start if self._start.epoch == epoch else self.plan.begin(epoch)
        # Torch takes the first message from worker 0, so the worker that makes the first step must be worker 0.
        turn = 0 if info is None else info.id
        steps = self.plan.steps(start, turn)
        if info is None:
            return steps
        _end_with_parent()
        gc.freeze()  # what the main process had loaded is not searched for garbage again and again
        gc.set_threshold(100_000)
        one_by_one = self.plan.roles.distributor.schedule is not None  # it counts what workers were asked for
        worker = (turn + getattr(start, "next_worker", 0)) % self.plan.num_workers
        return messages(guarded(steps, turn), worker, self.counts, self.in_flight, one_by_one=one_by_one)


def _end_with_parent() -> None:
    """End this worker process when its parent was killed.

    Torch's worker notices that, too. But then it waits until its queue is empty, and the reader of the queue is gone:
    the worker, and what holds its output open, would wait indefinitely.
    """
    if any(thread.name == _end_with_parent.__name__ for thread in threading.enumerate()):
        return  # a persistent worker in a later epoch
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name=_end_with_parent.__name__).start()
