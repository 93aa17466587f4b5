"""Formats without random access are converted once, streaming, into a file that has it.

The copy is named after the content of the input, so an unchanged input is not converted again.
"""

import codecs
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa

from energon_packed.errors import SourceError
from energon_packed.sources.base import changed_at, file_fingerprint

_BATCH_ROWS = 256
_BATCH_BYTES = 64 << 20
_CSV_BLOCK = 64 << 20  # bytes; a row must fit


def converted(path: Path, folder: Path, suffix: str, convert: Callable[[Path, BinaryIO], None]) -> Path:
    """The converted copy of `path` in `folder`, made when it is not there yet.

    Raises:
        SourceError: the input cannot be read.
    """
    target = folder / f"{file_fingerprint(path)[:16]}-{changed_at(path)}{suffix}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as out:
            convert(path, out)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def unpack(path: Path, out: BinaryIO) -> None:
    """Decompress a .gz or .zst file."""
    import zstandard

    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        else:
            _unpack_zstd(path, out)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise SourceError(f"{path} cannot be decompressed: {error}; is the file whole?") from error


def json_array_to_jsonl(path: Path, out: BinaryIO) -> None:
    """One line per element of a JSON array."""
    import ijson

    try:
        with path.open("rb") as stream:
            stream.seek(len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0)
            for element in ijson.items(stream, "item"):  # numbers as Decimal: a huge one stops nothing
                try:
                    out.write(orjson.dumps(element, default=float, option=orjson.OPT_APPEND_NEWLINE))
                except TypeError:  # a whole number over 64 bits
                    out.write(json.dumps(element, default=float).encode() + b"\n")
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not a whole JSON array: {' '.join(str(error).split())}") from error


def parquet_to_arrow(path: Path, out: BinaryIO) -> None:
    """Parquet as an uncompressed Arrow file of small batches."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            schema = pa.schema([field.with_type(_plain(field.type)) for field in table.schema_arrow])
            _write_batches(schema, (_without_dictionaries(batch, schema) for batch in _parquet_batches(table)), out)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} is not a Parquet file that can be read: {error}") from error


def _parquet_batches(table: Any) -> Iterator[Any]:
    """Small batches, none over two row groups; of fewer rows where those are large, or too large for pyarrow."""
    for group in range(table.num_row_groups):
        info = table.metadata.row_group(group)
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * info.num_rows // max(info.total_byte_size, 1)))
        done = 0
        while done < info.num_rows:
            try:
                passed = 0
                for batch in table.iter_batches(batch_size=rows, row_groups=[group]):
                    if passed + batch.num_rows > done:
                        yield batch.slice(max(0, done - passed))
                    passed += batch.num_rows
                    done = max(done, passed)
            except pa.ArrowNotImplementedError:  # nested columns whose bytes do not fit one array
                if rows == 1:
                    raise
                rows = max(1, rows // 4)


def csv_to_arrow(path: Path, out: BinaryIO) -> None:
    """CSV with a header line; cells may hold line ends inside quotes."""
    from pyarrow import csv

    try:
        options = {
            "read_options": csv.ReadOptions(block_size=_CSV_BLOCK),
            "parse_options": csv.ParseOptions(newlines_in_values=True),
        }
        names = csv.open_csv(path, **options).schema.names
        reader = csv.open_csv(
            path,
            **options,
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        _write_batches(reader.schema, iter(reader), out)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read as CSV in UTF-8 with a header line: {error}") from error


def _plain(kind: Any) -> Any:
    """A type without dictionaries, also inside lists and structs."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind.fields])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _without_dictionaries(batch: Any, schema: Any) -> Any:
    """Dictionary-encoded columns as plain ones: an Arrow file cannot hold a dictionary that changes."""
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _write_batches(schema: Any, batches: Iterator[Any], out: BinaryIO) -> None:
    with pa.ipc.new_file(out, schema) as writer:
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                writer.write_batch(batch.slice(start, _BATCH_ROWS))


def _unpack_zstd(path: Path, out: BinaryIO) -> None:
    """All frames of a file; the library's own stream reader takes a file cut inside a frame for a whole one."""
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
        raise EOFError("the last frame is cut short")
