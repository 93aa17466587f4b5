"""Answers of Energon's workers to commands, such as for their states: waited for only while they live."""

import queue
import time
from typing import Any

from energon_packed.dataflow.worker_errors import dead_workers
from energon_packed.errors import WorkerError

_SECONDS = 1.0  # between two looks at the workers


class Answers:
    """In place of a `result_queue` of Energon's loader, whose `get` would wait for a dead worker indefinitely.

    Args:
        inner: the queue.
        loader: Energon's.
        timeout: seconds; 0 waits as long as the workers live.
    """

    def __init__(self, inner: Any, loader: Any, timeout: float) -> None:
        self._inner = inner
        self._loader = loader
        self._timeout = timeout

    def put(self, value: Any) -> None:
        """As the queue."""
        self._inner.put(value)

    def get(self) -> Any:
        """As the queue.

        Raises:
            WorkerError: a worker died, or does not answer in time.
        """
        start = time.monotonic()
        while True:
            try:
                return self._inner.get(timeout=_SECONDS)
            except queue.Empty:
                pass
            if dead := dead_workers(self._loader._iterator):
                raise WorkerError(
                    f"the loader has no state: a worker process (pid {dead[0]}) exited unexpectedly; the state that "
                    "was saved last is good: load it in a new loader"
                )
            if 0 < self._timeout < time.monotonic() - start:
                raise WorkerError(
                    f"a worker process did not tell its state for {self._timeout:g} seconds, `timeout`: a file system "
                    "that hangs, or samples that take longer; the state that was saved last is good"
                )


def answer_while_alive(loader: Any, timeout: float) -> None:
    """Make Energon's loader wait for its workers only while they live; before they are started."""
    loader.result_queues[:] = [
        Answers(inner, loader, timeout) for inner in loader.result_queues
    ]  # one list with workers
