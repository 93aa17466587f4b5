"""Engine: runs one function over many tasks and gives the results as they come, in any order."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, Literal, TypeVar

from energon_packed.errors import EnergonPackedError

Task = TypeVar("Task")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1  # prctl(2)
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
"""Environment of a worker: tokenizers start no threads, because there is one process a core already."""


class WorkerDied(EnergonPackedError):
    """A worker process ended without a result."""


class Engine(ABC):
    """Where tasks run. One required method."""

    @abstractmethod
    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Results of `function` over `tasks`, in the order in which they are done.

        An error in a task ends the run and is raised here.
        """


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

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Results as they come; with one process, in this one and in order."""
        if self.processes == 1:
            yield from map(function, tasks)
            return
        pool = ProcessPoolExecutor(
            self.processes,
            mp_context=multiprocessing.get_context(self.start_method),
            initializer=_start_worker,
            initargs=(function, os.getpid()),
        )
        try:
            waiting = iter(tasks)
            running: set[Future[Any]] = {pool.submit(_call, task) for task in islice(waiting, 2 * self.processes)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(_call, task) for task in islice(waiting, len(done))}
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise WorkerDied(
                "a worker process was killed, perhaps because memory ran out; use fewer `workers` and run again, "
                "completed work is reused"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any] | None = None


def _start_worker(function: Callable[[Any], Any], parent: int) -> None:
    """Keep the stage's function, and end with the parent (on Linux): a killed run leaves no writer behind."""
    global _function
    _function = function
    # What was inherited stays: the collector need not walk it, nor touch (and so copy) its pages. Records make many
    # objects and no cycles, so collecting rarely is enough.
    gc.freeze()
    gc.set_threshold(100_000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(ONE_THREAD)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _call(task: Any) -> Any:
    assert _function is not None
    return _function(task)
