"""Files that appear under their final name only when they are whole: write aside, fsync, rename."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def aside_name(path: Path) -> Path:
    """A name beside `path` that no other process gives: hosts that share a disk may share process numbers."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; renamed to it when the block ends without an error."""
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
    """The error with the file that was written, where it names none: a full disk."""
    return error if error.filename or error.errno is None else OSError(error.errno, error.strerror, str(path))


def rename_whole(temporary: Path, path: Path) -> None:
    """Give a finished, synced file its name, and sync the folder, so that the name survives a power cut too."""
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file at once."""
    with aside(path) as temporary:
        temporary.write_bytes(content)
