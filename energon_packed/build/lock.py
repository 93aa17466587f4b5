"""FolderLock: one run at a time in an output folder, on one host or on many that share a disk."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import IO

import orjson

from energon_packed.errors import ConfigError

_NAME = ".energon-packed.lock"
_HELD = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Holds `folder/.energon-packed.lock` while its block runs.

    The file is locked with POSIX record locks (`fcntl(2)`), which end with the process that holds them, and says which
    host and process that is. Some network file systems do not show such locks to other hosts: there the content alone
    counts, and what a killed run has left must be deleted by hand.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _NAME
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> "FolderLock":
        """Take the lock.

        Raises:
            ConfigError: another run holds it; the message names its host and process.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._stream is None:
            stream = self.path.open("a+b")
            try:
                self._take(stream)
                if os.fstat(stream.fileno()).st_nlink:  # else its last holder has just deleted it
                    self._stream = stream
            finally:
                if self._stream is None:
                    stream.close()
        self._stream.truncate(0)
        self._stream.write(orjson.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        self._stream.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._stream.close()

    def _take(self, stream: IO[bytes]) -> None:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = False
        except OSError as error:
            held = error.errno in _HELD  # anything else: this file system has no locks
        host, pid = self._holder(stream)
        if held or (host == socket.gethostname() and pid == os.getpid()):
            raise ConfigError(
                f"{self.path.parent} is being written by process {pid} on {host}; wait for it to end, or use another "
                "--output-dir"
            )
        if host not in (None, socket.gethostname()):
            raise ConfigError(
                f"{self.path.parent} is locked by process {pid} on {host}; wait for it to end. If no such process "
                f"runs there any more, it was killed: delete {self.path} and run again, what is done is kept"
            )

    @staticmethod
    def _holder(stream: IO[bytes]) -> tuple[str | None, int | None]:
        stream.seek(0)
        try:
            value = orjson.loads(stream.read() or b"{}")
            return value.get("host"), value.get("pid")
        except (orjson.JSONDecodeError, AttributeError):
            return None, None
