"""Atomic file writes: write to a temporary file, fsync, rename."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)


def aside_name(path: Path) -> Path:
    """Unique temporary name next to `path`; with the host name, since hosts that share a disk may share PIDs."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds."""
    temporary = aside_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        rename_whole(temporary, path)
    except OSError as error:
        raise named(error, path) from error
    finally:
        remove(temporary)


def named(error: OSError, path: Path) -> OSError:
    """An error of the temporary file as one of `path`, with the text of the operating system.

    Errors of a full disk name no file, and those of pyarrow have another text.
    """
    if error.filename is not None and os.fspath(error.filename) != str(aside_name(path)):
        return error
    text = str(error) if error.errno is None else os.strerror(error.errno)
    return OSError(error.errno or errno.EIO, text, str(path))


def remove(temporary: Path) -> None:
    """Remove a temporary file, where the disk still obeys: what failed before is what the user must read."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def rename_whole(temporary: Path, path: Path) -> None:
    """Rename a finished, synced file and sync the folder, so that the rename survives a power failure.

    File systems that cannot sync a folder (CIFS and some of FUSE) say so by an error, which is no failure.
    """
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with aside(path) as temporary:
        temporary.write_bytes(content)
