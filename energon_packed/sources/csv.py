"""CSV and TSV with a header line, rewritten once as an Arrow file of texts; JSON in cells becomes lists."""

from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import orjson
import pyarrow as pa

from energon_packed.errors import SourceError
from energon_packed.records.json_text import parse_json
from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source
from energon_packed.sources.convert import ARROW_ERRORS, converted, one_line, write_batches

_BLOCK = 64 << 20  # bytes; a row must fit
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
        _check_end(path)
        options = {
            "read_options": csv.ReadOptions(block_size=_BLOCK),
            "parse_options": csv.ParseOptions(
                newlines_in_values=True, delimiter="\t" if path.suffix.lower() == ".tsv" else ","
            ),
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


def _check_end(path: Path) -> None:
    """Refuse a file that ends inside quotes: the reader takes what is there of the cell."""
    quotes, last = 0, b""
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            quotes, last = quotes + block.count(b'"'), block[-1:]
    if quotes % 2 and last not in (b"\n", b"\r"):
        raise ValueError(
            "it ends inside a quoted cell; copy it again, or, if it is complete, end it with a line break"
        )


def _json_cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except orjson.JSONDecodeError:
            return value
    return value or None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
