"""Crew: worker processes with a pipe each.

Each worker has one task at a time, so it is known which task a worker had that was killed. Nothing is shared between
workers, no lock and no queue: whatever happens to one leaves no other waiting.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from energon_packed.pipeline.worker import WorkerDied, killed, label, serve

_PATIENCE = 5.0  # seconds for a worker to end; a killed one that waits for a dead disk may stay


class _Worker:
    """One process, the pipe to it and the task that it has."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.task: Any = None

    def send(self, task: Any) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: receiving says so
            self.pipe.send(task)

    def receive(self) -> tuple[Any, Exception | None]:
        """Its answer.

        Raises:
            WorkerDied: there is none, because it ended.
        """
        try:
            answer: tuple[Any, Exception | None] = self.pipe.recv()
            return answer
        except (EOFError, ConnectionResetError) as error:
            self.process.join(_PATIENCE)
            name = f"worker process {self.process.pid}"
            raise WorkerDied(killed(name, self.process.exitcode, label(self.task))) from error


class Crew:
    """Up to `size` workers, started when there is a task for them; a context manager at whose end none is left.

    Args:
        function: of the tasks.
        size: processes.
        start_method: `fork` or `spawn`.
    """

    def __init__(self, function: Callable[[Any], Any], size: int, start_method: str) -> None:
        self._function = function
        self._size = size
        self._context: Any = multiprocessing.get_context(start_method)
        self._is_fork = start_method == "fork"
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers: idle ones by closing their pipe, all at once after an error, because kills are harmless."""
        for worker in self._workers:
            if kind is None and worker.task is None:
                worker.pipe.close()
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(_PATIENCE)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join(_PATIENCE)
            worker.pipe.close()
        self._workers = []

    def results(self, tasks: Iterable[Any]) -> Generator[Any, None, None]:
        """Results as they come.

        Raises:
            WorkerDied: a worker ended without an answer.
            Exception: what a task raised.
        """
        waiting = iter(tasks)
        for task in waiting:
            self._started().send(task)
            if len(self._workers) == self._size:
                break
        while busy := {worker.pipe: worker for worker in self._workers if worker.task is not None}:
            for worker in [busy[pipe] for pipe in wait(list(busy))]:  # type: ignore[index]
                result, error = worker.receive()
                if error is not None:
                    raise error
                worker.task = None
                for task in waiting:  # before the result is used, so that the worker does not wait for that
                    worker.send(task)
                    break
                yield result

    def _started(self) -> _Worker:
        """A new worker."""
        ours, theirs = self._context.Pipe()
        inherited = [*(worker.pipe for worker in self._workers), ours] if self._is_fork else []
        arguments = (self._function, theirs, os.getpid(), inherited)
        process = self._context.Process(target=serve, args=arguments, name="energon-packed worker", daemon=True)
        with _signals_held():
            process.start()
            worker = _Worker(process, ours)
            self._workers.append(worker)
        theirs.close()  # the worker alone has it, so that the pipe ends with the worker
        return worker


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait while a process is started: the new one first gives up the handlers that it inherits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
