"""JSON: an array of records, rewritten once as JSONL; a .json file of JSON lines is read in place.

The elements are cut out of the array as they are written, and each is parsed like a line, so that one that is no JSON
costs itself alone.

JSONL, plain or compressed: one JSON object a line, read by byte ranges; memory does not grow with the file.
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
from energon_packed.sources.base import Source, SourceRecord, numbers_of
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

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Lines that begin in bytes [start, stop)."""
        return map(self.row, self._lines(start, stop))

    def held(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """Offsets and lines."""
        return list(self._lines(start, stop))

    def row(self, held: tuple[int, bytes]) -> SourceRecord:
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

    def read(self, address: int, size: int) -> SourceRecord:
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


def _row(offset: int, line: bytes) -> SourceRecord:
    try:
        return SourceRecord(offset, len(line), parse_json(line.removeprefix(codecs.BOM_UTF8)))
    except orjson.JSONDecodeError as error:
        return SourceRecord(offset, len(line), None, Reject(Reason.BAD_JSON, str(error)))


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


_BLOCK = 1 << 20
# Texts with their colons, the start of a text, or structure.
_TOKEN = re.compile(rb'(?:"[^"\\]*(?:\\.[^"\\]*)*"(?:\s*:\s*)?)+|["\[\]{},]', re.DOTALL)
_SPACE = b" \t\r\n"
_OBJECT_OF_RECORDS = re.compile(
    rb'\{\s*"(data|annotations|samples|records|rows|items|examples|instances)"\s*:\s*\[\s*\{'
)


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


def _in_lines(path: Path, data: Path, work_dir: Path) -> Path:
    """The records of a JSON file in lines: the file itself, or a copy where it is an array.

    Args:
        path: the input, for messages.
        data: its content.
        work_dir: folder of the copy.

    Raises:
        SourceError: it is one object, or an array that cannot be read.
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
    if (found := _OBJECT_OF_RECORDS.match(head)) and _is_one_line(data):
        name = found[1].decode(errors="replace")
        raise SourceError(f"{path} is one JSON object; write its list {name} alone to a file: jq .{name} {path.name}")
    check_line_ends(path, data)
    return data


def _is_one_line(file: Path) -> bool:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = data.find(b"\n")
        return end < 0 or not data[end : end + 4096].strip()


def _to_jsonl(data: Path, out: BinaryIO, path: Path) -> None:
    """One line per element of the JSON array in `data`, which is the content of `path`."""
    with data.open("rb") as stream:
        stream.seek(len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0)
        try:
            for element in _elements(stream):
                # Between texts a line end is a space to JSON; inside a text neither byte is allowed.
                out.write(element.replace(b"\n", b"\r") + b"\n")
        except ValueError as error:
            raise SourceError(f"{path} is not a complete JSON array: {error}") from error


def _elements(stream: BinaryIO) -> Iterator[bytes]:
    """The bytes of each element of the array that `stream` holds.

    Raises:
        ValueError: the array does not end, ends early, or has a place without an element.
    """
    data, offset = b"", 0  # of the file: what is not emitted yet, and where it begins
    at = begin = depth = count = 0  # in data: how far it is scanned, and where the element begins
    while block := stream.read(max(_BLOCK, len(data))):
        offset += begin
        data, at, begin = data[begin:] + block, at - begin, 0
        for match in _TOKEN.finditer(data, at):
            token, at = match[0], match.end()
            if token == b'"':  # its end is not read yet
                at = match.start()
                break
            if token in b"[{":
                depth += 1
                begin = at if depth == 1 else begin
                continue
            depth -= token in b"]}"
            if depth > 1 or (depth == 1 and token != b",") or token[:1] == b'"':
                continue
            element = data[begin : match.start()].strip(_SPACE)
            if element:
                count += 1
                yield element
            elif count or token == b",":
                raise ValueError(f"element {count} is empty, at byte {offset + match.start()}")
            begin = at
            if depth == 0:
                _check_end(data[at:], stream, token, offset + at)
                return
    raise ValueError(f"it ends at byte {offset + len(data)} inside element {count}")


def _check_end(rest: bytes, stream: BinaryIO, token: bytes, at: int) -> None:
    if token != b"]" or rest.strip(_SPACE):
        raise ValueError(f"the array ends at byte {at}, and more follows")
    while block := stream.read(_BLOCK):
        if block.strip(_SPACE):
            raise ValueError(f"the array ends at byte {at}, and more follows")
