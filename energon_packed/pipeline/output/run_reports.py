"""The only readers of the reports of `pack`. Input: lengths.parquet or rejects.jsonl, untrusted. Output: checked rows.

lengths.parquet    `open_lengths`: the open table; `read_lengths`: batches of rows; `length_row`: a row as plain values
rejects.jsonl      `read_rejects`: the lines as objects with the fields of `Rejected`
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from energon_packed.errors import EnergonPackedError, FormatError
from energon_packed.files import open_regular
from energon_packed.system import raise_resource_error

FINGERPRINT = b"fingerprint"
"""Key in the metadata of lengths.parquet: `fingerprint` of the packing.json of its run."""
_STRINGS, _NUMBERS = ("source", "id", "status", "pack", "shard"), ("row", "line", "length", "sample", "group")
_REQUIRED = ("source", "row", "id", "status")  # not null
_BATCH_ROWS = 1 << 14
_BUFFER = 1 << 20  # bytes of each column that are read at a time: a row group may be the whole file
_LONGEST_LINE = 1 << 20  # bytes of a line of rejects.jsonl; details are shortened to 500 characters
_REMEDY = "Run the pack command of the dataset again, which keeps its shards and writes the reports"


@contextmanager
def open_lengths(file: Path) -> Iterator[Any]:
    """Open lengths.parquet as a `pyarrow.parquet.ParquetFile`.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it is damaged, or a column has another type; also for errors of pyarrow in the block.
        ResourceError: memory or the disk fail.
    """
    try:
        with (
            open_regular(file) as stream,
            pq.ParquetFile(stream, buffer_size=_BUFFER, pre_buffer=False) as table,
        ):
            for column in table.schema_arrow:
                kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
                is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
                if column.name in _STRINGS and not is_string:
                    raise FormatError(f"{file}: column {column.name} must contain strings, got {kind}. {_REMEDY}.")
                if column.name in _NUMBERS and not pa.types.is_integer(kind):
                    raise FormatError(f"{file}: column {column.name} must contain integers, got {kind}. {_REMEDY}.")
            yield table
    except (FileNotFoundError, EnergonPackedError):
        raise
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: strings that are not UTF-8
        raise_resource_error(error, file)
        raise FormatError(f"{file} cannot be read: {' '.join(str(error).split())[:300]}. {_REMEDY}.") from error


def read_lengths(table: Any, columns: Sequence[str], group: int | None = None) -> Iterator[Any]:
    """Yield the rows of an open table, or of one of its row groups, as record batches of bounded size.

    Raises:
        FormatError: a column is missing.
    """
    if missing := [name for name in columns if name not in table.schema_arrow.names]:
        raise FormatError(f"lengths.parquet must have the columns {', '.join(missing)} to find records. {_REMEDY}.")
    groups = None if group is None else [group]
    yield from table.iter_batches(_BATCH_ROWS, row_groups=groups, columns=list(columns))


def length_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row, in which the values that every record has are not null.

    Raises:
        FormatError: a value is null.
    """
    if missing := [name for name in _REQUIRED if row[name] is None]:
        raise FormatError(f"lengths.parquet has a row without {missing[0]}. {_REMEDY}.")
    return row


def read_rejects(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of rejects.jsonl, with the fields `source`, `row`, `id`, `reason` and `detail`.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: a line is not such an object, or is too long.
        ResourceError: memory or the disk fail.
    """
    number = 0
    try:
        with open_regular(file) as stream:
            while line := stream.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE:
                    raise ValueError(f"it has {_LONGEST_LINE:,} bytes or more")
                value = orjson.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("it is not an object")
                for name in ("source", "id", "reason", "detail"):
                    if not isinstance(value.get(name), str):
                        raise ValueError(f"{name} must be a string")
                for name in ("row", "line"):
                    if not isinstance(value.get(name), int | None):
                        raise ValueError(f"{name} must be an integer or null")
                yield value
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise_resource_error(error, file)
        raise FormatError(f"{file}, line {number}, cannot be read: {error}. {_REMEDY}.") from error
