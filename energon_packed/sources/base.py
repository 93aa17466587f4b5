"""Source, the base class of file formats: a file in, SourceRecords in order or by address out.

Required methods: `extent` and `read`.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reject
from energon_packed.records.media.reference import ImageRoot
from energon_packed.sources.config import Reading
from energon_packed.storage import RemotePath, RemoteReader, absolute_name, as_path, is_remote, recent_status

LONGEST_RECORD = 256 << 20  # bytes of a line or of a text part of a tar; more is rejected, and is not read


class SourceRecord(NamedTuple):
    """A raw record and its address in the file.

    Attributes:
        address: argument of `Source.read`: a byte offset or a table row index.
        size: bytes of the record in the file; 0 if the format does not record it.
        record: the parsed record; None if it cannot be parsed.
        reject: the reason if it cannot be parsed, else None.

    Examples:
        >>> SourceRecord(address=0, size=12, record={"text": "A document."}).reject is None
        True
    """

    address: int
    size: int
    record: Any
    reject: Reject | None = None


class Source(ABC):
    """An input file. Objects are small and picklable; each reading process opens the file itself.

    A file format is a subclass with `@register_source`, whose constructor takes `path`, `data` and `image_root`. By
    default, addresses are table row indices.

    Attributes:
        suffixes: file extensions that this class reads, lower case.
        path: the file in the input.
        data: the file that is read: `path`, or its converted copy.
        image_root: folder that relative media paths start from and must stay in.
        reading: per-source settings of the user.
        links: follow symbolic links in media paths.
        share: slice of the address space to read, as (start, stop, total): from start / total to stop / total of it.
        has_splits: `files` uses its argument `split`.
        has_sample_loader: `open` accepts `trust_sample_loader` and `for_adapter`, like `WebDatasetSource.open`.
        chunk_limits: smallest and largest slice of the address space that is a unit of work.

    Examples:
        >>> class Lines(Source):
        ...     suffixes = (".lines",)
        ...
        ...     def extent(self):
        ...         return len(self.data.read_text().split())
        ...
        ...     def read(self, address, size):
        ...         return SourceRecord(address, 0, {"text": self.data.read_text().split()[address]})
        >>> _ = Path("two.lines").write_text("first second")
        >>> [row.record for row in Lines(Path("two.lines")).scan(0, 2)]
        [{'text': 'first'}, {'text': 'second'}]
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    chunk_limits: ClassVar[tuple[int, int]] = (64, 512)
    share: tuple[int, int, int] = (0, 1, 1)
    reading: Reading = Reading()
    links: bool = True
    has_splits: ClassVar[bool] = False
    has_sample_loader: ClassVar[bool] = False

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        self.path = path
        self.data = data or path
        self.image_root = _absolute(image_root if image_root is not None else path.parent)

    @cached_property
    def media_folder(self) -> ImageRoot:
        """`image_root`, with the folder of the file and whether links are followed."""
        return ImageRoot(self.image_root, _absolute(self.path.parent), self.links)

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether this class reads `path`: by default, by its `suffixes`."""
        return path.name.lower().endswith(cls.suffixes) if cls.suffixes else False

    @classmethod
    def files(cls, path: Path, split: str | None = None) -> list[Path]:
        """List the files of `path`, each of which becomes a source: `path` itself, unless it is a folder.

        Args:
            path: a file or folder of the input.
            split: split to read, if the folder has splits; None for the default split.

        Raises:
            SourceError: the files of the folder cannot be determined.
        """
        return [path]

    @classmethod
    def unlisted(cls, path: Path) -> list[str]:
        """Names of data files in the folder `path` that belong to no split, for formats that list their files."""
        return []

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> "Source":
        """Open a file of `files`.

        Args:
            path: the file.
            work_dir: folder for converted copies, for formats without random access.
            image_root: folder of relative media paths; None for the folder of the file.

        Raises:
            SourceError: the file cannot be read.
        """
        return cls(path, data=cls._readable(path, work_dir), image_root=image_root)

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Return the file with the records: `path`, or its converted copy in `work_dir`."""
        return path

    @abstractmethod
    def extent(self) -> int:
        """End of the address space: the number of table rows, or of bytes."""

    @abstractmethod
    def read(self, address: int, size: int) -> SourceRecord:
        """Read a record by the address and size of its `SourceRecord`."""

    def request(self, records: Sequence[tuple[int, int]]) -> None:
        """Request records (address, size) at the same time before `read` reads each, if the file is an object."""
        if isinstance(self.data, RemotePath):
            RemoteReader(self.data, is_recent=True).request(self.ranges(records))

    def ranges(self, records: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the byte ranges (offset, size) in `data` of records (address, size); none if they have no ranges."""
        return ()

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Read the records with addresses in [start, stop), in order; adjacent ranges never share a record."""
        for address in range(start, stop):
            yield self.read(address, 0)

    def held(self, start: int, stop: int) -> list[Any]:
        """Read the records of `scan` for shuffling, in the representation that needs the least memory; see `row`."""
        return list(self.scan(start, stop))

    def row(self, entry: Any) -> SourceRecord:
        """Parse a record that was read for shuffling."""
        row: SourceRecord = entry
        return row

    def chunks(self) -> list[tuple[int, int]]:
        """Divide `share` of the address space into about 64 units of work, [(start, stop), ...]."""
        # Integer division of the edges: the slices of all input parts are adjacent, without gaps and overlaps.
        first, last, total = self.share
        first_address, last_address = (self.extent() * edge // total for edge in (first, last))
        smallest, largest = self.chunk_limits
        # About 64 units per file balance workers; the limits keep a unit between cheap to start and quick to finish.
        step = min(max((last_address - first_address) // 64, smallest), largest)
        return [(start, min(start + step, last_address)) for start in range(first_address, last_address, step)]

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Convert addresses to record indices, from 0 at the start of `share`.

        Override it if addresses are not table row indices. It may read the file up to the last address.
        """
        chunks = self.chunks()
        return [address - chunks[0][0] for address in addresses]

    def line_numbers(
        self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[Any], out: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Line of `path` that each record is on, from 1: int64 (k,), 0 if records are not lines or it is not known.

        Args:
            addresses: int64 (k,), ascending, as in `SourceRecord`.
            sizes: integers (k,), as in `SourceRecord`; 0 if they are not known, which reads more of the file.
            out: int64 (k,), is filled and returned; None for a new array.
        """
        lines = np.empty(len(addresses), dtype=np.int64) if out is None else out
        lines[:] = 0
        return lines

    def fingerprint(self) -> str:
        """Hex digest of the size and of samples of the bytes, so that a copy has the same fingerprint."""
        return file_fingerprint(self.path)


def _absolute(folder: Path | str) -> str:
    """Return the absolute name of a folder, links unresolved, unless `..` follows a link and leads elsewhere."""
    name = absolute_name(folder)
    is_other = (
        ".." in as_path(folder).parts and not is_remote(folder) and os.path.realpath(name) != os.path.realpath(folder)
    )
    return os.path.realpath(folder) if is_other else name


def indices_of(addresses: Sequence[int], in_order: Iterable[int]) -> list[int]:
    """Find the indices of some addresses in the sequence of all addresses.

    Args:
        addresses: addresses in any order.
        in_order: the addresses of all records; read to its end.
    """
    wanted = set(addresses)
    positions = {address: index for index, address in enumerate(in_order) if address in wanted}
    return [positions[address] for address in addresses]


def file_fingerprint(path: Path) -> str:
    """Digest of the size, both ends and 64 blocks between them, so that large files are not read completely.

    Of an object, the digest of size, time and ETag: 66 requests for each input would need minutes.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    if is_remote(path):
        return hashlib.sha256(f"{size} {changed_at(path)}".encode()).hexdigest()
    digest.update(str(size).encode())
    with path.open("rb") as stream:
        block = 1 << 16
        # Positions are fractions of the size, so that a change of the size moves all of them.
        for step in range(66):
            stream.seek(max(0, size - block) * step // 65)
            digest.update(stream.read(block if step in (0, 65) else 4096))
    return digest.hexdigest()


def changed_at(path: Path) -> int:
    """Time of the last change in nanoseconds. It is part of the restart state, never of the output."""
    return recent_status(path).st_mtime_ns
