"""JSON: an array of records, rewritten once as JSONL; a .json file of JSON lines is read in place.

The elements are cut out of the array as they are written, and each is parsed like a line, so that one that is no JSON
costs itself alone.
"""

import codecs
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

from energon_packed.errors import SourceError
from energon_packed.sources.base import Source
from energon_packed.sources.convert import converted
from energon_packed.sources.jsonl import JsonlSource, check_line_ends, decompressed

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
