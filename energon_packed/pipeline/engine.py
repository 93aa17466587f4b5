"""Engines, which run one function over many tasks, and the progress reports of a pipeline.

Input: a function and an iterable of tasks, all picklable. Output: an iterator of results in the order of completion.

Engine        base class; its run() is the interface of all stages
LocalEngine   runs tasks in this process or in a ProcessPool
ProcessPool   worker processes with a pipe each. Every worker has one task at a time, so the task of a killed worker is
              known. Workers share no lock and no queue: the death of a worker never blocks another worker.
Progress      base class of the callbacks of `pack`; the command line draws a bar from them
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
from energon_packed.system import ending


class Progress:
    """Base class for progress callbacks of `pack`: override start, advance, finish and stop.

    The stages are compare (media files of an earlier run), measure (records), plan (records), media (images that
    `media='reference'` stores), write (samples) and index (shards):

        class Log(Progress):
            def start(self, stage, total, unit):
                print(f"{stage}: {total} {unit}")

    Examples:
        >>> class Log(Progress):
        ...     def start(self, stage, total, unit):
        ...         print(stage, unit)
        >>> result = pack(data, output_dir="logged", **options, progress=Log())
        measure records
        plan records
        write samples
        index shards
    """

    def start(self, stage: str, total: int, unit: str) -> None:
        """Start a stage that has `total` units of work."""

    def advance(self, units: int, records: int = 0) -> None:
        """Report `units` of finished work, which contain `records` records."""

    def finish(self, seconds: float) -> None:
        """Finish the stage, after `seconds` of wall time."""

    def stop(self) -> None:
        """End the stage after a failure, or without a summary."""


Task = TypeVar("Task")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_REMEDY = "use fewer `workers` or more memory, and run again: completed work is reused"
_JOIN_TIMEOUT = 5.0  # seconds; a killed worker that waits for a dead disk may never end


class WorkerDied(EnergonPackedError):
    """A worker process ended without a result, or memory ran out."""


def label(task: Any) -> str:
    """Describe the work on a task for a message, such as ` while writing x.tar`; "" if the task has no `label`."""
    doing = getattr(task, "label", "")
    return f" while {doing}" if doing else ""


def killed(process: str, exitcode: int | None, doing: str) -> str:
    """Message for a worker that ended without a result.

    Args:
        process: name of the process.
        exitcode: as in `multiprocessing.Process`: the negative number of the signal.
        doing: result of `label`.
    """
    how = f"{process} {ending(exitcode or 0)}{doing}"
    if exitcode == -signal.SIGKILL:
        return f"{how}: perhaps the machine ran out of memory; {_REMEDY}"
    return f"{how}; run again: completed work is reused"


def out_of_memory(process: str, doing: str) -> str:
    """Message for a task that could not allocate memory."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    shown = "" if limit == resource.RLIM_INFINITY else f" (its limit, ulimit -v, is {limit / 2**30:.2f} GiB)"
    return f"memory ran out in {process}{doing}{shown}; {_REMEDY}"


def serve(
    function: Callable[[Any], Any], tasks: Connection, parent: int, inherited: Sequence[Connection] = ()
) -> None:
    """Answer every task with (result, None) or (None, error), until the pipe is closed or the parent is dead.

    Args:
        function: function of the tasks.
        tasks: the worker's end of the pipe.
        parent: process id of the parent; the worker ends when the parent ends.
        inherited: pipe ends of the parent that a forked worker inherits and has to close.
    """
    _start(parent)
    # An open copy of the parent's end would keep this and the other workers from seeing the end of their pipe.
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
    """Prepare a worker process: it ends with its parent (on Linux), and ignores Ctrl-C, which the parent handles."""
    # Inherited objects stay alive: the collector need not walk them, nor touch (and so copy) their pages. Records make
    # many objects but no cycles, so that rare collections are enough.
    gc.freeze()
    gc.set_threshold(100_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all processes of the group
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # inherited from `_blocked_signals`
    use_one_thread()
    if sys.platform == "linux":
        # Otherwise a worker of a killed run would continue to write into a folder that the next run has locked.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl, so no signal will come
        os._exit(1)


def use_one_thread() -> None:
    """Keep libraries from starting threads in a worker process, because every core already has a process.

    torch would wait forever for its threads if it used them before the fork.
    """
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _dumped(error: Exception, task: Any) -> memoryview:
    """Pickle an error for the pipe, with its traceback if the error is a defect of the code."""
    if isinstance(error, MemoryError):
        error = WorkerDied(out_of_memory(f"worker process {os.getpid()}", label(task)))
    elif not isinstance(error, EnergonPackedError | OSError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        return ForkingPickler.dumps((None, error))
    except Exception:  # an exception of an adapter or a loader may refuse to be pickled
        return ForkingPickler.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))


class _Worker:
    """A worker process, its pipe and its current task."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.task: Any = None

    def send(self, task: Any) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker is dead: `receive` raises
            self.pipe.send(task)

    def receive(self) -> tuple[Any, Exception | None]:
        """Receive the answer to the task.

        Raises:
            WorkerDied: the process ended without an answer.
        """
        try:
            answer: tuple[Any, Exception | None] = self.pipe.recv()
            return answer
        except (EOFError, ConnectionResetError) as error:
            self.process.join(_JOIN_TIMEOUT)
            name = f"worker process {self.process.pid}"
            raise WorkerDied(killed(name, self.process.exitcode, label(self.task))) from error


class ProcessPool:
    """Context manager of up to `size` worker processes, which start with their first task and end with the block.

    Args:
        function: function of the tasks.
        size: maximum number of processes.
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
        """End the workers: close the pipes of idle workers; after an error, kill all (stages survive kills)."""
        for worker in self._workers:
            if kind is None and worker.task is None:
                worker.pipe.close()
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(_JOIN_TIMEOUT)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join(_JOIN_TIMEOUT)
            worker.pipe.close()
        self._workers = []

    def results(self, tasks: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield results in the order of completion.

        Raises:
            WorkerDied: a worker ended without an answer.
            Exception: a task raised it.
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
                for task in waiting:  # sent before the result is used, so that the worker is never idle
                    worker.send(task)
                    break
                yield result

    def _started(self) -> _Worker:
        """Start a worker."""
        parent_end, worker_end = self._context.Pipe()
        inherited = [*(worker.pipe for worker in self._workers), parent_end] if self._is_fork else []
        arguments = (self._function, worker_end, os.getpid(), inherited)
        process = self._context.Process(target=serve, args=arguments, name="energon-packed worker", daemon=True)
        with _blocked_signals():
            process.start()
            worker = _Worker(process, parent_end)
            self._workers.append(worker)
        worker_end.close()  # the only open copy is the worker's, so that the pipe ends with the worker
        return worker


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block signals while a process starts: a forked process must first replace the handlers that it inherits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Engine(ABC):
    """Base class of engines; `run` is the only required method."""

    @abstractmethod
    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result, None, None]:
        """Yield the results of `function` over `tasks`, in the order of completion.

        An error in a task ends the run and is raised here. A caller that may stop before the last result has to close
        the generator (`contextlib.closing`), which ends the tasks that still run.
        """

    def close(self) -> None:  # noqa: B027
        """Release the resources of the engine and end the tasks that still run; does nothing by default."""


class LocalEngine(Engine):
    """Engine that runs tasks in processes of this machine.

    Args:
        processes: number of processes; 1 runs the tasks in this process.
        start_method: by default `fork` on Linux, so that workers inherit the loaded encoder. On other systems forking
            a process with threads is not safe, so the default is `spawn`, and each worker loads the encoder itself.
    """

    def __init__(self, processes: int, start_method: Literal["fork", "spawn"] | None = None) -> None:
        self.processes = processes
        self.start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result, None, None]:
        """Yield results in the order of completion; a single process yields them in the order of the tasks.

        Raises:
            WorkerDied: a worker was killed, or memory ran out.
        """
        if self.processes > 1:
            with ProcessPool(function, self.processes, self.start_method) as pool:
                yield from pool.results(tasks)
            return
        for task in tasks:
            try:
                yield function(task)
            except MemoryError as error:
                raise WorkerDied(out_of_memory("this process", label(task))) from error
