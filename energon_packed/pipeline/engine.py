"""Engine: runs one function over many tasks and gives the results as they come, in any order.

ProcessPool: worker processes with a pipe each.

Each worker has one task at a time, so it is known which task a worker had that was killed. Nothing is shared between
workers, no lock and no queue: whatever happens to one leaves no other waiting.

Progress: reports of a running pipeline; the command line draws them.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Literal, TypeVar

from energon_packed.errors import EnergonPackedError


class Progress:
    """Notified of every stage. The base class does nothing; override what you need."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """A stage begins that has `total` units of work."""

    def advance(self, units: int, records: int = 0) -> None:
        """`units` of work are done, holding `records` records."""

    def finish(self, seconds: float) -> None:
        """The stage is done."""

    def stop(self) -> None:
        """The stage failed, or ends without a summary."""


Task = TypeVar("Task")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1  # prctl(2)
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
"""Environment of a worker: tokenizers start no threads, because there is one process a core already."""
_REMEDY = "use fewer `workers`, or give the run more memory, and run it again: completed work is reused"
_PATIENCE = 5.0  # seconds for a worker to end; a killed one that waits for a dead disk may stay


class WorkerDied(EnergonPackedError):
    """A worker process ended without a result, or memory ran out."""


def label(task: Any) -> str:
    """What is done with a task, for messages: ` while writing x.tar`, where the task has a `label`."""
    found = getattr(task, "label", "")
    return f" while {found}" if found else ""


def killed(process: str, exitcode: int | None, doing: str) -> str:
    """The message for a worker that ended without a result.

    Args:
        process: its name.
        exitcode: as `multiprocessing.Process` has it: the negative number of the signal.
        doing: from `label`.
    """
    if exitcode is None or exitcode >= 0:
        return f"{process} ended{doing} with exit status {exitcode}; run again: completed work is reused"
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    if number == signal.SIGKILL:
        why = "perhaps the machine ran out of memory"
        return f"{process} was killed by signal {number} ({name}){doing}: {why}; {_REMEDY}"
    return f"{process} ended by signal {number} ({name}){doing}; run again: completed work is reused"


def out_of_memory(process: str, doing: str) -> str:
    """The message for a task whose memory could not be had."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    most = "" if limit == resource.RLIM_INFINITY else f" (its limit, ulimit -v, is {limit / 2**30:.2f} GiB)"
    return f"memory ran out in {process}{doing}{most}; {_REMEDY}"


def serve(
    function: Callable[[Any], Any], tasks: Connection, parent: int, inherited: Sequence[Connection] = ()
) -> None:
    """Answer every task with (result, None) or (None, error), until the pipe is closed or the parent is dead.

    Args:
        function: of the tasks.
        tasks: the worker's end of the pipe.
        parent: process that the worker ends with.
        inherited: ends of pipes that a forked worker has of its parent; it closes them.
    """
    _start(parent)
    for pipe in inherited:
        pipe.close()
    while True:
        try:
            task = tasks.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = ForkingPickler.dumps((function(task), None))
        except Exception as error:
            answer = _dumped(error, task)
        try:
            tasks.send_bytes(answer)
        except ConnectionError:
            return


def _start(parent: int) -> None:
    """End with the parent (on Linux), so that a killed run leaves no writer behind, and leave Ctrl-C to it."""
    # What was inherited stays: the collector need not walk it, nor touch (and so copy) its pages. Records make many
    # objects and no cycles, so collecting rarely is enough.
    gc.freeze()
    gc.set_threshold(100_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.update(ONE_THREAD)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _dumped(error: Exception, task: Any) -> memoryview:
    """An error for the pipe; one that is a defect of the code brings its traceback."""
    if isinstance(error, MemoryError):
        error = WorkerDied(out_of_memory(f"worker process {os.getpid()}", label(task)))
    elif not isinstance(error, EnergonPackedError | OSError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        return ForkingPickler.dumps((None, error))
    except Exception:
        return ForkingPickler.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))


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


class ProcessPool:
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

    def __enter__(self) -> "ProcessPool":
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


class Engine(ABC):
    """Where tasks run. One required method."""

    @abstractmethod
    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result, None, None]:
        """Results of `function` over `tasks`, in the order in which they are done.

        An error in a task ends the run and is raised here. Whoever may stop before the last result closes the
        generator (`contextlib.closing`), which ends the tasks that still run.
        """

    def close(self) -> None:  # noqa: B027
        """Release what the engine holds; the tasks that still run end. By default nothing is held."""


class LocalEngine(Engine):
    """Processes on this machine.

    Args:
        processes: how many; 1 runs tasks in this process.
        start_method: `fork` on Linux, where workers inherit the loaded encoder; `spawn` elsewhere, where forking a
            process with threads is not safe and each worker loads the encoder itself.
    """

    def __init__(self, processes: int, start_method: Literal["fork", "spawn"] | None = None) -> None:
        self.processes = processes
        self.start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result, None, None]:
        """Results as they come; with one process, in this one and in order.

        Raises:
            WorkerDied: a worker was killed, or memory ran out.
        """
        if self.processes > 1:
            with ProcessPool(function, self.processes, self.start_method) as crew:
                yield from crew.results(tasks)
            return
        for task in tasks:
            try:
                yield function(task)
            except MemoryError as error:
                raise WorkerDied(out_of_memory("this process", label(task))) from error
