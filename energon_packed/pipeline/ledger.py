"""The account of every record: lengths.parquet and rejects.jsonl, streamed chunk by chunk."""

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from energon_packed.pipeline.chunks import STATUSES, TRUNCATED
from energon_packed.pipeline.columns import named, numbers, texts
from energon_packed.pipeline.rejects import TableRejects, record_names
from energon_packed.pipeline.workspace import Workspace
from energon_packed.shards.files import aside

_SCHEMA = pa.schema(
    {
        "source": pa.dictionary(pa.int32(), pa.string()),
        "row": pa.int64(),
        "id": pa.string(),
        "length": pa.int32(),
        "num_images": pa.int32(),
        "status": pa.dictionary(pa.int8(), pa.string()),
    }
)


def write_ledger(rejects: TableRejects, *, usable_len: int, space: Workspace) -> None:
    """Write both files.

    Args:
        rejects: the measured records, and which of them are rejected.
        usable_len: tokens of a row; the status of packed records with more is `truncated`.
        space: where they go. lengths.parquet has source, row, id, length (tokens, null where unknown), num_images and
            status; rejects.jsonl has source, row, id, reason and detail.
    """
    table, reader, status = rejects.table, rejects.reader, rejects.status
    names_of, cut = (*STATUSES, TRUNCATED), len(STATUSES)
    paths = [str(source.path) for source in reader.sources]
    numbered = {path: number for number, path in enumerate(dict.fromkeys(paths))}  # repeated sources have one path
    path_of = np.array([numbered[path] for path in paths], dtype=np.int32)
    with (
        aside(space.lengths) as lengths_aside,
        aside(space.rejects) as rejects_aside,
        pq.ParquetWriter(lengths_aside, _SCHEMA) as writer,
        rejects_aside.open("wb") as out,
    ):
        for chunk in record_names(table, reader):
            part, measured = status[chunk.rows], table.length[chunk.rows]
            columns = [
                named(path_of[chunk.source], list(numbered), np.int32),
                numbers(chunk.local, np.int64),
                texts(chunk.names),
                numbers(measured, np.int32, valid=measured >= 0),
                numbers(table.num_images[chunk.rows], np.int32),
                named(np.where((part == 0) & (measured > usable_len), cut, part), names_of, np.int8),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA))
            for place in np.flatnonzero(part).tolist():
                reject = rejects.row(int(chunk.rows[place]), chunk.names[place], chunk.details[place])._asdict()
                out.write(orjson.dumps(reject, option=orjson.OPT_APPEND_NEWLINE))
