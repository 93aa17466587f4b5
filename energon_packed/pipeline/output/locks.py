"""The lock of an output folder: one run at a time writes there.

Input: the output folder and the folder of its restart state. Output: a ConfigError if another run has the lock. The
operating system has the lock of a local folder; in an object store, `StoreClaim` also keeps other machines away.
"""

import contextlib
import logging
import os
import secrets
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
from filelock import BaseFileLock, FileLock, Timeout

from energon_packed.errors import ConfigError
from energon_packed.files import atomic_write, error_of_path
from energon_packed.pipeline.output.folder import read_json_object, work_folder
from energon_packed.storage import RemotePath, StorageError, is_remote

_log = logging.getLogger(__name__)
_LOCK = "lock"
_OWNER = "owner.json"
_TOKEN = "token"
_LOCK_TIMEOUT = 1.0  # seconds; after a run was killed, its forked workers keep the lock until they have ended


class StoreClaim:
    """The object `.work/owner.json` of an output folder in an object store: it names the run that writes there.

    It has the token of the restart state, so that a run that was killed continues.

    Args:
        folder: the output folder.
        work: local folder of the restart state.
        owner: host and process id of this run.
    """

    def __init__(self, folder: RemotePath, work: Path, owner: dict[str, Any]) -> None:
        self._folder = folder
        self._object = folder / ".work" / _OWNER
        self._token = work / _TOKEN
        self._owner = owner
        self._content: bytes | None = None  # of the object, if it may be of this run

    def make(self, *, overwrite: bool) -> None:
        """Write the object.

        Args:
            overwrite: replace the object of the run that owns the folder.

        Raises:
            ConfigError: the folder belongs to another run.
            StorageError: the object store cannot be read or written.
        """
        if not self._token.is_file():
            atomic_write(self._token, secrets.token_hex(16).encode())
        token = self._token.read_text()
        self._content = orjson.dumps({**self._owner, "token": token})  # before the request: its answer may be lost
        if not self._object.create(self._content):
            other = read_json_object(self._object)
            if not overwrite and other and other.get("token") != token:
                self._content = None
                raise ConfigError(
                    f"{self._folder} belongs to {_named(other)}, which writes there or was killed; wait for it to "
                    "end, run its command again on that host, or set `overwrite` if it was killed"
                )
            self._object.write_bytes(self._content)
        try:
            for name in ("webdataset", "media", "media-index"):  # other folders below may belong to other runs
                (self._folder / name).abort_uploads()
        except StorageError as error:  # a separate permission, which packing does not need
            _log.info("uploads of killed runs are not aborted: %s", error)

    def is_valid(self) -> bool:
        """Return whether the object still names this run."""
        try:
            return self._content is not None and self._object.read_bytes() == self._content
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Delete the object, if it is of this run, and the token."""
        if self.is_valid():
            self._object.unlink()
            self._token.unlink(missing_ok=True)


class FolderLock:
    """Context manager that locks an output folder, by the file `lock` in the folder of its restart state.

    The operating system releases the lock when the process ends, however it ends. `owner.json` beside the lock names
    the process, for the error message of another run.

    Args:
        folder: the output folder.
        work: local folder of the restart state.
        overwrite: claim an object store from the run that owns it.
    """

    def __init__(self, folder: Path, work: Path, *, overwrite: bool = False) -> None:
        self.folder = folder
        self._work = work
        self._lock = _file_lock(work / _LOCK)
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        self._owner = orjson.dumps(owner)
        self._claim = StoreClaim(folder, work, owner) if isinstance(folder, RemotePath) else None
        self._overwrite = overwrite
        self._created: list[Path] = []

    def __enter__(self) -> "FolderLock":
        """Acquire the lock.

        Raises:
            ConfigError: the folder is a file, or another run has the lock; the message names its host and process.
            StorageError: the object store cannot be read or written.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"`output_dir` {self.folder} is a file; pass a folder")
        folders = (self._work,) if self._claim else (self._work, self.folder)
        self._created = [folder for folder in folders if not folder.exists()]
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            self._acquire()
            atomic_write(self._work / _OWNER, self._owner)  # replaces a link or FIFO
            if self._claim:
                self._claim.make(overwrite=self._overwrite)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            if isinstance(error, OSError) and (named := error_of_path(error, self._work / _OWNER)) is not error:
                raise named from error
            raise
        return self

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=_LOCK_TIMEOUT)
        except Timeout as error:
            raise ConfigError(
                f"{self.folder} is being written by {_holder(self._work)}; wait for it to end, or use another "
                "`output_dir`"
            ) from error
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None:  # the file cannot be opened
                raise
            raise ConfigError(
                f"the file system of {self.folder} has no file locks: {error}; use another `output_dir`"
            ) from error

    def check(self) -> None:
        """Check that the folder is still the locked folder: it may have been removed, and created by another run.

        Raises:
            ConfigError: the folder was removed or replaced, or another run has claimed it.
        """
        if read_json_object(self._work / _OWNER) != orjson.loads(self._owner):
            raise ConfigError(
                f"`output_dir` {self.folder} was removed or replaced during the run. Delete the rest of it and run "
                "again"
            )
        if self._claim and not self._claim.is_valid():
            raise ConfigError(
                f"{self.folder} was taken over by another run, with `overwrite`. Stop one of them, and run the other "
                "again with `overwrite`"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._free()
        except KeyboardInterrupt:  # raised once: the second attempt completes
            self._free()
            raise

    def _free(self) -> None:
        own = {_LOCK} if self._lock.is_locked else set()
        if self._claim:
            with contextlib.suppress(OSError):  # if the store fails, the object stays, and the token to reuse it
                self._claim.release()
        if own:
            with contextlib.suppress(OSError):
                (self._work / _OWNER).unlink()  # before the release: the next run writes its own file
        with contextlib.suppress(OSError):
            self._lock.release()
        # A run that wrote no files removes the folders that it created; rmdir fails if they contain other files.
        with contextlib.suppress(OSError):
            if self._work in self._created and {path.name for path in self._work.iterdir()} <= own:
                (self._work / _LOCK).unlink(missing_ok=True)
            for folder in self._created:
                folder.rmdir()


def lock_holder(folder: Path, work: Path | None = None) -> str | None:
    """Name the process that writes in a folder, as `process 12 on host`; None if the folder is not locked.

    Args:
        folder: the output folder.
        work: local folder of its restart state; by default `work_folder`.
    """
    work = work or work_folder(folder)
    if is_remote(folder):
        with contextlib.suppress(StorageError):
            owner = read_json_object(folder / ".work" / _OWNER)
            if owner.get("host", socket.gethostname()) != socket.gethostname():  # whether it was killed is not known
                return _named(owner)
    if not (work / _LOCK).is_file():
        return None
    lock = _file_lock(work / _LOCK)
    try:
        with lock.acquire(timeout=0):
            return None
    except Timeout:
        return _holder(work)
    except (NotImplementedError, OSError):  # no locks in this file system, or a folder of another user
        return None


def _file_lock(path: Path) -> BaseFileLock:
    """Make a lock of the operating system; a soft lock (the existence of a file) would survive a killed run."""
    return FileLock(path, thread_local=False, fallback_to_soft=False)


def _holder(work: Path) -> str:
    return _named(read_json_object(work / _OWNER))


def _named(owner: dict[str, Any]) -> str:
    known = {"pid", "host"} <= owner.keys()
    return f"process {owner['pid']} on {owner['host']}" if known else "another process"
