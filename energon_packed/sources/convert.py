"""Formats without random access are converted once, streaming, into a file that has it.

The copy is named after the content of the input, so an unchanged input is not converted again.
"""

import gzip
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


def converted(path: Path, folder: Path, suffix: str, convert: Callable[[Path, BinaryIO], None]) -> Path:
    """The converted copy of `path` in `folder`, made when it is not there yet.

    Raises:
        SourceError: the input cannot be read.
    """
    target = folder / f"{file_fingerprint(path)[:16]}-{changed_at(path)}{suffix}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{target.name}.{os.getpid()}"
    try:
        with aside.open("wb") as out:
            convert(path, out)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)
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
            for element in ijson.items(stream, "item", use_float=True):
                out.write(orjson.dumps(element, option=orjson.OPT_APPEND_NEWLINE))
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not a whole JSON array: {' '.join(str(error).split())}") from error


def parquet_to_arrow(path: Path, out: BinaryIO) -> None:
    """Parquet as an uncompressed Arrow file of small batches."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            _write_batches(table.schema_arrow, table.iter_batches(batch_size=_BATCH_ROWS), out)
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{path} is not a Parquet file: {error}") from error


def csv_to_arrow(path: Path, out: BinaryIO) -> None:
    """CSV with a header line; cells may hold line ends inside quotes."""
    from pyarrow import csv

    try:
        names = csv.open_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True)).schema.names
        reader = csv.open_csv(
            path,
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        _write_batches(reader.schema, iter(reader), out)
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{path} is not a CSV file with a header: {error}") from error


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
