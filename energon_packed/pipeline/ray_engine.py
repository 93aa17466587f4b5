"""RayEngine, which runs the tasks of a pipeline on a Ray cluster with a shared disk.

Input: a function and tasks, as for every `Engine`, and the address of a cluster. Output: results in the order of
completion; the files of the tasks are on the shared disk.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from energon_packed.errors import ConfigError, EnergonPackedError
from energon_packed.pipeline.engine import Engine, WorkerDied, label, out_of_memory, use_one_thread

Task = TypeVar("Task")
Result = TypeVar("Result")
_TASKS_PER_CORE = 2  # submitted at a time, so that the next task of a core is already queued
_POLL = 0.5  # seconds that a wait may block the thread of Ray, and so the end of an interrupted driver


class RayEngine(Engine):
    """Engine that runs tasks on a Ray cluster, one core per task.

    Every node must see the same paths, and have this package installed. A task that is lost with its node runs again
    on another node. This is safe because tasks rename files to their final name when they are complete, and write the
    same bytes each time.

    Args:
        address: address of the cluster, as in `ray.init`; None for the running cluster, else a cluster on this
            machine.
        tasks: maximum tasks at a time; 0 for as many as the cluster has cores.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at `address`.
    """

    def __init__(self, address: str | None = None, tasks: int = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("`engine=ray` needs Ray; run pip install 'energon-packed[ray]'") from error
        self._ray: Any = ray
        lost = ray.exceptions
        self._lost = (lost.WorkerCrashedError, lost.NodeDiedError, lost.OutOfMemoryError, lost.ObjectLostError)
        self._tasks = tasks
        self._thread = ThreadPoolExecutor(1, "ray")
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            self._connect(address)

    def _connect(self, address: str | None) -> None:
        ray = self._ray
        options = {"log_to_driver": False, "logging_level": "warning", "configure_logging": False}
        with _keep_sigterm_handler():
            try:
                ray.init(address=address or "auto", **options)
            except (ConnectionError, ValueError) as error:
                if address is not None:
                    raise ConfigError(
                        f"no Ray cluster answers at {address}: {' '.join(str(error).split())[:200]}; start one with "
                        "ray start --head, or omit `ray_address`"
                    ) from error
                ray.init(num_cpus=self._tasks or None, include_dashboard=False, **options)

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result, None, None]:
        """Yield results in the order of completion.

        Raises:
            WorkerDied: a task was lost with its process or node repeatedly.
        """
        ray, folder = self._ray, os.getcwd()
        remote = self._in_thread(ray.remote(num_cpus=1, max_retries=5), _call)
        shared = self._in_thread(ray.put, function)  # once per node, not once per task
        waiting = iter(tasks)
        running: list[Any] = []
        try:
            while True:
                room = max(0, self._in_thread(self._limit) - len(running))
                running += [self._in_thread(remote.remote, shared, task, folder) for task in islice(waiting, room)]
                if not running:
                    return
                done, running = self._in_thread(ray.wait, running, timeout=_POLL)
                for result, error in self._in_thread(ray.get, done):
                    if error is not None:
                        raise error
                    yield result
        except self._lost as error:
            raise WorkerDied(
                f"a Ray task was lost repeatedly ({type(error).__name__}), perhaps because memory ran out; use fewer "
                "`workers` and run again, completed work is reused"
            ) from error
        finally:
            # Tasks of an own connection end with the connection, and cancelling them can abort the driver.
            if not self._owns_connection:
                for task in running:
                    self._in_thread(ray.cancel, task)

    def close(self) -> None:
        """Disconnect, unless the caller had connected; this ends the tasks, and a cluster that this engine started."""
        if self._owns_connection:
            self._in_thread(self._ray.shutdown)
        self._thread.shutdown()

    def _in_thread(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call Ray in a separate thread, because a signal handler that raises inside its C++ code can abort Python."""
        return self._thread.submit(call, *arguments, **options).result()

    def _limit(self) -> int:
        """Maximum number of submitted tasks, from the cores that the cluster has now."""
        return self._tasks or _TASKS_PER_CORE * int(self._ray.cluster_resources().get("CPU", 1))


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler after the block, because Ray installs a handler that exits silently."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _call(function: Callable[[Any], Any], task: Any, folder: str) -> tuple[Any, Exception | None]:
    """Run a task in the driver's working directory; return errors of this package and of the disk as values."""
    # Ray wraps exceptions in RayTaskError, whose text is a traceback: returned values keep the one-line message.
    if os.path.isdir(folder):
        os.chdir(folder)
    use_one_thread()
    gc.set_threshold(100_000)
    try:
        return function(task), None
    except (EnergonPackedError, OSError) as error:
        return None, error
    except MemoryError:
        return None, WorkerDied(out_of_memory(f"Ray worker process {os.getpid()}", label(task)))
