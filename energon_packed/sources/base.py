"""Source: one input file whose records can be read in order and by address. Required methods: `extent` and `read`."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from energon_packed.errors import Reject
from energon_packed.sources.config import Reading


class SourceRecord(NamedTuple):
    """One record where it was found.

    Attributes:
        address: where `Source.read` finds it again: a byte offset or a row number.
        size: bytes of the record in the file; 0 where the format does not tell.
        record: the parsed record; None when it cannot be parsed.
        reject: why it cannot be parsed, or None.
    """

    address: int
    size: int
    record: Any
    reject: Reject | None = None


class Source(ABC):
    """One input file. Objects are small and picklable; each process that reads opens the file itself.

    A container format is one subclass with `@register_source`; without further methods its addresses are row numbers.

    Attributes:
        suffixes: endings of the file names that this class reads, lower case.
        path: the file that the user named.
        data: the file that is read: `path`, or its converted copy.
        image_root: folder that relative media paths start from and must stay in.
        reading: what the user's settings do to its records.
        share: part of the address space to read, as (start, stop, total): from start / total to stop / total of it.
        has_splits: `files` reads the split that it is asked for.
        has_sample_loader: `open` takes `trust_sample_loader` and `for_adapter`, as `WebDatasetSource.open` does.
        chunk_limits: smallest and largest part of the address space that is one unit of work.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    chunk_limits: ClassVar[tuple[int, int]] = (64, 512)
    share: tuple[int, int, int] = (0, 1, 1)
    reading: Reading = Reading()
    has_splits: ClassVar[bool] = False
    has_sample_loader: ClassVar[bool] = False

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        self.path = path
        self.data = data or path
        self.image_root = str(image_root if image_root is not None else path.resolve().parent)

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether this class reads `path`: by default, by its `suffixes`."""
        return path.name.lower().endswith(cls.suffixes) if cls.suffixes else False

    @classmethod
    def files(cls, path: Path, split: str | None = None) -> list[Path]:
        """The files that `path` stands for, one source each: itself, unless it is a folder.

        Args:
            path: what the user named.
            split: which split of a folder that has splits; None for its default.

        Raises:
            SourceError: they cannot be told.
        """
        return [path]

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> "Source":
        """A source for one of `files`.

        Args:
            path: the file.
            work_dir: folder for converted copies, for formats without random access.
            image_root: folder of relative media paths; None for the folder of the file.

        Raises:
            SourceError: the file cannot be read.
        """
        return cls(path, image_root=image_root)

    @abstractmethod
    def extent(self) -> int:
        """End of the address space: the number of rows, or of bytes."""

    @abstractmethod
    def read(self, address: int, size: int) -> SourceRecord:
        """One record, by the address and size of its `SourceRecord`."""

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Rows whose address is in [start, stop), in order; each row is in exactly one of adjacent ranges."""
        for address in range(start, stop):
            yield self.read(address, 0)

    def held(self, start: int, stop: int) -> list[Any]:
        """The rows of `scan` to be read in another order, in the form that takes the least memory; see `row`."""
        return list(self.scan(start, stop))

    def row(self, held: Any) -> SourceRecord:
        """The row of an element of `held`."""
        row: SourceRecord = held
        return row

    def chunks(self) -> list[tuple[int, int]]:
        """Our share of the address space in units of work, [(start, stop), ...]: about 64, within `chunk_limits`."""
        first, last, total = self.share
        begin, end = (self.extent() * edge // total for edge in (first, last))
        smallest, largest = self.chunk_limits
        step = min(max((end - begin) // 64, smallest), largest)
        return [(start, min(start + step, end)) for start in range(begin, end, step)]

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Numbers of the rows at these addresses, from 0 at the start of our share.

        Overridden if addresses are not row numbers; it may read the file up to the last address.
        """
        chunks = self.chunks()
        return [address - chunks[0][0] for address in addresses]

    def fingerprint(self) -> str:
        """Hex digest of the file's size and of samples of its bytes: the same for a copy elsewhere."""
        return file_fingerprint(self.path)


def numbers_of(addresses: Sequence[int], in_order: Iterable[int]) -> list[int]:
    """The places of some addresses among all of them.

    Args:
        addresses: some of `in_order`.
        in_order: of all rows; read up to the last one of `addresses`.
    """
    wanted = set(addresses)
    found = {address: number for number, address in enumerate(in_order) if address in wanted}
    return [found[address] for address in addresses]


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
