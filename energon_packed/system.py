"""What the operating system refuses, in one line with the remedy; and how many files a process may hold open."""

import errno
import os

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
_OF_THE_DISK = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EINTR, errno.EAGAIN, errno.EBUSY)


def available_cores() -> int:
    """Cores that this process may run on; on systems that cannot tell (macOS), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def described(error: OSError) -> str:
    """`file: what failed; remedy` in one line, for a message to the user."""
    what = f"{error.filename or 'input or output'}: {error.strerror or error}"
    remedy = remedy_of(error)
    return f"{what}; {remedy}" if remedy else what


def remedy_of(error: OSError) -> str:
    """What to do about an error of the operating system, with the limit that was reached; "" where it is not known."""
    if error.errno == errno.EMFILE:
        return f"this process may open {_open_files()} files; raise the limit, such as by ulimit -n 4096, {_AGAIN}"
    if error.errno == errno.EFBIG:
        return f"the limit of a file is {_file_bytes()} bytes; raise it, such as by ulimit -f unlimited, {_AGAIN}"
    if error.errno in _OF_THE_DISK:
        return f"check the disk or the file server, {_AGAIN}"
    return _REMEDIES.get(error.errno or 0, "")


def most_open(wanted: int) -> int:
    """How many files a cache may hold open: `wanted`, or less where the process may open few (`ulimit -n`).

    A cache takes an eighth of the limit at most, and one file at least.
    """
    return max(1, min(wanted, _open_files() // 8))


def _open_files() -> int:
    if os.name != "posix":
        return 512
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def _file_bytes() -> int | str:
    if os.name != "posix":
        return "unknown"
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else limit
