"""RemoteReader: a stream over byte ranges of an object, which keeps the last ranges of each object."""

import contextlib
import errno
import io
import itertools
import os
import stat
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from energon_packed.storage.clients import start_rust
from energon_packed.storage.status import is_fresh, known_status
from energon_packed.storage.threads import map_in_threads

if TYPE_CHECKING:
    from typing_extensions import Buffer

READ_AHEAD = 1 << 20
"""Bytes that a sequential reader requests at once."""
# The last ranges that this process requested, (offset, bytes) by URL and time: the contents of a key of a tar, such as
# its images, are read after the headers of several keys. If two threads add ranges of an object at the same time, one
# may be lost, which costs a request.
_blocks: OrderedDict[tuple[str, int], tuple[tuple[int, bytes], ...]] = OrderedDict()
MOST_KEPT = 64 << 20
"""Bytes of all ranges that are kept."""
_MOST_BLOCKS, _MOST_OBJECTS = 64, 256  # ranges of an object, and objects


class ObjectPath(Protocol):
    """The methods of a RemotePath that a stream calls."""

    def stat(self) -> os.stat_result:
        """Request size and time of the object."""

    def read_range(self, at: int, size: int) -> bytes:
        """Request bytes [at, at + size); fewer at the end of the object."""


class RemoteReader(io.BufferedReader):
    """A seekable binary stream over byte ranges of an object.

    Sequential reads request blocks; `read_range` requests exactly the bytes that it returns.
    """

    def __init__(self, path: ObjectPath, buffer_size: int = READ_AHEAD, *, is_recent: bool = False) -> None:
        """Open an object.

        Args:
            path: the object.
            buffer_size: bytes that are requested at once.
            is_recent: accept a status of the last minute, if bytes of this version are kept.
        """
        since, status = known_status(str(path))
        is_kept = status is not None and (str(path), status.st_mtime_ns) in _blocks
        self._object = ObjectStream(path, status if is_recent and is_kept and is_fresh(since) else None)
        super().__init__(self._object, buffer_size)

    def status(self) -> os.stat_result:
        """Return the status of the object, at most a minute old."""
        return self._object.status()

    def read_range(self, at: int, size: int) -> bytes:
        """Return bytes [at, at + size); fewer at the end of the object."""
        return self._object.read_range(at, size)

    def request(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request ranges (at, size) of at most 1 MiB at the same time; reading them soon needs no further requests."""
        small = [(at, size) for at, size in dict.fromkeys(ranges) if size <= READ_AHEAD]
        start_rust([str(self._object.path)] * len(small))
        map_in_threads(lambda own: self._object.read_range(*own), small)


class RangeStream(io.RawIOBase):
    """A seekable raw stream over a source of byte ranges.

    A subclass has `read_range(at, size)`, which returns bytes from `at`, fewer at the end, and `end()`, the size.
    """

    _at = 0

    @abstractmethod
    def read_range(self, at: int, size: int) -> bytes:
        """Return bytes [at, at + size); fewer at the end, and none after it."""

    @abstractmethod
    def end(self) -> int:
        """Return the size in bytes."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position.

        Raises:
            ValueError: it would be negative.
        """
        base = self.end() if whence == os.SEEK_END else {os.SEEK_SET: 0, os.SEEK_CUR: self._at}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: "Buffer") -> int:
        """Read into a buffer, and return the number of bytes."""
        view = memoryview(buffer)
        data = self.read_range(self._at, len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Return all bytes from the position on."""
        data = self.read_range(self._at, self.end() - self._at)
        self._at += len(data)
        return data


class ObjectStream(RangeStream):
    """Byte ranges of an object as a raw stream."""

    def __init__(self, path: ObjectPath, status: os.stat_result | None = None) -> None:
        self.path = path
        status = status or path.stat()
        since, known = known_status(str(path))
        self._since, self._status = (time.monotonic(), status) if known is None else (since, known)
        if stat.S_ISDIR(self._status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))

    def status(self) -> os.stat_result:
        """Return the status of the object, at most a minute old."""
        since, known = known_status(str(self.path))
        if known is not None and since > self._since:  # another reader has requested it in the meantime
            self._since, self._status = since, known
        if not is_fresh(self._since):
            self._status, self._since = self.path.stat(), time.monotonic()
        return self._status

    def end(self) -> int:
        """Return the size of the object in bytes."""
        return self.status().st_size

    def read_range(self, at: int, size: int, *, most_kept: int | None = None) -> bytes:
        """Return bytes [at, at + size), which are kept if they are few.

        Args:
            at, size: the range; less is returned at the end of the object.
            most_kept: bytes of the largest range that is kept; 1 MiB by default.
        """
        size = min(size, self.end() - at)  # stores refuse ranges after the end
        if size <= 0 or len(data := self._known(at, size)) == size:
            return b"" if size <= 0 else data
        version = self._version()  # before the request: an object that is replaced in the meantime has a newer version
        data = self.path.read_range(at, size)
        if len(data) <= (READ_AHEAD if most_kept is None else most_kept):
            blocks = ((at, data), *_blocks.pop(version, ()))[:_MOST_BLOCKS]
            ends = itertools.accumulate(len(block) for _, block in blocks)
            _blocks[version] = tuple(block for block, end in zip(blocks, ends, strict=True) if end <= MOST_KEPT)
            while len(_blocks) > _MOST_OBJECTS or _kept_bytes() > MOST_KEPT:
                with contextlib.suppress(KeyError):  # another thread has removed the last one
                    _blocks.popitem(last=False)
        return data

    def read_start(self) -> bytes:
        """Return the first MiB, which is kept."""
        return self.read_range(0, READ_AHEAD)

    def readinto(self, buffer: "Buffer") -> int:
        """Read into a buffer, less than it if the rest needs a request; return the number of bytes."""
        view = memoryview(buffer)
        if known := self._known(self._at, len(view)):  # less than the buffer, without a request
            view[: len(known)] = known
            self._at += len(known)
            return len(known)
        return super().readinto(view)

    def _known(self, at: int, size: int) -> bytes:
        """Return up to `size` bytes from `at` of a range that was requested before; b"" if there is none."""
        for start, data in _blocks.get(self._version(), ()):
            if start <= at < start + len(data):
                return data[at - start : at - start + size]
        return b""

    def _version(self) -> tuple[str, int]:
        return str(self.path), self.status().st_mtime_ns


def _kept_bytes() -> int:
    return sum(len(block) for blocks in list(_blocks.values()) for _, block in blocks)
