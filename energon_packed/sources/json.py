"""JSON and JSONL files in, plain or compressed; a record for each line or array element out, read by byte ranges.

Memory does not grow with the file. An array is rewritten once as JSONL: its elements are cut out as they are written,
and each is parsed like a line, so that an invalid element rejects only itself. An object is rewritten too if it has
one of these forms:

    COCO captions   {"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}], ...}
    records by id   {"02930152": {"question": ...}, ...}                GQA (cs.stanford.edu/people/dorarad/gqa)
    records in data {"dataset_name": ..., "data": [{...}]}              TextCaps, TextVQA (textvqa.org), DocVQA

A record of COCO (cocodataset.org/#format-data) is an annotation with the fields of its image; the lists of such a file
are in memory while it is rewritten.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import json
import logging
import lzma
import mmap
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.errors import Reason, Reject, SourceError
from energon_packed.files import Streams, of_type, read_range
from energon_packed.records.exact_json import parse_json
from energon_packed.records.fields import ARRAY_REMEDY
from energon_packed.records.turns import is_turn
from energon_packed.sources.base import LONGEST_RECORD, Source, SourceRecord, indices_of
from energon_packed.sources.convert import converted, local_copy, not_utf8
from energon_packed.storage import is_remote
from energon_packed.system import raise_resource_error
from energon_packed.tarfiles import MAGICS

_log = logging.getLogger(__name__)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}  # by suffix, with the names of MAGICS
_XZ_MEMORY = 256 << 20  # bytes; the largest preset of xz needs 65 MiB
_COMPRESSED_BLOCK = 1 << 11  # bytes; a small block, because a block of zstd expands 32,000 times, in memory
_HEAD = 1 << 20  # bytes in which lines should end
_LONG_LINE = 64 << 20  # bytes; a longer line is usually not a record
_LONGEST_MEMBER = 2**31 - 1  # bytes of a member of an object of records, which may be the list of all records
# By the byte order mark, or by the NULs of the first four characters, which are ASCII in JSON.
_ENCODINGS = {
    "UTF-32LE": re.compile(rb"\xff\xfe\0\0|(?:[^\0]\0\0\0){4}"),
    "UTF-32BE": re.compile(rb"\0\0\xfe\xff|(?:\0\0\0[^\0]){4}"),
    "UTF-16LE": re.compile(rb"\xff\xfe|(?:[^\0]\0){4}"),
    "UTF-16BE": re.compile(rb"\xfe\xff|(?:\0[^\0]){4}"),
}
_CR_ENDS = re.compile(rb"[}\]]\s*\r\s*[{\[]")
_BLOCK = 1 << 20
# Complete strings with their colons, a quote that opens an unfinished string, or structure.
_TOKEN = re.compile(rb'(?:"[^"\\]*(?:\\.[^"\\]*)*"(?:\s*:\s*)?)+|["\[\]{},]', re.DOTALL)
_SPACE = b" \t\r\n"
ELEMENTS = ".lines.jsonl"
"""Suffix of a copy whose lines are not lines of the input: elements of an array or object, files of a folder."""
_OBJECT_OF_RECORDS = re.compile(
    rb'\{\s*"(data|annotations|samples|records|rows|items|examples|instances)"\s*:\s*\[\s*\{'
)


_MEMBER = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*', re.DOTALL)
_BY_ID = ("question", "conversations", "messages")  # fields of a record in an object of records by id
# Members beside `data` that describe the dataset; beside any other member, `data` may be a field of a single record.
_ABOUT_DATA = frozenset(
    (
        *("dataset_name", "dataset_type", "dataset_version", "dataset_split", "name", "description", "version"),
        *("split", "info", "metadata", "license", "licenses"),
    )
)
_ENDS = {b"[": b"]", b"{": b"}"}


def _with_compressed(*suffixes: str) -> tuple[str, ...]:
    return (*suffixes, *(f"{suffix}{end}" for suffix in suffixes for end in COMPRESSIONS))


class JsonlSource(Source):
    """A JSONL file, which may be compressed. Blank lines are skipped.

    A range [start, stop) contains the lines that start in it, so different processes can read adjacent ranges.
    """

    suffixes: ClassVar[tuple[str, ...]] = _with_compressed(".jsonl", ".ndjson")
    chunk_limits: ClassVar[tuple[int, int]] = (256 << 10, 4 << 20)  # bytes

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        super().__init__(path, data=data, image_root=image_root)
        self._streams = Streams()

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Return a file with a record per line: the file itself, or a converted copy if it is compressed or an array.

        Raises:
            SourceError: its records are objects over several lines, or it is an array that cannot be read.
        """
        data = _text_of(path, work_dir)
        head = _head(data)
        if head[:1] == b"[" and _is_array(head, data):
            return _array_in_lines(path, data, work_dir)
        if _is_wrapped(head):
            raise SourceError(f"{path} has an object over several lines; write a record per line: jq -c . {path.name}")
        return data

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
        # No more than the range, so that a small range does not read its neighbors.
        with self.data.open("rb", buffering=min(max(stop - start, 1 << 16), 1 << 20)) as stream:
            offset = start
            if start > 0:
                stream.seek(start - 1)  # a line that starts exactly at `start` belongs to this range
                before = stream.readline(stop - start)
                # The search ends with the range: a long line would otherwise be read again in each range inside it.
                if not before.endswith(b"\n"):
                    return
                offset = start - 1 + len(before)
            else:
                stream.seek(0)
            while offset < stop and (line := stream.readline(LONGEST_RECORD)):
                is_long = len(line) == LONGEST_RECORD
                if is_long or not line.isspace():
                    yield offset, line
                offset += len(line)
                while is_long and line and offset < stop and not line.endswith(b"\n"):
                    line = stream.readline(_BLOCK)  # the rest of a line that is too long
                    offset += len(line)

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Count the lines up to the last address."""
        start, stop = self.chunks()[0][0], max(addresses, default=0) + 1
        return indices_of(addresses, (offset for offset, _ in self._lines(start, stop)))

    def line_numbers(
        self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[Any], out: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Count the lines of the records, and read the bytes between them, for which a remote file is not read.

        They are not known for elements of an array or object, nor in an input part that starts within the file.
        """
        is_copied = self.data != self.path and self.data.name.endswith(ELEMENTS)
        # In blocks and in place, because a file may have 100 million records.
        blocks = [slice(first, first + _BLOCK) for first in range(0, len(addresses) - 1, _BLOCK)]
        first_gap = next(_gaps(addresses, sizes, blocks), None)
        if is_copied or self.share[0] > 0 or (first_gap is not None and is_remote(self.data)):
            return super().line_numbers(addresses, sizes, out)
        # A longer line has not its whole size in `sizes`; the rest of it, with its end, is a gap.
        lines = np.empty_like(addresses) if out is None else out
        lines[:1] = 1
        for block in blocks:
            lines[1:][block] = (sizes[:-1][block] > 0) & (sizes[:-1][block] < LONGEST_RECORD)
        if first_gap is not None:
            with self.data.open("rb") as stream:
                for gap in _gaps(addresses, sizes, blocks):
                    end = int(addresses[gap - 1]) + int(sizes[gap - 1]) if gap else 0
                    lines[gap] += _line_ends(stream, end, int(addresses[gap]))
        return np.cumsum(lines, out=lines)

    def read(self, address: int, size: int) -> SourceRecord:
        """Read the record in bytes [address, address + size)."""
        return self.row((address, read_range(self._streams.get(self.data), address, size)))

    def ranges(self, records: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the records: an address is an offset."""
        return records


class JsonSource(JsonlSource):
    """A .json file, which may be compressed: an array, lines, or an object of records."""

    suffixes: ClassVar[tuple[str, ...]] = _with_compressed(".json")

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Return a file with a record per line: the file itself, or a converted copy if it is an array.

        Raises:
            SourceError: the file is a single object, or an array that cannot be read.
        """
        data = local_copy(_text_of(path, work_dir), work_dir)
        head, lines = _head(data), partial(converted, data, work_dir, ELEMENTS)
        if head[:1] == b"[":
            return _array_in_lines(path, data, work_dir)
        is_wrapped = _is_wrapped(head)
        if head[:1] == b"{" and (is_wrapped or _is_one_line(data)):
            # The form is found while the copy is written, so that an existing copy is used without reading the file.
            with contextlib.suppress(_NoListError):
                return lines(lambda file, out: _to_jsonl(file, out, path, _reader_of(path, file)))
        if is_wrapped:
            raise SourceError(
                f"{path} is one JSON object over several lines; write the list of records in it alone to a file, such "
                f"as jq .annotations {path.name}"
            )
        # A first line with such a field is a record if more lines follow.
        if (match := _OBJECT_OF_RECORDS.match(head)) and _is_one_line(data):
            name = match[1].decode(errors="replace")
            raise SourceError(
                f"{path} is one JSON object; write its list {name} alone to a file: jq .{name} {path.name}"
            )
        return data


def _text_of(path: Path, work_dir: Path) -> Path:
    """Return the file, or its decompressed copy, after `check_text`."""
    data = path
    if path.suffix.lower() in COMPRESSIONS:
        data = converted(path, work_dir, ".jsonl", _decompress)
    check_text(path, data)
    return data


def _head(data: Path) -> bytes:
    with data.open("rb") as stream:
        return stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()


def _is_wrapped(head: bytes) -> bool:
    """Whether a file starts with an object over several lines: JSON lines never break after the brace."""
    return head[:1] == b"{" and head[1:].lstrip(b" \t\r")[:1] == b"\n"


def _is_array(head: bytes, data: Path) -> bool:
    """Whether a file of lines that starts with a bracket is one array of records: a line may be a list of turns."""
    line, end, _ = head.partition(b"\n")
    if end and line.rstrip()[-1:] != b"]":
        return True
    if is_remote(data) or not _is_one_line(data):
        return False
    try:
        first = parse_json(next(_elements(io.BytesIO(head)), b"null"))
    except ValueError:  # longer than `head`
        return False
    return isinstance(first, dict) and not is_turn(first)


def _array_in_lines(path: Path, data: Path, work_dir: Path) -> Path:
    """Write the elements of the array `data`, the decompressed file of `path`, as lines.

    Raises:
        SourceError: it is not a complete array.
    """
    return converted(
        local_copy(data, work_dir), work_dir, ELEMENTS, lambda array, out: _to_jsonl(array, out, path, _elements)
    )


def check_text(path: Path, data: Path) -> None:
    """Refuse files that are not lines of UTF-8, and lines that end in a carriage return alone (old Macs).

    Every line of such a file would be rejected, or the file would be read as a single line.

    Args:
        path: the input, for the message.
        data: the decompressed file.

    Raises:
        SourceError: the content is compressed, is UTF-16 or UTF-32, or its lines end in CR alone.
    """
    with data.open("rb") as stream:
        head = stream.read(_HEAD)
    for magic, name in MAGICS.items():
        if head.startswith(magic):
            is_input = data.suffix == path.suffix  # or its copy, if the input is in an object store
            suffix = next((end for end, kind in COMPRESSIONS.items() if kind == name and is_input), None)
            rename = f"rename it to {path.name}{suffix}, or " if suffix else ""
            raise SourceError(f"the content of {path} is compressed ({name}); {rename}decompress it")
    if encoding := next((name for name, pattern in _ENCODINGS.items() if pattern.match(head)), None):
        raise SourceError(
            f"the content of {path} is {encoding}; write it as UTF-8: iconv -f {encoding} -t UTF-8 {path.name}"
        )
    # A single long line is valid, so a CR must also separate two objects.
    if b"\n" not in head and _CR_ENDS.search(head):
        raise SourceError(f"the lines of {path} end in CR alone. Write it with LF: tr '\\r' '\\n'")


def _gaps(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[Any], blocks: Sequence[slice]) -> Iterator[int]:
    """Yield the records that are not at the end of the record before: with blank lines, it may be each."""
    if len(addresses) and addresses[0] > 0:
        yield 0
    for block in blocks:
        ends = addresses[:-1][block] + sizes[:-1][block]
        yield from (np.flatnonzero(addresses[1:][block] > ends) + block.start + 1).tolist()


def _line_ends(stream: BinaryIO, start: int, stop: int) -> int:
    """Number of line ends in bytes [start, stop)."""
    stream.seek(start)
    return sum(stream.read(min(_BLOCK, stop - at)).count(b"\n") for at in range(start, stop, _BLOCK))


def _row(offset: int, line: bytes) -> SourceRecord:
    if len(line) > min(_LONG_LINE, LONGEST_RECORD - 1) and (fault := _fault_of_long(line)):
        return SourceRecord(offset, len(line), None, Reject(Reason.BAD_JSON, fault))
    try:
        return SourceRecord(offset, len(line), parse_json(line.removeprefix(codecs.BOM_UTF8)))
    except orjson.JSONDecodeError as error:
        fault = _fault_of_encoding(line) or _fault_of_end(error) or str(error)
        return SourceRecord(offset, len(line), None, Reject(Reason.BAD_JSON, fault))


def _fault_of_end(error: orjson.JSONDecodeError) -> str:
    """Describe a line that ends within a string, as in a file that was cut; "" for another line.

    orjson reports its line end as a control character in the string.
    """
    text = error.doc.rstrip("\r\n")
    if error.pos < len(text):
        return ""
    try:
        json.loads(text)
    except json.JSONDecodeError as exact:
        if exact.msg.startswith("Unterminated string"):
            return f"the line ends within the string that starts at column {exact.colno}; the file may be cut"
    except RecursionError:
        pass
    return ""


def _fault_of_encoding(line: bytes) -> str:
    """Name the byte that is not UTF-8; "" if all are."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return not_utf8(line[error.start])
    return ""


def _fault_of_long(line: bytes) -> str:
    """Reason why a long line is not parsed, which needs ten times its memory; "" if it may be a record."""
    if len(line) >= LONGEST_RECORD:
        return f"a line must be shorter than {LONGEST_RECORD / 1e6:,.0f} MB; {ARRAY_REMEDY}"
    size = f"the line has {len(line) / 1e6:,.0f} MB"
    head = line[:_HEAD].removeprefix(codecs.BOM_UTF8).lstrip()
    if head[:1] != b"[":
        return ""
    try:
        first = parse_json(next(_elements(io.BytesIO(head)), b"null"))
    except ValueError:  # invalid, or longer than `head`
        return ""
    return "" if is_turn(first) else f"{size} and looks like a JSON array of records; {ARRAY_REMEDY}"


def _decompress(path: Path, out: BinaryIO) -> None:
    import zstandard

    if path.stat().st_size == 0:
        raise SourceError(f"{path} is empty (0 bytes), so it is not a compressed file. Copy it again.")
    try:
        if path.suffix.lower() == ".gz":
            with path.open("rb") as source, gzip.open(source) as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        else:
            _decompress_frames(path, out)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise_resource_error(error, path)
        # Both formats limit the memory here, as a small file could allocate gigabytes.
        if "too much memory" in str(error):
            raise SourceError(f"{path} was compressed with --long; decompress it: zstd -d --long=31") from error
        if "Memory usage limit" in str(error):
            raise SourceError(
                f"{path} needs more than {_XZ_MEMORY >> 20} MiB to decompress; decompress it: unxz"
            ) from error
        raise SourceError(f"{path} cannot be decompressed: {error}. Copy the complete file again.") from error


def _decompress_frames(path: Path, out: BinaryIO) -> None:
    """Decompress all frames; stream readers would accept a file that ends inside a frame, or is damaged after one."""
    import zstandard

    suffix = path.suffix.lower()
    frame: Any = None
    with path.open("rb") as stream:
        while block := stream.read(_COMPRESSED_BLOCK):
            # A file may consist of several frames, as pzstd, pbzip2 and `cat` write them.
            while block := block.lstrip(b"\0") if frame is None and suffix == ".xz" else block:  # padding of xz
                if frame is None and suffix == ".zst":
                    frame = zstandard.ZstdDecompressor().decompressobj()
                elif frame is None:
                    frame = bz2.BZ2Decompressor() if suffix == ".bz2" else lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
                out.write(frame.decompress(block))
                block = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the last frame is truncated")


def _is_one_line(file: Path) -> bool:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = data.find(b"\n")
        return end < 0 or not data[end : end + 4096].strip()


class _NoListError(Exception):
    """A JSON object is not one of the objects of records."""


def _reader_of(path: Path, data: Path) -> Callable[[BinaryIO], Iterator[bytes]]:
    """Find the function that yields the records of the JSON object in `data`, the decompressed file of `path`.

    Raises:
        _NoListError: the object has another form.
        SourceError: it is a COCO file without captions, or a list of datasets.
    """
    firsts: dict[str, Any] = {}  # first element of each list; the first member itself if it is an object
    try:
        with data.open("rb") as stream:
            for name, value in _members(stream):
                if not firsts and value[:1] == b"{":
                    firsts[name] = orjson.loads(value)
                    if not firsts[name].keys().isdisjoint(_BY_ID):
                        return _records_by_id
                is_list = value[:1] == b"["
                firsts.setdefault(name, orjson.loads(next(_elements(io.BytesIO(value)), b"0")) if is_list else None)
    except ValueError as error:  # not JSON: reported as before, by line
        raise _NoListError from error
    found = {name: set(first) for name, first in firsts.items() if isinstance(first, dict)}
    if {"id", "file_name"} <= found.get("images", set()) and "image_id" in found.get("annotations", set()):
        if "caption" not in found["annotations"]:
            fields = ", ".join(sorted(found["annotations"]))
            raise SourceError(
                f"the annotations of {path} must have a caption, got {fields}. Pass the captions of COCO."
            )
        return _coco_records
    # The list of LLaVA-NeXT, lmms-engine and axolotl, and the mapping of InternVL.
    is_internvl = any({"root", "annotation"} <= fields for fields in found.values())
    if is_internvl or not found.get("datasets", set()).isdisjoint(("path", "json_path")):
        raise SourceError(f"{path} must contain records, got a list of datasets. Pass it as --config {path}.")
    if "data" in found and firsts.keys() <= _ABOUT_DATA | {"data"}:
        return _records_of_data
    raise _NoListError


def _members(stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the JSON text of each member of the object in `stream`.

    Raises:
        ValueError: the object does not end, or a member has no name.
    """
    for element in _elements(stream, _LONGEST_MEMBER):
        if (name := _MEMBER.match(element)) is None:
            raise ValueError(f"a member has no name: {element[:40].decode(errors='replace')}")
        yield orjson.loads(name[1]), element[name.end() :]


def _records_by_id(stream: BinaryIO) -> Iterator[bytes]:
    for name, value in _members(stream):
        if value[:1] != b"{":
            raise ValueError(f"the value of {name!r} is not a record")
        # An `id` in the record comes later in the text, and counts.
        yield b'{"id":' + orjson.dumps(name) + (b"" if value[1:].lstrip(_SPACE) == b"}" else b",") + value[1:]


def _records_of_data(stream: BinaryIO) -> Iterator[bytes]:
    yield from _elements(io.BytesIO(_lists(stream)["data"]))


def _coco_records(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the annotations, each with the fields of its image and its file name as `image`."""
    lists = _lists(stream)
    images = of_type(orjson.loads(lists["images"]), list, "the value of images")
    by_id = {_image_id(of_type(image, dict, "an entry of images").get("id")): image for image in images}
    if len(by_id) < len(images):
        raise ValueError("two images have the same id")
    seen = set()
    for element in _elements(io.BytesIO(lists["annotations"])):
        try:
            annotation = orjson.loads(element)
            image = by_id.get(_image_id(of_type(annotation, dict)["image_id"]), {})
        except (ValueError, LookupError):  # rejected like a line that is not a record
            yield element
            continue
        seen.add(annotation["image_id"])
        # The text of the annotation, since parsing it here would shorten numbers over 64 bits. Its fields come after
        # the fields of the image, and count.
        yield orjson.dumps({"image": image.get("file_name"), **image})[:-1] + b"," + element[1:]
    if missing := by_id.keys() - seen:
        first = min(missing, key=str)
        _log.warning("%s: %d of %d images have no caption, such as %s", stream.name, len(missing), len(by_id), first)


def _image_id(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise ValueError(f"an id of an image is {type(value).__name__}, not a number or a string")
    return value


def _lists(stream: BinaryIO) -> dict[str, bytes]:
    lists: dict[str, bytes] = {}
    for name, value in _members(stream):
        if name in lists:
            raise ValueError(f"{name} occurs twice")
        lists[name] = value
    return lists


def _to_jsonl(data: Path, out: BinaryIO, path: Path, records: Callable[[BinaryIO], Iterator[bytes]]) -> None:
    """Write a line per record of `data`, the decompressed file of `path`: what `records` yields."""
    with data.open("rb") as stream:
        stream.seek(len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0)
        try:
            for element in records(stream):
                # Between tokens both bytes are whitespace to JSON; inside strings neither is allowed.
                out.write(element.replace(b"\n", b"\r") + b"\n")
        except ValueError as error:
            kind = "a complete JSON array" if records is _elements else "a complete JSON object of records"
            raise SourceError(f"{path} is not {kind}: {error}. Write the file again.") from error


def _elements(stream: BinaryIO, longest: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of each element of the array, or member of the object, in `stream`.

    Args:
        stream: the array or object.
        longest: bytes of the longest element; None for the limit of lines.

    Raises:
        ValueError: the array or object does not end, ends early, or has an empty or too long element.
    """
    longest = longest or LONGEST_RECORD
    data, offset = b"", 0  # bytes that are not emitted yet, and their offset in the file
    end = b""  # the bracket that closes the array or object
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
                first, end = (at, _ENDS[token]) if depth == 1 else (first, end)
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
                _check_end(data[at:], stream, token, end, offset + at)
                return
        if len(data) - first > longest:  # before the block doubles
            raise ValueError(f"element {count} has more than {longest / 1e6:,.0f} MB, the limit")
    raise ValueError(f"it ends at byte {offset + len(data)} inside element {count}")


def _check_end(rest: bytes, stream: BinaryIO, token: bytes, end: bytes, at: int) -> None:
    extra = f"extra data after the JSON {'array' if end == b']' else 'object'} at byte {at}"
    if token != end or rest.strip(_SPACE):
        raise ValueError(extra)
    while block := stream.read(_BLOCK):
        if block.strip(_SPACE):
            raise ValueError(extra)
