"""Engine: runs one function over many tasks and gives the results as they come, in any order."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Literal, TypeVar

from energon_packed.pipeline.crew import Crew
from energon_packed.pipeline.worker import WorkerDied, label, out_of_memory

Task = TypeVar("Task")
Result = TypeVar("Result")


class Engine(ABC):
    """Where tasks run. Two required methods."""

    @abstractmethod
    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result, None, None]:
        """Results of `function` over `tasks`, in the order in which they are done.

        An error in a task ends the run and is raised here. Whoever may stop before the last result closes the
        generator (`contextlib.closing`), which ends the tasks that still run.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the engine holds; the tasks that still run end."""


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
            with Crew(function, self.processes, self.start_method) as crew:
                yield from crew.results(tasks)
            return
        for task in tasks:
            try:
                yield function(task)
            except MemoryError as error:
                raise WorkerDied(out_of_memory("this process", label(task))) from error

    def close(self) -> None:
        """Nothing is held: each run ends its own processes."""
