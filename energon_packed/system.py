"""Limits of the operating system, and limits for code that may allocate or compute without end.

| function | input and output |
|---|---|
| described, remedy_of | an OSError to a one-line message with the remedy |
| resource_error, raise_resource_error | an exception to a ResourceError, if the data is not the cause |
| most_open | the number of files that a cache wants to keep open to the number that `ulimit -n` affords |
| ending | the exit code of a process to words |
| call_in_child | a function to its result, from a process that can be killed |
| memory_limit | a block of code, whose allocations are limited |
| announced | a block of code that may take long, to a log message |
| no_collecting | a block of code that makes many objects and no garbage, to the same block in less time |
"""

import errno
import gc
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from energon_packed.errors import ResourceError

_AGAIN = "then run the same command again"
_REMEDIES = {
    errno.ENOSPC: f"free some space, or use a folder on another disk, {_AGAIN}",
    errno.EDQUOT: f"delete files of yours, or use a folder on another disk, {_AGAIN}",
    errno.EROFS: "use a folder that can be written",
    errno.EACCES: "check its owner and mode, or use another folder",
    errno.EPERM: "check its owner and mode, or use another folder",
    errno.ENFILE: f"close other programs, or raise fs.file-max, {_AGAIN}",
    errno.ENOMEM: f"use fewer processes (`workers`) or give them more memory, {_AGAIN}",
    errno.EXDEV: "folder and files must be in one file system; use a folder without mounts inside",
    errno.ENOLCK: "use a folder on a file system with file locks",
}
# Network file systems report a lost server with these codes: the remedy is the same as for a bad disk.
_DISK_ERRORS = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EBADMSG),
    *(getattr(errno, name) for name in ("EREMOTEIO", "EUCLEAN") if hasattr(errno, name)),  # of Linux
)
ABSENT = (
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR),
    *(errno.EINVAL, errno.EILSEQ),  # the file system cannot store such a name
)
"""Errors of `open` that mean that there is no file of that name."""
NOTICE = 25
"""Log level of steps that take long, between INFO and WARNING: the command line prints them on a terminal."""
_log = logging.getLogger(__name__)
_statm: dict[int, int] = {}  # process id -> its /proc/self/statm, kept open: opening it is as slow as rendering


@contextmanager
def announced(step: str, *, after: float = 1.0) -> Iterator[None]:
    """Log a step at level NOTICE if it runs for longer than `after` seconds: a context manager and a decorator.

    Args:
        step: the work, such as `loading the tokenizer`.
        after: seconds.
    """
    if not _log.isEnabledFor(NOTICE):
        yield
        return
    timer = threading.Timer(after, _log.log, (NOTICE, "%s ...", step))
    timer.daemon = True  # an error that ends the process must not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def no_collecting() -> Iterator[None]:
    """Pause Python's garbage collector: records and imports make many objects, and each search walks them all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def available_cores() -> int:
    """Cores that this process may run on; all cores if the system has no CPU affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):  # containers and SLURM restrict the affinity, which os.cpu_count ignores
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resource_error(error: BaseException, place: object) -> ResourceError | None:
    """Convert an error of reading data, if memory or the operating system is its cause; return None if the data is.

    Libraries report damaged data with an OSError, too, but without an `errno` that has a remedy.

    Args:
        error: the error.
        place: file that was read, or the code that read it.
    """
    if isinstance(error, ResourceError):
        return error
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, "memory ran out")
    if not isinstance(error, OSError) or not (remedy := remedy_of(error)):
        return None
    return ResourceError(f"{place}: {error.strerror}; {remedy}")


def raise_resource_error(error: BaseException, place: object) -> None:
    """Raise the `resource_error` of an error, if it has one.

    Raises:
        ResourceError: memory or the operating system is the cause.
    """
    if (converted := resource_error(error, place)) is not None:
        # A ResourceError stays as it is: as its own cause, it would be an endless chain.
        raise converted from (error if converted is not error else error.__cause__)


def described(error: OSError) -> str:
    """Describe an error in one line for the user: `file: failure; remedy`."""
    if isinstance(error, ResourceError):  # of an object store, with its own remedy
        return str(error)
    failure = f"{error.filename or 'input or output'}: {error.strerror or error}"
    remedy = remedy_of(error)
    return f"{failure}; {remedy}" if remedy else failure


def remedy_of(error: OSError) -> str:
    """Remedy for an error of the operating system, with the limit that was reached; "" if no remedy is known."""
    if error.errno == errno.EMFILE:
        return f"this process may open {_open_files()} files; raise the limit, such as by ulimit -n 4096, {_AGAIN}"
    if error.errno == errno.EFBIG:
        return f"the limit of a file is {_file_bytes()} bytes; raise it, such as by ulimit -f unlimited, {_AGAIN}"
    if error.errno in _DISK_ERRORS:
        return f"check the disk or the file server, {_AGAIN}"
    return _REMEDIES.get(error.errno or 0, "")


def most_open(wanted: int) -> int:
    """Number of files that a cache may keep open: `wanted`, or less if the process may open few (`ulimit -n`).

    The result is at most an eighth of the limit, and at least 1.
    """
    # An eighth: a process has several caches at once (tars, tokens, converted copies), pipes and libraries beside.
    return max(1, min(wanted, _open_files() // 8))


def _open_files() -> int:
    if os.name != "posix":
        return 512  # limit of the C runtime of Windows
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def _file_bytes() -> int | str:
    if os.name != "posix":
        return "unknown"
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else limit


def ending(exitcode: int) -> str:
    """Describe the end of a process for messages: `was killed by signal 9 (SIGKILL)`, or `ended with exit code 1`.

    Args:
        exitcode: of `multiprocessing.Process`: -N if signal N ended the process.
    """
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"was killed by signal {number} ({name})"


def call_in_child(function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
    """Return `function(*arguments)` of a forked process: memory and threads that it needs stay in that process.

    Args:
        function: its result must be pickleable.
        seconds: wall-clock time after which the process is killed; None waits as long as it runs.

    Raises:
        ChildProcessError: the process ended without a result; the message is its `ending`.
        TimeoutError: it was killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError
        return receiver.recv()
    except EOFError:
        child.join()
        raise ChildProcessError(ending(child.exitcode or 0)) from None
    finally:
        receiver.close()
        child.kill()  # also after the result: exit code of libraries may wait for threads that a fork does not have
        child.join()


def _send_result(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sender.send(function(*arguments))


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Let the code in the block allocate at most `size` bytes; then Python raises MemoryError.

    The limit (RLIMIT_DATA of Linux) is of all threads. It is set in worker processes, and in processes with a single
    Python thread: a limit would also end the allocations of other threads, such as a checkpoint that is being saved.
    """
    is_alone = multiprocessing.current_process().daemon or threading.active_count() == 1
    if sys.platform != "linux" or not is_alone:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if (process := os.getpid()) not in _statm:
        _statm[process] = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    most = int(os.pread(_statm[process], 200, 0).split()[5]) * mmap.PAGESIZE + size
    if soft == resource.RLIM_INFINITY or soft > most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
