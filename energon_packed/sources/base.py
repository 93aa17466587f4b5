"""Source: one input file whose records can be read in order and one by one."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.errors import RecordError


@dataclass(frozen=True, slots=True)
class Row:
    """One record where it was found.

    Attributes:
        address: where `Source.read` finds it again: a byte offset or a row number.
        size: bytes of the record in the file; 0 where the format does not tell.
        record: the parsed record, or the error that parsing gave.
    """

    address: int
    size: int
    record: Any


class Source(ABC):
    """One input file. Objects are small and can be pickled; files are opened by the process that reads.

    Attributes:
        path: the file that the user named.
        data: the file that is read: `path`, or its converted copy.
        image_root: folder that relative media paths start from and must stay in.
        share: part of the address space to read, as (start, stop, whole): from start / whole to stop / whole of it.
    """

    share: tuple[int, int, int] = (0, 1, 1)

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        self.path = path
        self.data = data or path
        self.image_root = str(image_root if image_root is not None else path.resolve().parent)

    @abstractmethod
    def extent(self) -> int:
        """End of the address space: bytes or rows."""

    @abstractmethod
    def scan(self, start: int, stop: int) -> Iterator[Row]:
        """Rows whose address lies in [start, stop), in order; every row is in exactly one of adjacent ranges."""

    @abstractmethod
    def read(self, address: int, size: int) -> Any:
        """The record of one `Row`, given its address and size.

        Raises:
            RecordError: the record cannot be parsed.
        """

    @property
    @abstractmethod
    def chunk_limits(self) -> tuple[int, int]:
        """Least and largest part of the address space that makes one unit of work."""

    def chunks(self) -> list[tuple[int, int]]:
        """Our share of the address space in units of work: [(start, stop), ...]; about 64, within `chunk_limits`."""
        first, last, whole = self.share
        begin, end = (self.extent() * edge // whole for edge in (first, last))
        least, largest = self.chunk_limits
        step = min(max((end - begin) // 64, least), largest)
        return [(start, min(start + step, end)) for start in range(begin, end, step)]

    def fingerprint(self) -> str:
        """Hex digest of the size of the file and of samples of its bytes: the same for a copy elsewhere."""
        return file_fingerprint(self.path)


def file_fingerprint(path: Path) -> str:
    """Digest of a file's size, its ends and 64 blocks between, so that a large file costs no full read."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as stream:
        block = 1 << 16
        for step in range(66):
            stream.seek(max(0, size - block) * step // 65)
            digest.update(stream.read(block if step in (0, 65) else 4096))
    return digest.hexdigest()


def changed_at(path: Path) -> int:
    """Time of the last change in nanoseconds: part of the restart state, never of the output."""
    return os.stat(path).st_mtime_ns


def parsed_or_raise(value: Any) -> Any:
    """The value, or raise it when it is a RecordError."""
    if isinstance(value, RecordError):
        raise value
    return value
