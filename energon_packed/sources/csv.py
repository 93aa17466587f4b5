"""CSV and TSV files with a header line in; records of strings and JSON cells out. Rewritten once as Arrow."""

import contextlib
import csv as python_csv
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import orjson
import pyarrow as pa

from energon_packed.records.fields import parse_json
from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source
from energon_packed.sources.convert import arrow_errors, converted, local_copy, write_batches

_BLOCK = 64 << 20  # bytes; a row must fit
_LARGEST_CELL = 2**31 - 1
_TURN_COLUMNS = ("prompts", "captions")


class CsvSource(ArrowSource):
    """A CSV or TSV file.

    Attributes:
        json_columns: columns whose cells contain JSON.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")
    json_columns: ClassVar[tuple[str, ...]] = (
        *("messages", "conversations", "images", "videos", "video", "tools", "input_ids", "labels", "loss_mask"),
        "patch_positions",
    )

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Rewrite the file in `work_dir`."""

        def convert(source: Path, out: BinaryIO) -> None:
            _to_arrow(source, local_copy(source, work_dir), out)

        return cls(path, data=converted(path, work_dir, ".arrow", convert), image_root=image_root)

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


def _to_arrow(path: Path, data: Path, out: BinaryIO) -> None:
    """Write the rows of `data`, which is `path` or its local copy."""
    from pyarrow import csv

    with arrow_errors(path, "cannot be read as CSV in UTF-8 with a header line"):
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        _check_quotes(data, delimiter)
        options = {
            "read_options": csv.ReadOptions(block_size=_BLOCK),
            # Quoted cells may contain line breaks.
            "parse_options": csv.ParseOptions(newlines_in_values=True, delimiter=delimiter),
        }
        # The first reader only finds the column names: all columns are read as strings, "007" must not become 7.
        names = csv.open_csv(data, **options).schema.names
        reader = csv.open_csv(
            data, **options, convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        )
        if names.count("") > 1:  # spreadsheets write trailing delimiters; values below them become unused fields
            names = [name or f"column {number}" for number, name in enumerate(names, start=1)]
        schema = pa.schema([(name, pa.string()) for name in names])
        write_batches(schema, (pa.RecordBatch.from_arrays(part.columns, schema=schema) for part in reader), out, path)


def _check_quotes(path: Path, delimiter: str) -> None:
    """Refuse a stray quote at the start of a cell: everything up to the next quote would become a single cell.

    Arrow's reader accepts it as the start of a quoted cell, whatever follows the next quote, and ends such a cell at
    the end of the file. RFC 4180 requires a delimiter or a line end after a closing quote.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        # The limit is global in the csv module, so it is restored afterwards.
        before = python_csv.field_size_limit(_LARGEST_CELL)
        rows = python_csv.reader(stream, delimiter=delimiter, strict=True)
        line = 1
        try:
            for _ in rows:
                line = rows.line_num + 1
        except python_csv.Error as error:
            ends = "end of data" in str(error)
            fault = "the file ends inside a quoted cell" if ends else "text follows the closing quote of a cell"
            raise ValueError(
                f"in the row at line {line}: {fault}. A cell that starts with a quote must end with a quote, "
                'with "" for each quote inside. Fix the quotes, or convert the file to JSONL.'
            ) from error
        finally:
            python_csv.field_size_limit(before)


def _json_cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with contextlib.suppress(orjson.JSONDecodeError):
            return parse_json(value)
    return value or None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
