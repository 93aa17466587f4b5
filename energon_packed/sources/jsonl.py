"""JSONL, plain or compressed: one JSON object a line, read by byte ranges; memory does not grow with the file."""

import codecs
import gzip
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

import orjson

from energon_packed.errors import Reason, Reject, SourceError
from energon_packed.files import Streams
from energon_packed.records.fields import parse_json
from energon_packed.sources.base import Row, Source, numbers_of
from energon_packed.sources.convert import converted

_HEAD = 1 << 20  # bytes in which lines should end
_CR_ENDS = re.compile(rb"[}\]]\s*\r\s*[{\[]")


class JsonlSource(Source):
    """A JSONL file. Blank lines are skipped.

    A range [start, stop) holds the lines that begin in it, so ranges can be read by different processes.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    chunk_limits: ClassVar[tuple[int, int]] = (256 << 10, 4 << 20)  # bytes

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        super().__init__(path, data=data, image_root=image_root)
        self._streams = Streams()

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Nothing is converted."""
        check_line_ends(path, path)
        return cls(path, image_root=image_root)

    def extent(self) -> int:
        """Size of the file in bytes."""
        return self.data.stat().st_size

    def scan(self, start: int, stop: int) -> Iterator[Row]:
        """Lines that begin in bytes [start, stop)."""
        return map(self.row, self._lines(start, stop))

    def held(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """Offsets and lines."""
        return list(self._lines(start, stop))

    def row(self, held: tuple[int, bytes]) -> Row:
        """The line parsed: what `scan` and `read` give, too."""
        return _row(*held)

    def _lines(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        with self.data.open("rb", buffering=1 << 20) as stream:
            offset = start
            if start > 0:
                stream.seek(start - 1)
                offset = start - 1 + len(stream.readline())
            else:
                stream.seek(0)
            while offset < stop and (line := stream.readline()):
                if line.strip():
                    yield offset, line
                offset += len(line)

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Counts the lines up to the last address."""
        start, stop = self.chunks()[0][0], max(addresses, default=0) + 1
        return numbers_of(addresses, (offset for offset, _ in self._lines(start, stop)))

    def read(self, address: int, size: int) -> Row:
        """The record in bytes [address, address + size)."""
        return self.row((address, os.pread(self._streams.get(self.data).fileno(), size, address)))


class CompressedJsonlSource(JsonlSource):
    """A .gz or .zst file of JSONL, decompressed once."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> "Source":
        """Decompress into `work_dir`."""
        return cls(path, data=decompressed(path, work_dir), image_root=image_root)


def decompressed(path: Path, work_dir: Path) -> Path:
    """The decompressed copy of a .gz or .zst file.

    Raises:
        SourceError: it is empty, truncated or damaged.
    """
    return converted(path, work_dir, ".jsonl", _decompress)


def check_line_ends(path: Path, data: Path) -> None:
    """Refuse lines that end in a carriage return alone, as of old Macs: they would be one line.

    Args:
        path: the input, for the message.
        data: its content.

    Raises:
        SourceError: they do.
    """
    with data.open("rb") as stream:
        head = stream.read(_HEAD)
    if b"\n" not in head and _CR_ENDS.search(head):
        raise SourceError(f"the lines of {path} end in CR alone; write it with LF: tr '\\r' '\\n'")


def _row(offset: int, line: bytes) -> Row:
    try:
        return Row(offset, len(line), parse_json(line.removeprefix(codecs.BOM_UTF8)))
    except orjson.JSONDecodeError as error:
        return Row(offset, len(line), None, Reject(Reason.BAD_JSON, str(error)))


def _decompress(path: Path, out: BinaryIO) -> None:
    import zstandard

    if path.stat().st_size == 0:
        raise SourceError(f"{path} is empty (0 bytes), which is no compressed file; copy it again")
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path, "rb") as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        else:
            _decompress_zstd(path, out)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        if "too much memory" in str(error):
            raise SourceError(f"{path} was compressed with --long; decompress it: zstd -d --long=31") from error
        raise SourceError(f"{path} cannot be decompressed: {error}; is the file complete?") from error


def _decompress_zstd(path: Path, out: BinaryIO) -> None:
    """All frames of a file; the library's own stream reader accepts a file that ends inside a frame."""
    import zstandard

    frame = None
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                out.write(frame.decompress(block))
                block = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the last frame is truncated")
