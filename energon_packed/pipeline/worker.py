"""A worker process: it takes tasks from a pipe and answers each with a result, or with the error that it raised."""

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from energon_packed.errors import EnergonPackedError

_PR_SET_PDEATHSIG = 1  # prctl(2)
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}
"""Environment of a worker: tokenizers start no threads, because there is one process a core already."""
_REMEDY = "use fewer `workers`, or give the run more memory, and run it again: completed work is reused"


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
