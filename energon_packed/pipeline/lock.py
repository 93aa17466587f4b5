"""FolderLock: one run at a time in an output folder, on one host or on several that share a disk."""

import contextlib
import os
import socket
from pathlib import Path
from types import TracebackType

import orjson
from filelock import BaseFileLock, FileLock, Timeout

from energon_packed.errors import ConfigError
from energon_packed.files import named
from energon_packed.foreign import open_regular

_LOCK = "lock"
_OWNER = "owner.json"
_PATIENCE = 1.0  # seconds: workers of a run that was killed just now hold the lock until they have ended


class FolderLock:
    """Holds `folder/.work/lock` while its block runs.

    The operating system releases the lock when its process ends, however it ends. `owner.json` beside it names the
    holder, for the message of whoever finds the folder locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._work = folder / ".work"
        self._lock = _file_lock(self._work / _LOCK)
        self._ours = orjson.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        self._made: list[Path] = []

    def __enter__(self) -> "FolderLock":
        """Take the lock.

        Raises:
            ConfigError: it is a file, or another run holds it; the message names its host and process.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"`output_dir` {self.folder} is a file; pass a folder")
        self._made = [folder for folder in (self._work, self.folder) if not folder.exists()]
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._acquire()
            if not (self._work / _OWNER).is_file():  # writing to a FIFO would wait for a reader
                (self._work / _OWNER).unlink(missing_ok=True)
            (self._work / _OWNER).write_bytes(self._ours)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            if isinstance(error, OSError):
                raise named(error, self._work / _OWNER) from error
            raise
        return self

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=_PATIENCE)
        except Timeout as error:
            raise ConfigError(
                f"{self.folder} is being written by {self._owner()}; wait for it to end, or use another `output_dir`"
            ) from error
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:  # the file cannot be opened
                raise
            raise ConfigError(
                f"the file system of {self.folder} has no file locks: {error}; use another `output_dir`"
            ) from error

    def check(self) -> None:
        """Refuse to continue where the folder was removed, or removed and made again by another run.

        Raises:
            ConfigError: it is not the one that was locked.
        """
        try:
            if (self._work / _OWNER).read_bytes() == self._ours:
                return
        except FileNotFoundError:
            pass
        raise ConfigError(
            f"`output_dir` {self.folder} was removed or replaced while the run wrote there; nothing else of it may be "
            "used: remove what is left of it, and run again"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._free()
        except KeyboardInterrupt:  # it comes once: nothing may be left
            self._free()
            raise

    def _free(self) -> None:
        own = {_LOCK} if self._lock.is_locked else set()
        if own:
            with contextlib.suppress(OSError):
                (self._work / _OWNER).unlink()
        with contextlib.suppress(OSError):
            self._lock.release()
        # A run that wrote nothing leaves no folder behind.
        with contextlib.suppress(OSError):
            if self._work in self._made and {path.name for path in self._work.iterdir()} <= own:
                (self._work / _LOCK).unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def _owner(self) -> str:
        return _holder(self._work)


def lock_holder(folder: Path) -> str | None:
    """`process 12 on host` that writes in a folder, or None. Nothing is written."""
    work = folder / ".work"
    if not (work / _LOCK).is_file():
        return None
    lock = _file_lock(work / _LOCK)
    try:
        with lock.acquire(timeout=0):
            return None
    except Timeout:
        return _holder(work)
    except (NotImplementedError, OSError):  # no locks here, or a folder of someone else
        return None


def _file_lock(path: Path) -> BaseFileLock:
    """A lock of the operating system, never a file that a killed run would leave behind as its lock."""
    return FileLock(path, thread_local=False, fallback_to_soft=False)


def _holder(work: Path) -> str:
    try:
        with open_regular(work / _OWNER) as stream:
            value = orjson.loads(stream.read())
        return f"process {value['pid']} on {value['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
