"""Worker processes of torch's DataLoader: their death, and a batch that does not come, as one-line errors.

Torch (all releases until 2.13, `torch/utils/data/_utils/signal_handling.py`) raises the death of a worker in its
handler of SIGCHLD, wherever the main process is: in a training step, or while a checkpoint is written. No argument of
the DataLoader changes that. So torch knows the process ids of the workers only while the main process waits for a
batch. There the handler is needed: a worker that dies while it writes leaves a part of a message in the pipe, and
nothing else ends the read of the rest. `tests/loading/test_workers.py` fails if torch no longer raises in a training
step.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from queue import Empty
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling

from energon_packed.errors import WorkerError
from energon_packed.libraries import private
from energon_packed.system import ending

_CRASHED = "out of memory, or a crash. Use fewer workers, or `num_workers=0` to see the cause"
_REMEDIES = {  # by exit code
    -signal.SIGKILL: "out of memory (see dmesg). Use fewer workers, a smaller `prefetch_factor` or "
    "`shuffle_buffer_size`, or more memory",
    -signal.SIGBUS: "shared memory is full, or an input file was truncated while it was read. Enlarge /dev/shm, or "
    "use fewer workers",
}
_RESUME = "then resume from the last saved state in a new loader."
_END_SECONDS = 5.0  # for a process to end: the kernel closes its connections before that
_Workers = private(dataloader, "_MultiProcessingDataLoaderIter", "torch")
private(_Workers, "_reset", "torch")  # WatchedWorkers overrides it, and DataflowLoader the next
private(dataloader.DataLoader, "_get_iterator", "torch")


class WatchedWorkers(_Workers):  # type: ignore[misc, valid-type]
    """torch's iterator over the batches of worker processes, which are watched while the main process waits for them.

    The method `_get_iterator` of a DataLoader creates it. Messages name the class of the loader.

    Raises:
        WorkerError: a worker ended with an error or before its last batch, or the `timeout` of the loader is over.
    """

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # at the start of workers, and of each epoch
        self._loader = type(loader).__name__
        with _watching(self, self._loader, loader.timeout):
            super()._reset(loader, first_iter)

    def __next__(self) -> Any:
        with _watching(self, self._loader, self._timeout):
            return super().__next__()


@contextmanager
def _watching(batches: Any, loader: str, timeout: float) -> Iterator[None]:
    """Context manager of a block that waits for workers; if one died, or no batch comes, the others are killed.

    Args:
        batches: iterator of torch's DataLoader, with worker processes.
        loader: name of the loader in messages.
        timeout: of the DataLoader, in seconds; 0 waits as long as the workers run.

    Raises:
        WorkerError: a worker ended with an error or before its last batch, or the time is over.
        Exception: another error of the block.
    """
    workers: Sequence[Any] = private(batches, "_workers", "torch")
    lost, cause, start = None, None, time.monotonic()
    try:
        try:
            _set_known(batches, workers)
            # A worker that died before may have left a part of a message, whose rest the block would wait for.
            if (lost := _death(workers, loader)) is None:
                yield
        finally:
            _set_known(batches, ())
    except Exception as error:
        if isinstance(error, OSError | EOFError):  # the broken connection may be noticed before the death
            ending_now = wait([worker.sentinel for worker in workers if worker.is_alive()], timeout=_END_SECONDS)
            for worker in workers:
                if worker.sentinel in ending_now:
                    worker.join(_END_SECONDS)
        lost, cause = _death(workers, loader), error
        if lost is None and isinstance(error.__cause__, Empty):  # torch waits for a batch of a worker that has ended
            lost = WorkerError(f"a worker process of {loader} {ending(0)}: {_CRASHED}, {_RESUME}")
        if lost is None and isinstance(error, RuntimeError) and 0 < timeout <= time.monotonic() - start:
            lost = WorkerError(
                f"{loader} timed out after {timeout:g} seconds (`timeout`) waiting for a batch: storage hangs, or "
                f"samples are slow. Check the storage or raise `timeout`, {_RESUME}"
            )
        if lost is None:
            raise
    if lost is not None:
        _kill(workers)
        raise lost from cause


def _death(workers: Sequence[Any], loader: str) -> WorkerError | None:
    """Return the error for the first worker that ended with an error; None if there is none."""
    dead = next((worker for worker in workers if worker.exitcode), None)  # None while it runs
    if dead is None:
        return None
    remedy = _REMEDIES.get(dead.exitcode, _CRASHED)
    return WorkerError(f"a worker process of {loader} (pid {dead.pid}) {ending(dead.exitcode)}: {remedy}, {_RESUME}")


def _kill(workers: Sequence[Any]) -> None:
    """Kill the workers: a worker that hangs in a read does not answer torch, and Python waits for it when it exits."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_END_SECONDS)


def _set_known(batches: Any, workers: Sequence[Any]) -> None:
    """Set the workers of an iterator for whose death torch's handler of SIGCHLD raises."""
    if private(batches, "_worker_pids_set", "torch"):  # False after torch ended its workers itself
        private(signal_handling, "_remove_worker_pids", "torch")(id(batches))
        batches._worker_pids_set = False
    if workers:
        private(signal_handling, "_set_worker_pids", "torch")(id(batches), tuple(worker.pid for worker in workers))
        batches._worker_pids_set = True
