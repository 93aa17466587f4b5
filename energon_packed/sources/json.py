"""JSON: an array of records, rewritten once as JSONL; a .json file of JSON lines is read in place."""

import codecs
import json
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import orjson

from energon_packed.errors import SourceError
from energon_packed.sources.base import Source
from energon_packed.sources.convert import converted
from energon_packed.sources.jsonl import JsonlSource


_TOO_DEEP = b"[" * 1025 + b"]" * 1025 + b"\n"  # deeper than a line may be: it costs the record


class JsonSource(JsonlSource):
    """A .json file."""

    suffixes: ClassVar[tuple[str, ...]] = (".json",)

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Rewrite an array as JSONL in `work_dir`."""
        with path.open("rb") as stream:
            head = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        is_array = head[:1] == b"["
        if head[:1] == b"{" and head[1:].lstrip(b" \t\r")[:1] == b"\n":  # JSON lines never break after the brace
            raise SourceError(
                f"{path} is one JSON object over several lines; write the list of records in it alone to a file, such "
                f"as jq .annotations {path.name}"
            )
        return cls(
            path, data=converted(path, work_dir, ".jsonl", _to_jsonl) if is_array else None, image_root=image_root
        )


def _to_jsonl(path: Path, out: BinaryIO) -> None:
    """One line per element of a JSON array."""
    import ijson

    try:
        with path.open("rb") as stream:
            stream.seek(len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0)
            for element in ijson.items(stream, "item"):  # numbers as Decimal: a huge one stops nothing
                out.write(_line(element))
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not a complete JSON array: {' '.join(str(error).split())}") from error


def _line(element: Any) -> bytes:
    """One element as a line, with the digits that its numbers have."""
    try:
        return orjson.dumps(element, default=_digits, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an integer over 64 bits, a lone surrogate, or deep nesting
        pass
    try:
        return json.dumps(element, default=float).encode() + b"\n"
    except RecursionError:
        return _TOO_DEEP


def _digits(number: Decimal) -> orjson.Fragment:
    return orjson.Fragment(str(number))
