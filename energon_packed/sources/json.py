"""JSON and JSONL files in, plain or compressed; a record for each line or array element out, read by byte ranges.

Memory does not grow with the file. An array is rewritten once as JSONL: its elements are cut out as they are written,
and each is parsed like a line, so that an invalid element rejects only itself.
"""

import codecs
import gzip
import mmap
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
from energon_packed.sources.base import Source, SourceRecord, indices_of
from energon_packed.sources.convert import converted

_HEAD = 1 << 20  # bytes in which lines should end
_CR_ENDS = re.compile(rb"[}\]]\s*\r\s*[{\[]")
_BLOCK = 1 << 20
# Complete strings with their colons, a quote that opens an unfinished string, or structure.
_TOKEN = re.compile(rb'(?:"[^"\\]*(?:\\.[^"\\]*)*"(?:\s*:\s*)?)+|["\[\]{},]', re.DOTALL)
_SPACE = b" \t\r\n"
_OBJECT_OF_RECORDS = re.compile(
    rb'\{\s*"(data|annotations|samples|records|rows|items|examples|instances)"\s*:\s*\[\s*\{'
)


class JsonlSource(Source):
    """A JSONL file. Blank lines are skipped.

    A range [start, stop) contains the lines that start in it, so different processes can read adjacent ranges.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    chunk_limits: ClassVar[tuple[int, int]] = (256 << 10, 4 << 20)  # bytes

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        super().__init__(path, data=data, image_root=image_root)
        self._streams = Streams()

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Open the file in place."""
        check_line_ends(path, path)
        return cls(path, image_root=image_root)

    def extent(self) -> int:
        """Size of the file in bytes."""
        return self.data.stat().st_size

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Read the lines that start in bytes [start, stop)."""
        return map(self.row, self._lines(start, stop))

    def held(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """Offsets and unparsed lines."""
        return list(self._lines(start, stop))

    def row(self, entry: tuple[int, bytes]) -> SourceRecord:
        """Parse a line."""
        return _row(*entry)

    def _lines(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        with self.data.open("rb", buffering=1 << 20) as stream:
            offset = start
            if start > 0:
                stream.seek(start - 1)  # a line that starts exactly at `start` belongs to this range
                # No further than `stop`: no line of this range starts after it, in the middle of a long line.
                offset = start - 1 + len(stream.readline(stop - start + 1))
            else:
                stream.seek(0)
            while offset < stop and (line := stream.readline()):
                if line.strip():
                    yield offset, line
                offset += len(line)

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Count the lines up to the last address."""
        start, stop = self.chunks()[0][0], max(addresses, default=0) + 1
        return indices_of(addresses, (offset for offset, _ in self._lines(start, stop)))

    def read(self, address: int, size: int) -> SourceRecord:
        """Read the record in bytes [address, address + size)."""
        return self.row((address, os.pread(self._streams.get(self.data).fileno(), size, address)))


class CompressedJsonlSource(JsonlSource):
    """A .gz or .zst file of JSONL, decompressed once."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> "Source":
        """Decompress into `work_dir`."""
        return cls(path, data=decompressed(path, work_dir), image_root=image_root)


class JsonSource(JsonlSource):
    """A .json file."""

    suffixes: ClassVar[tuple[str, ...]] = (".json",)

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Rewrite an array as JSONL in `work_dir`."""
        return cls(path, data=_in_lines(path, path, work_dir), image_root=image_root)


class CompressedJsonSource(JsonlSource):
    """A .json.gz or .json.zst file: an array or lines, decompressed once."""

    suffixes: ClassVar[tuple[str, ...]] = (".json.gz", ".json.zst")

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Decompress into `work_dir`, and rewrite an array as JSONL."""
        data = decompressed(path, work_dir)
        return cls(path, data=_in_lines(path, data, work_dir), image_root=image_root)


def check_line_ends(path: Path, data: Path) -> None:
    """Refuse lines that end in a carriage return alone (old Macs): the file would be read as a single line.

    Args:
        path: the input, for the message.
        data: the decompressed file.

    Raises:
        SourceError: the lines end in CR alone.
    """
    with data.open("rb") as stream:
        head = stream.read(_HEAD)
    # A single long line is valid, so a CR must also separate two objects.
    if b"\n" not in head and _CR_ENDS.search(head):
        raise SourceError(f"the lines of {path} end in CR alone. Write it with LF: tr '\\r' '\\n'")


def _row(offset: int, line: bytes) -> SourceRecord:
    try:
        return SourceRecord(offset, len(line), parse_json(line.removeprefix(codecs.BOM_UTF8)))
    except orjson.JSONDecodeError as error:
        return SourceRecord(offset, len(line), None, Reject(Reason.BAD_JSON, str(error)))


def decompressed(path: Path, work_dir: Path) -> Path:
    """Return the decompressed copy of a .gz or .zst file.

    Raises:
        SourceError: the file is empty, truncated or damaged.
    """
    return converted(path, work_dir, ".jsonl", _decompress)


def _decompress(path: Path, out: BinaryIO) -> None:
    import zstandard

    if path.stat().st_size == 0:
        raise SourceError(f"{path} is empty (0 bytes), so it is not a compressed file. Copy it again.")
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path, "rb") as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        else:
            _decompress_zstd(path, out)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        if "too much memory" in str(error):
            # zstd refuses windows over 128 MiB by default; no limit here would let a small file allocate gigabytes.
            raise SourceError(f"{path} was compressed with --long; decompress it: zstd -d --long=31") from error
        raise SourceError(f"{path} cannot be decompressed: {error}; is the file complete?") from error


def _decompress_zstd(path: Path, out: BinaryIO) -> None:
    """Decompress all frames; the stream reader of zstandard would accept a file that ends inside a frame."""
    import zstandard

    frame = None
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            while block:
                # A file may consist of several frames, as pzstd writes them.
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                out.write(frame.decompress(block))
                block = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the last frame is truncated")


def _in_lines(path: Path, data: Path, work_dir: Path) -> Path:
    """Return a file with a record per line: the file itself, or a converted copy if it is an array.

    Args:
        path: the input, for messages.
        data: the decompressed file.
        work_dir: folder of the copy.

    Raises:
        SourceError: the file is a single object, or an array that cannot be read.
    """
    with data.open("rb") as stream:
        head = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    if head[:1] == b"[":
        return converted(data, work_dir, ".lines.jsonl", lambda array, out: _to_jsonl(array, out, path))
    if head[:1] == b"{" and head[1:].lstrip(b" \t\r")[:1] == b"\n":  # JSON lines never break after the brace
        raise SourceError(
            f"{path} is one JSON object over several lines; write the list of records in it alone to a file, such "
            f"as jq .annotations {path.name}"
        )
    # A first line with such a field is a record if more lines follow.
    if (match := _OBJECT_OF_RECORDS.match(head)) and _is_one_line(data):
        name = match[1].decode(errors="replace")
        raise SourceError(f"{path} is one JSON object; write its list {name} alone to a file: jq .{name} {path.name}")
    check_line_ends(path, data)
    return data


def _is_one_line(file: Path) -> bool:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = data.find(b"\n")
        return end < 0 or not data[end : end + 4096].strip()


def _to_jsonl(data: Path, out: BinaryIO, path: Path) -> None:
    """Write a line per element of the JSON array in `data`, the decompressed file of `path`."""
    with data.open("rb") as stream:
        stream.seek(len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0)
        try:
            for element in _elements(stream):
                # Between tokens both bytes are whitespace to JSON; inside strings neither is allowed.
                out.write(element.replace(b"\n", b"\r") + b"\n")
        except ValueError as error:
            raise SourceError(f"{path} is not a complete JSON array: {error}") from error


def _elements(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of each element of the array in `stream`.

    Raises:
        ValueError: the array does not end, ends early, or has an empty element.
    """
    data, offset = b"", 0  # bytes that are not emitted yet, and their offset in the file
    at = first = depth = count = 0  # in data: end of the scanned bytes, and start of the element
    # The block grows with an unfinished element, so that a long element is scanned in linear time.
    while block := stream.read(max(_BLOCK, len(data))):
        offset += first
        data, at, first = data[first:] + block, at - first, 0
        for match in _TOKEN.finditer(data, at):
            token, at = match[0], match.end()
            if token == b'"':  # the end of this string is not in `data` yet
                at = match.start()
                break
            if token in b"[{":
                depth += 1
                first = at if depth == 1 else first
                continue
            depth -= token in b"]}"
            # Only commas and the closing bracket of the outer array end an element.
            if depth > 1 or (depth == 1 and token != b",") or token[:1] == b'"':
                continue
            element = data[first : match.start()].strip(_SPACE)
            if element:
                count += 1
                yield element
            # An empty array has no element at all; any other empty element is an error.
            elif count or token == b",":
                raise ValueError(f"element {count} is empty, at byte {offset + match.start()}")
            first = at
            if depth == 0:
                _check_end(data[at:], stream, token, offset + at)
                return
    raise ValueError(f"it ends at byte {offset + len(data)} inside element {count}")


def _check_end(rest: bytes, stream: BinaryIO, token: bytes, at: int) -> None:
    if token != b"]" or rest.strip(_SPACE):
        raise ValueError(f"extra data after the JSON array at byte {at}")
    while block := stream.read(_BLOCK):
        if block.strip(_SPACE):
            raise ValueError(f"extra data after the JSON array at byte {at}")
