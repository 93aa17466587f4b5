"""Arrow and Parquet files in; table rows as records out, read from a memory-mapped Arrow file.

Image bytes stay in the file until they are used. Parquet is rewritten once as an uncompressed Arrow file of small
batches, since its column chunks have no random access.
"""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa

from energon_packed.errors import Reason, Reject
from energon_packed.files import open_regular
from energon_packed.sources.base import Source, SourceRecord, changed_at
from energon_packed.sources.convert import (
    BATCH_ROWS,
    arrow_errors,
    converted,
    local_copy,
    nested_type,
    one_line,
    refuse_repeated,
    write_batches,
)
from energon_packed.storage import is_remote
from energon_packed.system import most_open

_AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
_NARROW: dict[Any, Any] = {pa.float16(): np.float16, pa.int16(): np.int16}
_MAGIC = b"ARROW1"  # starts an Arrow file; a stream has no magic
_ROWS_AT_A_TIME = 64  # rows may contain images
_BATCH_BYTES = 64 << 20  # of the Arrow copy of a Parquet file
Row = tuple[int, dict[str, Any] | Reject]
"""Index of a table row, and its column values or the reason why it cannot be read."""
_NO_VALUE = (ValueError, OverflowError, LookupError, pa.ArrowException)  # not UTF-8, a time out of range or zone


class ArrowSource(Source):
    """An Arrow IPC file (.arrow, .feather) or stream (as Hugging Face datasets writes)."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather")

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Return the file; of an object, a copy."""
        return local_copy(path, work_dir)

    def extent(self) -> int:
        """Number of table rows."""
        return self._batches().rows

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Read table rows [start, stop)."""
        return map(self.row, self._rows(start, stop))

    def held(self, start: int, stop: int) -> list[Row]:
        """Indices and column values."""
        return list(self._rows(start, stop))

    def _rows(self, start: int, stop: int) -> Iterator[Row]:
        batches = self._batches()
        for first in range(start, stop, _ROWS_AT_A_TIME):
            yield from enumerate(batches.rows_between(first, min(first + _ROWS_AT_A_TIME, stop)), start=first)

    def read(self, address: int, size: int) -> SourceRecord:
        """Read the table row with this index."""
        return self.row((address, next(iter(self._batches().rows_between(address, address + 1)))))

    def row(self, entry: Row) -> SourceRecord:
        """Convert column values."""
        index, values = entry
        if isinstance(values, Reject):
            return SourceRecord(index, 0, None, values)
        # The size is unknown: table rows have no byte ranges in a columnar file.
        return SourceRecord(index, 0, self.record(values))

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """Convert the column values of a table row to a record."""
        if values.get("tools"):
            values["tools"] = _without_nulls(values["tools"])
        messages = values.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("tool_calls"):
                message["tool_calls"] = _without_nulls(message["tool_calls"])
        return values

    def _batches(self) -> "_Batches":
        return _open_batches(self.path, self.data, self.data.stat().st_size, changed_at(self.data))


def _without_nulls(value: Any) -> Any:
    """Drop null keys of objects: a column has a single type, so each row gets the keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _values(row: Any) -> dict[str, Any] | Reject:
    try:
        values: dict[str, Any] = row.to_pylist()[0]
        return values
    except _NO_VALUE as error:
        names = [name for name, column in zip(row.schema.names, row.columns, strict=True) if not _is_read(column)]
        return Reject(Reason.BAD_JSON, f"the column {', '.join(names)} has no value: {one_line(error)}"[:300])


def _keep_dtypes(batch: Any, rows: Sequence[dict[str, Any] | Reject]) -> None:
    """Make arrays of lists of float16 and int16, as Python numbers have no such types; other lists stay lists."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if kind != column.type and (dtype := _NARROW.get(kind)) is not None:
            for row in rows:
                if isinstance(row, dict) and row[name] is not None:
                    with contextlib.suppress(ValueError):  # lists of different lengths
                        values = np.asarray(row[name])
                        row[name] = values.astype(dtype) if values.dtype.kind in "if" else row[name]  # not with nulls


def _is_read(column: Any) -> bool:
    try:
        column.to_pylist()
    except _NO_VALUE:
        return False
    return True


def _check_footer(source: Any, batches: int) -> None:
    """Refuse a file whose footer lists fewer record batches than the stream before it contains.

    The file format is the stream format between a magic of 8 bytes and a footer (Arrow columnar format, "IPC File
    Format").

    Raises:
        ArrowInvalid: the footer lists fewer batches.
    """
    source.seek(8)
    count = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(source):
            count += message.type == "record batch"
    except pa.ArrowException:  # files of old versions have no end of the stream
        pass
    if count > batches:
        raise pa.ArrowInvalid(f"its footer names {batches} of {count} record batches")


def _check_end(source: Any) -> None:
    """Refuse a stream without an end marker, and data after the stream; the reader has read to its end.

    A writer that is closed writes an end: a length of 0, after a continuation marker since format version 5 (Arrow
    columnar format, "IPC Streaming Format"). The format allows a stream without an end, but no reader can distinguish
    it from a stream that was cut between two batches.

    Raises:
        ArrowInvalid: the end marker is missing, or data follows it.
    """
    end, size = source.tell(), source.size()
    if end < size:
        raise pa.ArrowInvalid(f"its stream ends at byte {end} of {size}, and more follows: write one stream to a file")
    if source.read_at(4, size - 4) != bytes(4):
        raise pa.ArrowInvalid("its stream has no end, so batches may be missing: close its writer, or copy it again")


class _Batches:
    """Record batches of a file, with random access by table row."""

    def __init__(self, path: Path, table: Path) -> None:
        """Open the Arrow file `path` of the input `table`."""
        with arrow_errors(path, "is not an Arrow file or stream, or is cut"):
            source = pa.memory_map(str(path))
            try:
                reader = pa.ipc.open_file(source)
                _check_footer(source, reader.num_record_batches)
                counts = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
                names, read = reader.schema.names, reader.get_batch
            except pa.ArrowInvalid:
                # A damaged file must not be read as a stream, which would return the batches before the damage.
                if source.size() >= len(_MAGIC) and source.read_at(len(_MAGIC), 0) == _MAGIC:
                    raise
                source.seek(0)
                rows = pa.ipc.open_stream(source).read_all()
                names, batches = rows.schema.names, rows.to_batches()
                _check_end(source)
                counts = [batch.num_rows for batch in batches]
                read = batches.__getitem__
        refuse_repeated(names, table)
        self._path = path
        # Random reads of neighbors hit the same batch; each batch is validated when it is loaded.
        self._batch = lru_cache(maxsize=4)(lambda index: self._checked(read, index))
        self._starts = list(itertools.accumulate(counts, initial=0))
        self.rows: int = self._starts[-1]

    def _checked(self, read: Callable[[int], Any], index: int) -> Any:
        """Validate a batch: offsets outside its buffers could crash the process."""
        with arrow_errors(self._path, f"is damaged in record batch {index}", "; copy or write it again"):
            batch = read(index)
            try:
                batch.validate(full=True)
            # Strings that are not UTF-8 reject only their rows; any other fault makes the file unusable.
            except pa.ArrowInvalid:
                for column in batch.columns:
                    column.view(nested_type(column.type, lambda kind: _AS_BYTES.get(kind, kind))).validate(full=True)
        return batch

    def rows_between(self, start: int, stop: int) -> Iterator[dict[str, Any] | Reject]:
        """Yield the column values of each row, or the reason why it cannot be read."""
        while start < stop:
            index = bisect.bisect_right(self._starts, start) - 1
            count = min(stop, self._starts[index + 1]) - start
            part = self._batch(index).slice(start - self._starts[index], count)
            try:
                rows = part.to_pylist()
            # One bad value makes the whole slice fail, so its rows are read separately to reject only the bad row.
            except _NO_VALUE:
                rows = [_values(part.slice(offset, 1)) for offset in range(count)]
            _keep_dtypes(part, rows)
            yield from rows
            start += count


# Size and time of change are arguments only to open a changed file again.
@lru_cache(maxsize=most_open(64))
def _open_batches(table: Path, path: Path, size: int, changed: int) -> _Batches:
    """Open a file once per process and version of the file."""
    return _Batches(path, table)


class ParquetSource(ArrowSource):
    """A Parquet file."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Rewrite the file."""
        return converted(path, work_dir, ".arrow", _to_arrow)


def _to_arrow(path: Path, out: BinaryIO) -> None:
    import pyarrow.parquet as pq

    with (
        arrow_errors(path, "is not a readable Parquet file", ". Copy the complete file again."),
        pq.ParquetFile(_opened(path)) as table,
    ):
        schema = pa.schema([field.with_type(nested_type(field.type, _plain)) for field in table.schema_arrow])
        write_batches(schema, (_without_dictionaries(batch, schema) for batch in parquet_batches(table)), out, path)


def _opened(path: Path) -> Any:
    """Return what pyarrow opens: byte ranges of an object, or the path, which it reads without Python."""
    return open_regular(path) if is_remote(path) else path


def parquet_batches(table: Any) -> Iterator[Any]:
    """Read small batches within row groups, with fewer rows if rows are large or too large for pyarrow.

    Raises:
        pyarrow.ArrowInvalid: a row group has more or fewer rows than its metadata.
    """
    # A damaged footer may list fewer rows than the row groups contain, which would silently drop records.
    counts = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    if sum(counts) != table.metadata.num_rows:
        raise pa.ArrowInvalid(f"its row groups have {sum(counts)} rows in place of {table.metadata.num_rows}")
    for group in range(table.num_row_groups):
        info = table.metadata.row_group(group)
        # Rows with large images get smaller batches, to bound the memory of the conversion.
        rows = max(1, min(BATCH_ROWS, _BATCH_BYTES * info.num_rows // max(info.total_byte_size, 1)))
        done = 0
        while done < info.num_rows:
            try:
                passed = 0
                for batch in table.iter_batches(batch_size=rows, row_groups=[group]):
                    if passed + batch.num_rows > done:
                        yield batch.slice(max(0, done - passed))
                    passed += batch.num_rows
                    done = max(done, passed)
                if passed != info.num_rows:
                    raise pa.ArrowInvalid(f"row group {group} has {passed} rows in place of {info.num_rows}")
            except pa.ArrowNotImplementedError:  # nested columns whose bytes do not fit one array
                if rows == 1:
                    raise
                rows = max(1, rows // 4)  # read the group again in smaller batches; rows that were yielded are skipped


def _plain(kind: Any) -> Any:
    """Replace a dictionary type by the type of its values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _without_dictionaries(batch: Any, schema: Any) -> Any:
    """Decode dictionary columns: an Arrow file cannot contain a dictionary that changes between batches."""
    columns = [  # `RecordBatch.cast` fails for slices with nested columns, also if their type is the same
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
