"""Parquet, rewritten once as an uncompressed Arrow file of small batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pyarrow as pa

from energon_packed.errors import SourceError
from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source
from energon_packed.sources.convert import ARROW_ERRORS, BATCH_ROWS, converted, nested_type, one_line, write_batches

_BATCH_BYTES = 64 << 20


class ParquetSource(ArrowSource):
    """A Parquet file."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Rewrite it in `work_dir`."""
        return cls(path, data=converted(path, work_dir, ".arrow", _to_arrow), image_root=image_root)


def _to_arrow(path: Path, out: BinaryIO) -> None:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            schema = pa.schema([field.with_type(nested_type(field.type, _plain)) for field in table.schema_arrow])
            write_batches(schema, (_without_dictionaries(batch, schema) for batch in parquet_batches(table)), out)
    except ARROW_ERRORS as error:
        raise SourceError(f"{path} is not a readable Parquet file: {one_line(error)}") from error


def parquet_batches(table: Any) -> Iterator[Any]:
    """Small batches, none over two row groups; of fewer rows where those are large, or too large for pyarrow.

    Raises:
        pyarrow.ArrowInvalid: a row group has more or fewer rows than the file says.
    """
    counts = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    if sum(counts) != table.metadata.num_rows:
        raise pa.ArrowInvalid(f"its row groups have {sum(counts)} rows in place of {table.metadata.num_rows}")
    for group in range(table.num_row_groups):
        info = table.metadata.row_group(group)
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
                rows = max(1, rows // 4)


def _plain(kind: Any) -> Any:
    """A type of a dictionary as that of its values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _without_dictionaries(batch: Any, schema: Any) -> Any:
    """Dictionary-encoded columns as plain ones: an Arrow file cannot hold a dictionary that changes."""
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
