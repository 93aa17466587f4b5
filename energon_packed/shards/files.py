"""Atomic file writes: write to a temporary file, fsync, rename."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def aside_name(path: Path) -> Path:
    """Unique temporary name next to `path`; with the host name, since hosts that share a disk may share PIDs."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = aside_name(path)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        rename_whole(temporary, path)
    except OSError as error:
        raise named(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def named(error: OSError, path: Path) -> OSError:
    """Add the file name to an error without one, such as a full disk."""
    return error if error.filename or error.errno is None else OSError(error.errno, error.strerror, str(path))


def rename_whole(temporary: Path, path: Path) -> None:
    """Rename a finished, synced file and sync the folder, so that the rename survives a power failure."""
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with aside(path) as temporary:
        temporary.write_bytes(content)
