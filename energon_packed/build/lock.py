"""FolderLock: one run at a time in an output folder, on one host or on many that share a disk."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType

import orjson

from energon_packed.errors import ConfigError

_NAME = ".energon-packed.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_GRACE = 2.0  # seconds in which the maker of an empty lock file may still write its name
_ours: set[Path] = set()  # locks of this process: POSIX locks do not keep it from itself


class FolderLock:
    """Holds `folder/.energon-packed.lock` while its block runs.

    The file is locked with POSIX record locks (`fcntl(2)`), which end with the process that holds them, and says which
    host and process that is. Some network file systems do not show such locks to other hosts: there the content alone
    counts, and what a killed run has left must be deleted by hand.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _NAME
        self._real = folder.resolve() / _NAME
        self._file: int | None = None
        self._made_folder = False

    def __enter__(self) -> "FolderLock":
        """Take the lock.

        Raises:
            ConfigError: another run holds it; the message names its host and process.
        """
        if self._real in _ours:
            raise self._busy(os.getpid(), socket.gethostname())
        self._made_folder = not self.path.parent.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            self._file = self._take()
        _ours.add(self._real)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._file)
        self._file = None
        _ours.discard(self._real)
        if self._made_folder:
            with contextlib.suppress(OSError):  # it holds something now
                self.path.parent.rmdir()

    def _take(self) -> int | None:
        """The locked file with our name in it; None when its last holder has just deleted it."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            is_new = True
        except FileExistsError:
            try:
                file = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                return None
            is_new = False
        try:
            self._check(file, is_new)
            mine = orjson.dumps({"host": socket.gethostname(), "pid": os.getpid()})
            os.ftruncate(file, 0)
            os.pwrite(file, mine, 0)
            os.fsync(file)
            if os.fstat(file).st_nlink and os.pread(file, 4096, 0) == mine:
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    def _check(self, file: int, is_new: bool) -> None:
        """Raise where somebody else holds it."""
        visible = True
        held = False
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = error.errno in _HELD
            visible = held  # anything else: this file system has no locks
        host, pid = _holder(file)
        if host is None and not is_new and not held:  # made a moment ago, or by a run that was killed at once
            time.sleep(_GRACE)
            host, pid = _holder(file)
        if held:
            raise self._busy(pid, host)
        if host is None or pid is None:
            return
        if host != socket.gethostname():
            raise ConfigError(
                f"{self.path.parent} is locked by process {pid} on {host}; wait for it to end. If no such process "
                f"runs there any more, it was killed: delete {self.path} and run again, what is done is kept"
            )
        if not visible and pid != os.getpid() and _is_alive(pid):
            raise self._busy(pid, host)

    def _busy(self, pid: int | None, host: str | None) -> ConfigError:
        return ConfigError(
            f"{self.path.parent} is being written by process {pid} on {host}; wait for it to end, or use another "
            "--output-dir"
        )


def _holder(file: int) -> tuple[str | None, int | None]:
    try:
        value = orjson.loads(os.pread(file, 4096, 0) or b"{}")
        return value.get("host"), value.get("pid")
    except (orjson.JSONDecodeError, AttributeError):
        return None, None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
