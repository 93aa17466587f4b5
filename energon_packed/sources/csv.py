"""CSV and TSV files with a header line in; records of strings and JSON cells out. Rewritten once as Arrow.

A row with another number of cells than the header, or with bytes that are not UTF-8, rejects only itself.
"""

import contextlib
import csv as python_csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TextIO

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from energon_packed.arrays import blocks
from energon_packed.errors import Reason, Reject
from energon_packed.records.exact_json import parse_json
from energon_packed.sources.arrow import ArrowSource, Row
from energon_packed.sources.base import SourceRecord
from energon_packed.sources.convert import BATCH_ROWS, arrow_errors, converted, local_copy, not_utf8, write_batches
from energon_packed.sources.json import check_text

_LINE, _FAULT = "\0line", "\0fault"  # columns of the copy: first line of the row, and why it cannot be read
_LARGEST_CELL = 256 << 20  # characters, also of a line of the file
_TURN_COLUMNS = ("prompts", "captions")


class CsvSource(ArrowSource):
    """A CSV or TSV file.

    Attributes:
        json_columns: columns whose cells contain JSON.
        quoting: of the csv module.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")
    json_columns: ClassVar[tuple[str, ...]] = (
        *("messages", "conversations", "images", "videos", "video", "tools", "input_ids", "labels", "loss_mask"),
        "patch_positions",
    )
    quoting: ClassVar[int] = python_csv.QUOTE_MINIMAL

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Rewrite the file."""

        def convert(source: Path, out: BinaryIO) -> None:
            _to_arrow(source, local_copy(source, work_dir), out, cls.quoting)

        return converted(path, work_dir, ".arrow", convert)

    def line_numbers(
        self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[Any], out: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Look up the first line of each row in the converted copy."""
        with pa.memory_map(str(self.data)) as source:
            column = pa.ipc.open_file(source).read_all()[_LINE]
            lines = np.empty(len(addresses), dtype=np.int64) if out is None else out
            for block in blocks(len(addresses)):
                own = addresses[block]
                lines[block] = column.slice(own[0], own[-1] - own[0] + 1).to_numpy()[own - own[0]]
            return lines

    def row(self, entry: Row) -> SourceRecord:
        """Convert column values; a row with a fault is rejected."""
        index, values = entry
        if isinstance(values, dict):
            values = dict(values)
            del values[_LINE]
            if fault := values.pop(_FAULT):
                values = Reject(Reason.BAD_JSON, fault)
        return super().row((index, values))

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """Parse JSON cells. Prompts and captions become lists only if all of them are JSON lists of strings."""
        out = {
            name: _json_cell(value) if name in self.json_columns else value or None for name, value in values.items()
        }
        # A caption that happens to start with a bracket must not turn the other column into a list.
        turns = {name: _json_cell(out[name]) for name in _TURN_COLUMNS if out.get(name)}
        if all(_are_texts(value) for value in turns.values()):
            out |= turns
        return out


def _to_arrow(path: Path, data: Path, out: BinaryIO, quoting: int) -> None:
    """Write the rows of `data`, which is `path` or its local copy."""
    check_text(path, data)
    with arrow_errors(path, "cannot be read as CSV in UTF-8 with a header line"):
        rows = _rows(data, "\t" if path.suffix.lower() == ".tsv" else ",", quoting)
        _, names = next(rows, (0, []))
        if not names:
            raise ValueError("the file is empty")
        fault = next(filter(None, map(_fault_of_text, names)), None)
        if fault is None and any("\0" in name for name in names):
            fault = "a name has a NUL byte, so the file is not text"
        if fault is not None:
            raise ValueError(f"in the header line: {fault}")
        if names.count("") > 1:  # spreadsheets write trailing delimiters; values below them become unused fields
            names = [name or f"column {number}" for number, name in enumerate(names, start=1)]
        schema = pa.schema([*((name, pa.string()) for name in names), (_LINE, pa.int64()), (_FAULT, pa.string())])
        write_batches(schema, _batches(rows, schema), out, path)


def _bounded(stream: TextIO) -> Iterator[str]:
    """Yield the lines of a file; a line without an end is not read to the end of the file."""
    while line := stream.readline(_LARGEST_CELL):
        if len(line) == _LARGEST_CELL:
            raise ValueError(f"a line must be shorter than {_LARGEST_CELL / 1e6:,.0f} million characters")
        yield line


def _rows(path: Path, delimiter: str, quoting: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the cells of each row; bytes that are not UTF-8 are surrogates.

    A stray quote at the start of a cell is refused: everything up to the next quote would become a single cell. RFC
    4180 requires a delimiter or a line end after a closing quote.
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        # The limit is global in the csv module, so it is restored afterwards.
        before = python_csv.field_size_limit(_LARGEST_CELL)
        quotes: Any = quoting  # typeshed has its values alone
        rows = python_csv.reader(_bounded(stream), delimiter=delimiter, quoting=quotes, strict=True)
        line = 1
        try:
            for row in rows:
                if row:  # a blank line is not a row
                    yield line, row
                line = rows.line_num + 1
        except python_csv.Error as error:
            if "field larger than field limit" in str(error):
                raise ValueError(
                    f"in the row at line {line}: a cell must have at most {_LARGEST_CELL / 1e6:,.0f} million "
                    "characters. Fix the quotes, or convert the file to JSONL."
                ) from error
            ends = "end of data" in str(error)
            fault = "the file ends inside a quoted cell" if ends else "text follows the closing quote of a cell"
            raise ValueError(
                f"in the row at line {line}: {fault}. A cell that starts with a quote must end with a quote, "
                'with "" for each quote inside. Fix the quotes, or convert the file to JSONL.'
            ) from error
        finally:
            python_csv.field_size_limit(before)


def _batches(rows: Iterator[tuple[int, list[str]]], schema: Any) -> Iterator[Any]:
    """Yield the rows as Arrow batches; a faulty row has its fault, and no cells."""
    count = len(schema) - 2
    while part := list(islice(rows, BATCH_ROWS)):
        table = [[*row, line, _fault(row, count)] for line, row in part]
        table = [row if row[-1] is None else [*[None] * count, *row[-2:]] for row in table]
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*table, strict=True), schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _fault(row: list[str], count: int) -> str | None:
    if len(row) != count:
        return f"the row has {len(row)} cells for {count} columns; quote cells with a delimiter or a line break"
    return next(filter(None, map(_fault_of_text, row)), None)


def _fault_of_text(text: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return not_utf8(ord(text[error.start]) - 0xDC00)
    return None


def _json_cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with contextlib.suppress(orjson.JSONDecodeError):
            return parse_json(value)
    return value or None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
