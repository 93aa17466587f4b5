"""CSV and TSV with a header line, rewritten once as an Arrow file of texts; JSON in cells becomes lists."""

import csv as python_csv
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import orjson
import pyarrow as pa

from energon_packed.errors import SourceError
from energon_packed.records.fields import parse_json
from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source
from energon_packed.sources.convert import ARROW_ERRORS, converted, one_line, write_batches

_BLOCK = 64 << 20  # bytes; a row must fit
_LARGEST_CELL = 2**31 - 1
_TURN_COLUMNS = ("prompts", "captions")


class CsvSource(ArrowSource):
    """A CSV file, or one with tabs.

    Attributes:
        json_columns: whose cells hold JSON.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")
    json_columns: ClassVar[tuple[str, ...]] = (
        *("messages", "conversations", "images", "videos", "video", "tools", "input_ids", "labels", "loss_mask"),
        "patch_positions",
    )

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Rewrite it in `work_dir`."""
        return cls(path, data=converted(path, work_dir, ".arrow", _to_arrow), image_root=image_root)

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """Lists where cells hold JSON. Prompts and captions are lists where both are; else texts."""
        out = {
            name: _json_cell(value) if name in self.json_columns else value or None for name, value in values.items()
        }
        turns = {name: _json_cell(out[name]) for name in _TURN_COLUMNS if out.get(name)}
        if all(_are_texts(value) for value in turns.values()):
            out |= turns
        return out


def _to_arrow(path: Path, out: BinaryIO) -> None:
    """Cells may hold line ends inside quotes."""
    from pyarrow import csv

    try:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        _check_quotes(path, delimiter)
        options = {
            "read_options": csv.ReadOptions(block_size=_BLOCK),
            "parse_options": csv.ParseOptions(newlines_in_values=True, delimiter=delimiter),
        }
        names = csv.open_csv(path, **options).schema.names
        reader = csv.open_csv(
            path,
            **options,
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        write_batches(reader.schema, iter(reader), out)
    except ARROW_ERRORS as error:
        raise SourceError(f"{path} cannot be read as CSV in UTF-8 with a header line: {one_line(error)}") from error


def _check_quotes(path: Path, delimiter: str) -> None:
    """Refuse a quote that opens a cell and is no part of the format: all up to the next one would be one cell.

    Arrow's reader takes it as the start of a quoted cell, whatever follows the next quote, and ends such a cell with
    the file. The rule is that of RFC 4180: a delimiter or the end of the line follows a closing quote.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        before = python_csv.field_size_limit(_LARGEST_CELL)
        rows = python_csv.reader(stream, delimiter=delimiter, strict=True)
        begin = 1
        try:
            for _ in rows:
                begin = rows.line_num + 1
        except python_csv.Error as error:
            ends = "end of data" in str(error)
            what = "the file ends inside a quoted cell" if ends else "text follows the closing quote of a cell"
            raise ValueError(
                f"in the row that begins at line {begin}: {what}; a cell that begins with a quote must end with one, "
                'and hold "" for each inside: write it so, or convert the file to JSONL'
            ) from error
        finally:
            python_csv.field_size_limit(before)


def _json_cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except orjson.JSONDecodeError:
            return value
    return value or None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
