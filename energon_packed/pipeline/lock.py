"""FolderLock: one run at a time in an output folder, on one host or on several that share a disk."""

import contextlib
import os
import socket
from pathlib import Path
from types import TracebackType

import orjson
from filelock import FileLock, Timeout

from energon_packed.errors import ConfigError

_LOCK = "lock"
_OWNER = "owner.json"


class FolderLock:
    """Holds `folder/.work/lock` while its block runs.

    The operating system releases the lock when its process ends, however it ends. `owner.json` beside it names the
    holder, for the message of whoever finds the folder locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._work = folder / ".work"
        self._lock = FileLock(self._work / _LOCK, thread_local=False)

    def __enter__(self) -> "FolderLock":
        """Take the lock.

        Raises:
            ConfigError: another run holds it; the message names its host and process.
        """
        made = [folder for folder in (self._work, self.folder) if not folder.exists()]
        self._work.mkdir(parents=True, exist_ok=True)
        self._made = made
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f"{self.folder} is being written by {self._owner()}; wait for it to end, or use another `output_dir`"
            ) from error
        except NotImplementedError as error:
            raise ConfigError(
                f"the file system of {self.folder} has no file locks: {error}; use another `output_dir`"
            ) from error
        (self._work / _OWNER).write_bytes(orjson.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            (self._work / _OWNER).unlink()
        self._lock.release()
        # A run that wrote nothing leaves no folder behind.
        with contextlib.suppress(OSError):
            if self._made and {path.name for path in self._work.iterdir()} <= {_LOCK}:
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
    lock = FileLock(work / _LOCK, thread_local=False)
    try:
        with lock.acquire(timeout=0):
            return None
    except Timeout:
        return _holder(work)
    except (NotImplementedError, OSError):  # no locks here, or a folder of someone else
        return None


def _holder(work: Path) -> str:
    try:
        value = orjson.loads((work / _OWNER).read_bytes())
        return f"process {value['pid']} on {value['host']}"
    except (OSError, orjson.JSONDecodeError, KeyError):
        return "another process"
