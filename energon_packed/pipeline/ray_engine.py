"""RayEngine: tasks on the machines of a Ray cluster that share a disk."""

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
from energon_packed.pipeline.engine import ONE_THREAD, Engine, WorkerDied, label, out_of_memory

Task = TypeVar("Task")
Result = TypeVar("Result")
_AHEAD = 2  # tasks per core that wait or run
_PATIENCE = 0.5  # seconds until an interrupted driver stops to wait for a task


class RayEngine(Engine):
    """Ray tasks, one core each.

    Every node must see the same paths, and have this package installed. Tasks write files under their final name only
    when they are complete, and the same bytes each time: one that was lost with its node runs again elsewhere, and
    what it had finished is replaced by identical files.

    Args:
        address: of the cluster, as `ray.init` takes it; None for the running one, or else one on this machine.
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
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._connect(address)

    def _connect(self, address: str | None) -> None:
        ray = self._ray
        options = {"log_to_driver": False, "logging_level": "warning", "configure_logging": False}
        with _own_sigterm():
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
        """Results as they come.

        Raises:
            WorkerDied: a task was lost with its process or node repeatedly.
        """
        ray, folder = self._ray, os.getcwd()
        remote = self._apart(ray.remote(num_cpus=1, max_retries=5), _call)
        shared = self._apart(ray.put, function)
        waiting = iter(tasks)
        running: list[Any] = []
        try:
            while True:
                room = max(0, self._apart(self._limit) - len(running))
                running += [self._apart(remote.remote, shared, task, folder) for task in islice(waiting, room)]
                if not running:
                    return
                done, running = self._apart(ray.wait, running, timeout=_PATIENCE)
                for result, error in self._apart(ray.get, done):
                    if error is not None:
                        raise error
                    yield result
        except self._lost as error:
            raise WorkerDied(
                f"a Ray task was lost repeatedly ({type(error).__name__}), perhaps because memory ran out; use fewer "
                "`workers` and run again, completed work is reused"
            ) from error
        finally:
            if not self._is_ours:  # ours end with the connection; cancelling them can abort the driver
                for task in running:
                    self._apart(ray.cancel, task)

    def close(self) -> None:
        """Leave the cluster, unless the caller had joined it; it ends our tasks, or itself where it is ours."""
        if self._is_ours:
            self._apart(self._ray.shutdown)
        self._thread.shutdown()

    def _apart(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call Ray in a thread of its own: a signal that is raised inside its compiled code can abort the process."""
        return self._thread.submit(call, *arguments, **options).result()

    def _limit(self) -> int:
        """Tasks to hand out, from the cores that the cluster has now."""
        cores = self._tasks or int(self._ray.cluster_resources().get("CPU", 1))
        return cores if self._tasks else _AHEAD * cores


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM by one that exits without a word; the one from before comes back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _call(function: Callable[[Any], Any], task: Any, folder: str) -> tuple[Any, Exception | None]:
    """Run a task where the driver's relative paths are right; errors of ours and of the disk come back as values."""
    if os.path.isdir(folder):
        os.chdir(folder)
    os.environ.update(ONE_THREAD)
    gc.set_threshold(100_000)
    try:
        return function(task), None
    except (EnergonPackedError, OSError) as error:
        return None, error
    except MemoryError:
        return None, WorkerDied(out_of_memory(f"Ray worker process {os.getpid()}", label(task)))
