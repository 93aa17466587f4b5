"""Errors of worker processes under torch's DataLoader: one line that says what happened, and what to do.

Torch raises `DataLoader worker (pid 7) is killed by signal: Killed.` and `DataLoader timed out after 9 seconds`, and
turns an error of a worker into its whole traceback.
"""

import contextlib
import re
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling

from energon_packed import errors
from energon_packed.errors import EnergonPackedError, Reason, RecordError, WorkerError

_DEAD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: [^.]+|exited unexpectedly)")
_SLOW = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
_CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")
_OURS = re.compile(r"^energon_packed\.errors\.(\w+): (.*)$", re.M)
_RECORD = re.compile(r"(\w+): (.*)")
_SIGNALS = {
    "Killed": "the system kills what takes too much memory (dmesg tells): use fewer workers, a smaller "
    "`prefetch_factor` or `shuffle_buffer_size`, or more memory",
    "Bus error": "shared memory is full, or an input file was truncated while it was read: enlarge /dev/shm, or use "
    "fewer workers",
}
_CRASHED = "too little memory, or a crash: use fewer workers, or `num_workers=0` to see why"
_RESUME = "the state that was saved last is good: load it in a new loader"


def in_one_line(error: BaseException, loader: str) -> EnergonPackedError | None:
    """The error of a worker as one line; None for what is none.

    Args:
        error: what torch raised.
        loader: what to call the loader.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and (found := _DEAD.search(text)):
        remedy = next((remedy for name, remedy in _SIGNALS.items() if found[2].endswith(name)), _CRASHED)
        return WorkerError(f"a worker process of {loader} (pid {found[1]}) {found[2]}: {remedy}; {_RESUME}")
    if isinstance(error, RuntimeError) and (found := _SLOW.search(text)):
        return WorkerError(
            f"{loader} got no batch for {found[1]} seconds, its `timeout`: a file system that hangs, or samples that "
            f"take longer; check the storage, or raise `timeout`; {_RESUME}"
        )
    if _CAUGHT.match(text) and (lines := _OURS.findall(text)):
        name, message = lines[-1]
        if name == "RecordError" and (found := _RECORD.fullmatch(message)):
            return RecordError(Reason(found[1]), found[2])
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    return None


def lost_worker(error: BaseException, loader: str, batches: Any) -> WorkerError | None:
    """The error of a connection to a worker that died, as which torch may notice it first; None for what is none."""
    workers = getattr(batches, "_workers", None)
    if not workers or not isinstance(error, OSError | EOFError):
        return None
    ending = wait([worker.sentinel for worker in workers], timeout=5)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(timeout=5)  # the kernel closes connections and sentinel before the process has ended
    dead = dead_workers(batches)
    if not dead:
        return None
    return WorkerError(
        f"a worker process of {loader} (pid {dead[0]}) exited unexpectedly ({type(error).__name__}): "
        f"{_CRASHED}; {_RESUME}"
    )


def watched(batches: Iterator[Any], loader: str) -> Iterator[Any]:
    """What an iterator of torch's DataLoader gives; after the death of a worker, the others are ended.

    Raises:
        EnergonPackedError: of a worker, or its death, in one line.
        Exception: what else the iterator raised.
    """
    try:
        yield from batches
    except Exception as error:
        found = in_one_line(error, loader) or lost_worker(error, loader, batches)
        if found is None:
            raise
        if isinstance(found, WorkerError):
            end_workers(batches)
        raise found from error


def end_workers(batches: Any) -> None:
    """Kill the workers of an iterator of torch's DataLoader: one that hangs in a read ends at nothing less.

    Torch asks them to end, and Python waits for them when the process exits.
    """
    workers = getattr(batches, "_workers", None)
    if not workers:
        return
    if getattr(batches, "_worker_pids_set", False):  # or torch would raise that they died
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False
    for worker in workers:
        worker.kill()
    with contextlib.suppress(Exception):  # whatever is left of queues and threads
        batches._shutdown_workers()


def dead_workers(batches: Any) -> list[int]:
    """Process ids of the workers of an iterator of torch's DataLoader that ended."""
    return [worker.pid for worker in getattr(batches, "_workers", ()) if not worker.is_alive()]
