"""The account of every record: lengths.parquet and rejects.jsonl, streamed chunk by chunk."""

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from energon_packed.files import aside
from energon_packed.pipeline.chunks import STATUSES, TRUNCATED
from energon_packed.pipeline.columns import named, numbers, texts
from energon_packed.pipeline.rejects import TableRejects
from energon_packed.pipeline.table import record_ids
from energon_packed.pipeline.workspace import Workspace

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
        for start, ids, chunk_details in record_ids(table):
            rows = np.arange(start, start + len(ids))
            source, local = table.locate(rows)
            names = [
                ident if ident is not None else reader.default_id(int(s), int(r))
                for ident, s, r in zip(ids, source, local, strict=True)
            ]
            part = slice(start, start + len(ids))
            measured = table.length[part]
            columns = [
                named(path_of[source], list(numbered), np.int32),
                numbers(local, np.int64),
                texts(names),
                numbers(measured, np.int32, valid=measured >= 0),
                numbers(table.num_images[part], np.int32),
                named(np.where((status[part] == 0) & (measured > usable_len), cut, status[part]), names_of, np.int8),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA))
            for place in np.flatnonzero(status[part]).tolist():
                reject = rejects.row(start + place, ids[place], chunk_details[place])._asdict()
                out.write(orjson.dumps(reject, option=orjson.OPT_APPEND_NEWLINE))
