"""Files that are written atomically (a temporary file, fsync, rename), and files that a process keeps open."""

import contextlib
import errno
import itertools
import os
import socket
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from energon_packed.foreign import open_regular
from energon_packed.system import most_open

_MOST_OPEN = 128  # files of all readers; the usual limit of descriptors is 1024
_numbers = itertools.count()
_open: OrderedDict[tuple[int, Path], BinaryIO] = OrderedDict()
_process = os.getpid()
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


class Streams:
    """The open files of one reader, each opened on first use; those used longest ago are closed."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        weakref.finalize(self, _forget, self._number)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, path: Path) -> BinaryIO:
        """The open file.

        Raises:
            OSError, IrregularFile: as `open_regular`.
        """
        global _process
        if _process != os.getpid():  # after a fork: the same open files would share positions with the parent
            _open.clear()
            _process = os.getpid()
        key = (self._number, path)
        # Taken out and put back, since another thread may put it out of use meanwhile; this name keeps it open.
        stream = _open.pop(key, None) or open_regular(path)
        _open[key] = stream
        while len(_open) > most_open(_MOST_OPEN):
            _open.popitem(last=False)  # closed when no thread reads it any more
        return stream


def _forget(number: int) -> None:
    for key in [key for key in _open if key[0] == number]:
        _open.pop(key, None)
