"""Limits of the operating system.

Input: an exception, or the number of files that a cache wants to keep open. Output: a one-line message with the
remedy, a ResourceError if the data is not the cause, or the number of files that this process can afford
(`ulimit -n`).
"""

import errno
import os

from energon_packed.errors import ResourceError

_AGAIN = "then run the same command again: completed work is reused"
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
        raise converted from error


def described(error: OSError) -> str:
    """Describe an error in one line for the user: `file: failure; remedy`."""
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
