"""Reports of the rejected records of a measured input.

Input: the RecordTable with the status of every record. Output: lengths.parquet and rejects.jsonl, a RejectReport in
memory, or a RejectLimitError. `pack`, `lengths` and `plan_in_memory` use this module, so that the same file has the
same counts, reasons and rows:

    RecordTable ──► TableRejects ──► write_reports (`pack`), RejectReport (planned datasets)
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from energon_packed.arrays import blocks
from energon_packed.encoding.fragments import Fragments, fragment_id
from energon_packed.errors import TOO_LONG, Reason
from energon_packed.files import atomic_path
from energon_packed.pipeline.measured.arrow_columns import dictionary_column, numeric_column, string_column
from energon_packed.pipeline.measured.chunks import FRAGMENT, SPLIT, STATUSES, TRUNCATED, read_rows
from energon_packed.pipeline.measured.table import RecordTable, reject_counts
from energon_packed.pipeline.options import RejectOptions
from energon_packed.pipeline.output.folder import Folder
from energon_packed.pipeline.output.run_reports import FINGERPRINT
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import (
    MOST_ROWS,
    Rejected,
    RejectLimits,
    RejectReport,
    example_of,
    images_detail,
    not_split,
    overlong_detail,
    summary,
)

_SCHEMA = pa.schema(
    {
        "source": pa.dictionary(pa.int32(), pa.string()),
        "row": pa.int64(),
        "line": pa.int64(),
        "id": pa.string(),
        "length": pa.int32(),
        "num_images": pa.int32(),
        "status": pa.dictionary(pa.int8(), pa.string()),
        "pack": pa.string(),
        "sample": pa.int32(),
        "shard": pa.dictionary(pa.int32(), pa.string()),
    }
)
_FEW_VALUES = [name for name in _SCHEMA.names if name not in ("row", "line", "id", "pack")] + [
    "num_videos",
    "num_audios",
]
# The dictionary of the column `status` has later statuses only if they occur, so that other files stay the same.
_ALWAYS_LISTED = STATUSES.index(Reason.AUDIO_COUNT_MISMATCH) + 1
# A row group needs 17 KB of memory until the file is closed, and its rows until it is written.
_GROUP_ROWS = 1 << 16
_DELTAS = {"row": "DELTA_BINARY_PACKED", "line": "DELTA_BINARY_PACKED"}


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRejects:
    """Rejected records of a measured input.

    Attributes:
        table: measured records.
        reader: names sources and records.
        status: int8 (n,), index into STATUSES, including the rejects of planning.
        details: details of records that cannot be truncated, by index of the record.
        options: length of a row; None if only lengths are measured.
        max_images: images that fit a row; None for any number.
        is_sample: the table has some records of each source, so that their indices in the files are unknown.
    """

    table: RecordTable
    reader: RecordReader
    status: npt.NDArray[np.int8]
    details: Mapping[int, str] = field(default_factory=dict)
    options: RejectOptions | None = None
    max_images: int | None = None
    is_sample: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """Rejected records by reason; only reasons that occur."""
        return reject_counts(self.status)

    @cached_property
    def lines(self) -> npt.NDArray[np.int64]:
        """Line of each record in its file, as `Source.line_numbers`: int64 (n,)."""
        lines = self.table.empty(len(self.table), np.int64)
        ranges = zip(self.reader.sources, pairwise(self.table.source_starts.tolist()), strict=True)
        for source, (start, stop) in ranges:
            own = slice(start, stop)
            source.line_numbers(self.table.address[own], self.table.size[own], out=lines[own])
        return lines

    def report(self) -> RejectReport:
        """Return the counts and the first rejected records."""
        return RejectReport(self.counts, [rejected._asdict() for rejected in islice(self.rows(), MOST_ROWS)])

    def rows(self, reason: str | None = None) -> Iterator[Rejected]:
        """Yield the rejected records in input order.

        Args:
            reason: yield only records with this reason; None for all.
        """
        for file, start, stop in zip(
            self.table.files, self.table.file_starts, [*self.table.file_starts[1:], len(self.table)], strict=True
        ):
            own = self.status[start:stop]
            wanted = np.flatnonzero(own if reason is None else own == STATUSES.index(reason)).tolist()
            if not wanted:  # most chunk files are not read
                continue
            rows = read_rows(file)
            ids, details = rows["id"], rows["detail"]
            for index in wanted:
                record = int(start) + index
                line = 0 if self.is_sample else int(self.lines[record])
                yield self.row(record, line, ids[index].as_py(), details[index].as_py())

    def row(self, record: int, line: int, ident: str | None, detail: str | None) -> Rejected:
        """Describe a rejected record.

        Args:
            record: index of the record in the table.
            line: its line, as in `lines`.
            ident, detail: its columns in the chunk file.
        """
        sources, rows = self.table.locate(np.array([record]))
        source, row = int(sources[0]), int(rows[0])
        return Rejected(
            source=str(self.reader.sources[source].path),
            row=row,
            line=line or None,
            id=self.reader.default_id(source, row) if ident is None else ident,
            reason=STATUSES[int(self.status[record])],
            detail=detail or self.details.get(record) or self._limit(record),
        )

    def _limit(self, record: int) -> str:
        """Detail of a measured record that does not fit a row."""
        options, length, images = self.options, int(self.table.length[record]), int(self.table.num_images[record])
        if options is None:
            return ""
        if length > options.usable_len:
            detail = not_split if options.overlong == "split" else overlong_detail
            return detail(length, options.row_length, options.pad_multiple)
        return "" if self.max_images is None else images_detail(images, self.max_images)

    def check(self, limits: RejectLimits, report: str = "") -> None:
        """Compare the rejected records with the limits.

        Args:
            limits: limits of the run.
            report: path of the report with all rejected records, or "".

        Raises:
            RejectLimitError: more records are rejected than allowed, or all are.
        """
        counts = self.counts
        for reason in TOO_LONG if limits.overlong == "error" else ():
            if overlong := counts.get(reason.value):
                longest = self._longest() if reason is Reason.OVERLONG else ""
                more = f", the first of {overlong} such records{longest}" if overlong > 1 else ""
                limits.check_record(next(self.rows(reason.value)), more=more)
        if limits.strict:
            for rejected in self.rows():
                limits.check_record(rejected)
        what = "sampled records" if self.is_sample else "records"
        limits.check_all(counts, len(self.table) - sum(counts.values()), self._example, report, what)

    def summary(self) -> str:
        """Summarize the reasons with the function `summary`."""
        return summary(self.counts, self._example)

    def _example(self, reason: str) -> str:
        example = example_of(next(self.rows(reason)), is_sample=self.is_sample)
        return f"{example}{self._longest()}" if reason == Reason.OVERLONG else example

    def _longest(self) -> str:
        """Length of the longest rejected sample, for a message; "" if only the images do not fit a row."""
        overlong, longest = STATUSES.index(Reason.OVERLONG.value), 0
        for block in blocks(len(self.status)):
            longest = int(self.table.length[block].max(initial=longest, where=self.status[block] == overlong))
        is_longer = self.options is not None and longest > self.options.usable_len
        return f" (the longest sample has {longest} tokens)" if is_longer else ""


class NamedRecords(NamedTuple):
    """Ids of the k records of a chunk file.

    Attributes:
        rows: int64 (k,), indices in the table.
        source, local: int64 (k,), index of the source, and of the record in it.
        names: ids; for a record without an id, a default id.
        details: detail of a record that was rejected while measuring, or None.
    """

    rows: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    local: npt.NDArray[np.int64]
    names: list[str]
    details: list[str | None]


def record_names(table: RecordTable, reader: RecordReader) -> Iterator[NamedRecords]:
    """Yield the ids of the records of each chunk file, in input order."""
    for file, start in zip(table.files, table.file_starts.tolist(), strict=True):
        chunk = read_rows(file)
        if not chunk.num_rows:
            continue
        rows = np.arange(start, start + chunk.num_rows)
        source, local = table.locate(rows)
        ids = zip(chunk["id"].to_pylist(), source, local, strict=True)
        names = [reader.default_id(int(s), int(r)) if ident is None else ident for ident, s, r in ids]
        yield NamedRecords(rows, source, local, names, chunk["detail"].to_pylist())


class SamplePlaces(NamedTuple):
    """Place of each of n records and fragments in the dataset.

    Attributes:
        pack: int32 (n,), index of its pack; -1 if it is in none.
        sample: int32 (n,), index of the sample in its pack.
        first_packs: int64 (shards,), index of the first pack of each shard.
        shards: string column of the names of the tars.
        prefix: prefix of the keys of packs.
    """

    pack: npt.NDArray[np.int32]
    sample: npt.NDArray[np.int32]
    first_packs: npt.NDArray[np.int64]
    shards: Any
    prefix: str

    def columns(self, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Arrow columns `pack` (the key), `sample` and `shard` of k of the records and fragments."""
        pack = self.pack[rows]
        is_packed = pack >= 0
        number = pc.utf8_lpad(numeric_column(pack, np.int32, valid=is_packed).cast(pa.string()), 8, "0")
        shard = np.searchsorted(self.first_packs, pack, side="right") - 1
        return [
            pc.binary_join_element_wise(self.prefix, number, "_"),
            numeric_column(self.sample[rows], np.int32, valid=is_packed),
            dictionary_column(shard, self.shards, np.int32, valid=is_packed),
        ]


def write_reports(
    rejects: TableRejects,
    fragments: Fragments | None,
    *,
    usable_len: int,
    output: Folder,
    fingerprint: str,
    places: SamplePlaces,
    groups: npt.NDArray[np.int64] | None = None,
) -> None:
    """Write lengths.parquet and rejects.jsonl.

    lengths.parquet has source, row, line (null if it is not known), id, length (tokens, null if unknown), num_images
    and status of every record, pack (its key), sample (index in the pack) and shard of packed records, and num_videos
    and num_audios if any record has videos or audio; `group`, equal for the samples of a group and null for others, if
    there are groups; rejects.jsonl has source, row, line, id, reason and detail of the
    rejected records.
    The fragments of a record follow the records of its chunk in lengths.parquet, and so do the samples of a record
    that is a group.

    Args:
        rejects: the measured records and their rejects.
        fragments: fragments of split records, by ascending `record`, or None.
        usable_len: tokens of a row; packed records with more tokens get the status `truncated`.
        output: paths of both files.
        fingerprint: of the tars, as in packing.json; lengths.parquet has it in its metadata.
        places: place of each record, then of each fragment.
        groups: number of the group of each record, then of each fragment, -1 for none; None without groups.
    """
    table, reader, status = rejects.table, rejects.reader, rejects.status
    listed = max(_ALWAYS_LISTED, int(status.max(initial=0)) + 1)
    names_of = (*STATUSES[:listed], TRUNCATED, SPLIT, FRAGMENT)
    paths = [str(source.path) for source in reader.sources]
    index_of = {path: index for index, path in enumerate(dict.fromkeys(paths))}  # repeated sources have one path
    sources, statuses = string_column(list(index_of)), string_column(names_of)
    path_of = np.array([index_of[path] for path in paths], dtype=np.int32)
    more = [name for name in ("num_videos", "num_audios") if getattr(table, name).any()]
    schema = _SCHEMA
    for name in more:
        schema = schema.append(pa.field(name, pa.int32()))
    if groups is not None:
        schema = schema.append(pa.field("group", pa.int64()))
    schema = schema.with_metadata({FINGERPRINT: fingerprint})
    with (
        atomic_path(output.lengths) as lengths_file,
        atomic_path(output.rejects) as rejects_file,
        # The other columns have a value of their own in each row; differences of the numbers need few bytes.
        pq.ParquetWriter(lengths_file, schema, use_dictionary=_FEW_VALUES, column_encoding=_DELTAS) as writer,
        rejects_file.open("wb") as out,
    ):
        waiting: list[Any] = []  # rows of chunk files until they are enough for a row group
        for chunk in record_names(table, reader):
            chunk_status, measured = status[chunk.rows], table.length[chunk.rows]
            is_cut = (chunk_status == 0) & (measured > usable_len)
            shown = np.where(is_cut, names_of.index(TRUNCATED), chunk_status)
            source, local, names, images = chunk.source, chunk.local, chunk.names, table.num_images[chunk.rows]
            rows, lines = chunk.rows, rejects.lines[chunk.rows]
            if fragments is not None:
                first, last = (bisect_left(fragments["record"], row) for row in (chunk.rows[0], chunk.rows[-1] + 1))
                of_chunk = fragments[first:last]
                parent = of_chunk["record"] - chunk.rows[0]
                shown[parent[chunk_status[parent] == 0]] = names_of.index(SPLIT)
                source, local, lines = (np.append(own, own[parent]) for own in (source, local, lines))
                rows = np.append(rows, np.arange(len(table) + first, len(table) + last))
                names = [*names, *map(fragment_id, [names[i] for i in parent.tolist()], of_chunk["number"].tolist())]
                measured = np.append(measured, of_chunk["stop"] - of_chunk["start"])
                images = np.append(images, of_chunk["last_image"] - of_chunk["first_image"])
                shown = np.append(shown, np.full(len(of_chunk), names_of.index(FRAGMENT)))
            columns = [
                dictionary_column(path_of[source], sources, np.int32),
                numeric_column(local, np.int64),
                numeric_column(lines, np.int64, valid=lines > 0),
                string_column(names),
                numeric_column(measured, np.int32, valid=measured >= 0),
                numeric_column(images, np.int32),
                dictionary_column(shown, statuses, np.int8),
                *places.columns(rows),
            ]
            for name in more:
                files = getattr(table, name)[chunk.rows]  # fragments have neither videos nor audio
                columns.append(numeric_column(np.append(files, [0] * (len(names) - len(files))), np.int32))
            if groups is not None:
                columns.append(numeric_column(groups[rows], np.int64, valid=groups[rows] >= 0))
            waiting.append(pa.Table.from_arrays(columns, schema=schema))
            if sum(map(len, waiting)) >= _GROUP_ROWS:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
            for index in np.flatnonzero(chunk_status).tolist():
                record = int(chunk.rows[index])
                rejected = rejects.row(record, int(lines[index]), chunk.names[index], chunk.details[index])
                out.write(orjson.dumps(rejected._asdict(), option=orjson.OPT_APPEND_NEWLINE))
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
