"""Reports of rejected records, the limits on them, and their messages.

Input: the RecordTable of a measured input with the status of every record, or single rejects of a stream. Output:
lengths.parquet and rejects.jsonl, a RejectReport in memory, or a RejectLimitError. `pack`, `lengths`,
`plan_in_memory` and streams all use this module, so that the same file has the same counts, reasons and rows:

    RecordTable ──► TableRejects ──► write_reports (`pack`), RejectReport (planned datasets)
    a stream    ──► FailureLog (loading) ──► the same counts and rows
                    RejectLimits: `strict`, `overlong='error'`, `max_failures`, `max_reject_rate`
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from energon_packed.encoding.fragments import Fragments, fragment_id
from energon_packed.errors import REQUESTED_REJECTS, Reason, RejectLimitError
from energon_packed.files import atomic_path
from energon_packed.pipeline.chunks import (
    FRAGMENT,
    SPLIT,
    STATUSES,
    TRUNCATED,
    dictionary_column,
    numeric_column,
    read_rows,
    string_column,
)
from energon_packed.pipeline.table import RecordTable, reject_counts
from energon_packed.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from energon_packed.pipeline.options import RejectOptions
    from energon_packed.pipeline.reader import RecordReader

MOST_ROWS = 1000
"""Rejected records that are kept in memory; the counts are always exact."""
MOST_DETAIL = 500
"""Characters of a detail in the report."""
_MAX_DETAIL = 200  # characters of a detail in a message
_MAX_EXAMPLES = 5  # reasons with an example in a message
_RECORD_FORMAT = (
    'the page "My data looks like" (docs/my-data.md) has a record and a command for each known format; for others, '
    "name the fields with `map`, or convert them with an `adapter`"
)
_IMAGES = "set `image_root` to the folder that image paths start from"
_ADVICE = {
    Reason.BAD_JSON: "each line must be one JSON object",
    Reason.MISSING_FIELD: _RECORD_FORMAT,
    Reason.BAD_ROLE: _RECORD_FORMAT,
    Reason.MISSING_IMAGE: f"add the files, or {_IMAGES}",
    Reason.IMAGE_OUTSIDE_ROOT: _IMAGES,
    Reason.MISSING_PATCH_POSITIONS: "set `use_patch_positions=False` to ignore patch positions",
    Reason.OVERLONG: "raise `seq_len` (`energon-packed lengths` compares values), or set `overlong` to 'truncate' "
    "(documents: 'split')",
    Reason.NOT_SAMPLED: "raise its weight",
}
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
_FEW_VALUES = [name for name in _SCHEMA.names if name not in ("row", "line", "id", "pack")] + ["num_videos"]
_DELTAS = {"row": "DELTA_BINARY_PACKED", "line": "DELTA_BINARY_PACKED"}


class Rejected(NamedTuple):
    """Rejected record, as in a line of rejects.jsonl.

    Attributes:
        source: path of the file.
        row: index of the record in the file; None for an item that is not a record of an input file.
        line: its line in the file, from 1; None if records are not lines, or it is not known.
        id: id of the record.
        reason, detail: as in `Reject`.
    """

    source: str
    row: int | None
    line: int | None
    id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RejectReport:
    """Counts of the rejected records, and the first of them.

    Attributes:
        counts: rejected records by reason; only reasons that occur.
        rows: the first 1,000 rejected records in input order, as lines of rejects.jsonl with `source`, `row`,
            `line`, `id`, `reason` and `detail`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLimits:
    """Limits on rejected records.

    Attributes:
        strict: the first rejected record stops the run.
        max_failures: allowed number of rejected records, without overlong records; None for any number.
        max_reject_rate: allowed share of rejected records, 0 to 1; None for any share.
        overlong: `error` stops the run at a sample longer than a row.
    """

    strict: bool = False
    max_failures: int | None = None
    max_reject_rate: float | None = None
    overlong: str = "drop"

    def check_record(self, rejected: Rejected, *, more: str = "") -> None:
        """Raise for a rejected record if `strict` or `overlong='error'` is set.

        Args:
            rejected: the record.
            more: text about further overlong records.

        Raises:
            RejectLimitError: the limit applies; the message names the record.
        """
        if rejected.reason in REQUESTED_REJECTS:
            return
        record = f"record {rejected.id} of {rejected.source} is rejected: {rejected.reason}: {rejected.detail}"
        if rejected.reason == Reason.OVERLONG and self.overlong == "error":
            raise RejectLimitError(
                f"{record}{more} (`overlong` is 'error'); raise `seq_len`, or set `overlong` to drop or truncate"
            )
        if self.strict:
            raise RejectLimitError(f"{record} (`strict` stops at the first)")

    def check_failures(self, counts: Mapping[str, int]) -> None:
        """Compare the number of rejected records with `max_failures`.

        Raises:
            RejectLimitError: more records are rejected.
        """
        failed = sum(count for reason, count in counts.items() if is_failure(reason))
        if self.max_failures is not None and failed > self.max_failures:
            raise RejectLimitError(
                f"{failed} records were rejected (limit `max_failures` {self.max_failures}): {by_reason(counts)}. "
                "Fix the data, or raise `max_failures`"
            )

    def check_window(
        self, counts: Mapping[str, int], rejected: int, records: int, window: int, example: Callable[[str], str]
    ) -> None:
        """Compare the latest records of a stream with `max_reject_rate`, before `window` of them are read.

        Args:
            counts: rejected records so far, by reason.
            rejected, records: of the latest records, at most `window`.
            window: records that the limit is a share of.
            example: describes a record with a reason.

        Raises:
            RejectLimitError: more records are rejected than `window` records may have.
        """
        if self.max_reject_rate is not None and rejected > self.max_reject_rate * window:
            raise RejectLimitError(
                f"{rejected} of the last {records} records were rejected (limit `max_reject_rate` "
                f"{self.max_reject_rate:g} of {window}): {summary(counts, example, advise=True)}. Fix the data or "
                "raise `max_reject_rate`"
            )

    def check_all(
        self,
        counts: Mapping[str, int],
        packed: int,
        example: Callable[[str], str],
        report: str = "",
        what: str = "records",
    ) -> None:
        """Compare all rejected records of an input with the limits.

        Args:
            counts: rejected records by reason.
            packed: records that are not rejected.
            example: describes a record with a reason.
            report: path of the report with all rejected records, or "".
            what: noun for the records in messages.

        Raises:
            RejectLimitError: more records are rejected than allowed, or all are.
        """
        rejected = sum(count for reason, count in counts.items() if reason not in REQUESTED_REJECTS)
        if packed and not rejected:
            return
        if not packed:
            remedy = "; ".join(part for part in (advice(counts), report and f"{report} lists all") if part)
            raise none_packed(sum(counts.values()), summary(counts, example), remedy, what)
        self.check_failures(counts)
        considered = packed + rejected
        if self.max_reject_rate is not None and rejected > self.max_reject_rate * considered:
            raise RejectLimitError(
                f"{rejected} of {considered} {what} ({rejected / considered:.1%}) were rejected (limit "
                f"`max_reject_rate` {self.max_reject_rate:g}): {summary(counts, example, advise=True)}. "
                f"{report and f'See {report}. '}Fix the data or raise `max_reject_rate`"
            )


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
    reader: "RecordReader"
    status: npt.NDArray[np.int8]
    details: Mapping[int, str] = field(default_factory=dict)
    options: "RejectOptions | None" = None
    max_images: int | None = None
    is_sample: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """Rejected records by reason; only reasons that occur."""
        return reject_counts(self.status)

    @cached_property
    def lines(self) -> npt.NDArray[np.int64]:
        """Line of each record in its file, as `Source.line_numbers`: int64 (n,)."""
        ranges = zip(self.reader.sources, pairwise(self.table.source_starts.tolist()), strict=True)
        lines = np.zeros(len(self.table), dtype=np.int64)
        for source, (start, stop) in ranges:
            lines[start:stop] = source.line_numbers(self.table.address[start:stop], self.table.size[start:stop])
        return lines

    def report(self) -> RejectReport:
        """Return the counts and the first rejected records."""
        return RejectReport(self.counts, [rejected._asdict() for rejected in islice(self.rows(), MOST_ROWS)])

    def rows(self, reason: str | None = None) -> Iterator[Rejected]:
        """Yield the rejected records in input order.

        Args:
            reason: yield only records with this reason; None for all.
        """
        wanted = self.status != 0 if reason is None else self.status == STATUSES.index(reason)
        for file, start, stop in zip(
            self.table.files, self.table.file_starts, [*self.table.file_starts[1:], len(self.table)], strict=True
        ):
            if not wanted[start:stop].any():  # most chunk files are not read
                continue
            rows = read_rows(file)
            ids, details = rows["id"], rows["detail"]
            for index in np.flatnonzero(wanted[start:stop]).tolist():
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
        if limits.overlong == "error" and (overlong := counts.get(Reason.OVERLONG.value)):
            more = f", the first of {overlong} such records{self._longest()}" if overlong > 1 else ""
            limits.check_record(next(self.rows(Reason.OVERLONG.value)), more=more)
        if limits.strict:
            for rejected in self.rows():
                limits.check_record(rejected)
        what = "sampled records" if self.is_sample else "records"
        limits.check_all(counts, int(np.count_nonzero(self.status == 0)), self._example, report, what)

    def summary(self) -> str:
        """Summarize the reasons with the function `summary`."""
        return summary(self.counts, self._example)

    def _example(self, reason: str) -> str:
        example = example_of(next(self.rows(reason)), is_sample=self.is_sample)
        return f"{example}{self._longest()}" if reason == Reason.OVERLONG else example

    def _longest(self) -> str:
        """Length of the longest rejected sample, for a message; "" if only the images do not fit a row."""
        longest = int(self.table.length[self.status == STATUSES.index(Reason.OVERLONG.value)].max())
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


def record_names(table: RecordTable, reader: "RecordReader") -> Iterator[NamedRecords]:
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


def is_failure(reason: str) -> bool:
    """Whether `max_failures` counts a reason: records that the settings leave out do not count."""
    return reason not in REQUESTED_REJECTS and reason != Reason.OVERLONG


def overlong_detail(length: int, seq_len: int, multiple: int = 1) -> str:
    """Detail of a sample of `length` tokens, which is longer than a row of `seq_len`.

    Args:
        length, seq_len: tokens.
        multiple: each sample is padded to a multiple of this many tokens.
    """
    limit = f"{length} tokens, more than seq_len {seq_len}"
    if usable := seq_len % multiple:
        limit += f" down to a multiple of pad_multiple {multiple}, {seq_len - usable}"
    return limit


def not_split(length: int, seq_len: int, multiple: int = 1) -> str:
    """Detail of a conversation that is longer than a row, if `overlong` is 'split'; arguments as `overlong_detail`."""
    limit = overlong_detail(length, seq_len, multiple)
    return f"{limit}; conversations are not split: raise seq_len, or set overlong to truncate"


def images_detail(images: int, max_images: int, what: str = "images") -> str:
    """Detail of a sample with more images (or patches, by `what`) than fit a row."""
    return f"{images} {what}, more than max_{what} {max_images}"


def summary(counts: Mapping[str, int], example: Callable[[str], str], *, advise: bool = False) -> str:
    """List all reasons with their counts, the most common first; the first five have an example.

    For example `40 x missing_field, e.g. line 1 of data.jsonl: no messages`; "" if no record is rejected.

    Args:
        counts: rejected records by reason.
        example: describes a record with a reason; called for each reason that gets an example.
        advise: add the advice for the main reason in brackets.
    """
    ranked = _ranked(counts)
    listed = [f"{count} x {reason}, e.g. {example(reason)}" for reason, count in ranked[:_MAX_EXAMPLES]]
    listed += [f"{count} x {reason}" for reason, count in ranked[_MAX_EXAMPLES:]]
    if listed and advise and (hint := advice(counts)):
        listed[0] += f" ({hint})"
    return "; ".join(listed)


def example_of(rejected: Rejected, *, is_sample: bool = False) -> str:
    """Describe a rejected record in a message; without its line or row, if `is_sample`."""
    detail = " ".join(rejected.detail.split())
    detail = detail if len(detail) <= _MAX_DETAIL else f"{detail[: _MAX_DETAIL - 1]}…"
    name = "a record" if is_sample else f"line {rejected.line}" if rejected.line else f"row {rejected.row}"
    return f"{name} of {rejected.source}: {detail}"


def by_reason(counts: Mapping[str, int]) -> str:
    """List all reasons with their counts, the most common first."""
    return ", ".join(f"{name} {count}" for name, count in _ranked(counts))


def warning_of(counts: Mapping[str, int], records: int, report: str) -> str:
    """Log line about the rejected records of an input; "" if all of them were left out on request.

    Args:
        counts: rejected records by reason.
        records: number of all records.
        report: name of the report that lists the rejected records.
    """
    if all(reason in REQUESTED_REJECTS for reason in counts):
        return ""
    return f"{sum(counts.values())} of {records} records are rejected ({by_reason(counts)}); see {report}"


def advice(counts: Mapping[str, int]) -> str:
    """Remedy for the most common reason; "" if the remedy depends on the record."""
    return _ADVICE.get(Reason(main_reason(counts)), "") if counts else ""


def main_reason(counts: Mapping[str, int]) -> str:
    """The most common reason; requested rejects count only if there are no other reasons."""
    return _ranked(counts)[0][0]


def none_packed(records: int, listed: str, remedy: str, what: str = "records") -> RejectLimitError:
    """Make the error for an input without a usable record.

    Args:
        records: number of records in the input.
        listed: `summary` of the reasons; "" for an empty input.
        remedy: remedy for the message, or "".
        what: noun for the records in the message.
    """
    if not listed:
        return RejectLimitError("none of 0 records can be packed: the input is empty; pass a file with records")
    return RejectLimitError(f"none of {records} {what} can be packed: {listed}; {remedy}".removesuffix("; "))


def _ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (item[0] in REQUESTED_REJECTS, -item[1], item[0]))


class SamplePlaces(NamedTuple):
    """Place of each of n records and fragments in the dataset.

    Attributes:
        pack: int32 (n,), index of its pack; -1 if it is in none.
        sample: int32 (n,), index of the sample in its pack.
        first_packs: int64 (shards,), index of the first pack of each shard.
        shards: names of the tars.
        prefix: prefix of the keys of packs.
    """

    pack: npt.NDArray[np.int32]
    sample: npt.NDArray[np.int32]
    first_packs: npt.NDArray[np.int64]
    shards: list[str]
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
    workspace: Workspace,
    places: SamplePlaces,
) -> None:
    """Write lengths.parquet and rejects.jsonl.

    lengths.parquet has source, row, line (null if it is not known), id, length (tokens, null if unknown), num_images
    and status of every record, pack (its key), sample (index in the pack) and shard of packed records, and num_videos
    if any record has videos; rejects.jsonl has source, row, line, id, reason and detail of the rejected records.
    The fragments of a record follow the records of its chunk in lengths.parquet.

    Args:
        rejects: the measured records and their rejects.
        fragments: fragments of split records, by ascending `record`, or None.
        usable_len: tokens of a row; packed records with more tokens get the status `truncated`.
        workspace: paths of both files.
        places: place of each record, then of each fragment.
    """
    table, reader, status = rejects.table, rejects.reader, rejects.status
    names_of = (*STATUSES, TRUNCATED, SPLIT, FRAGMENT)
    cut = names_of.index(TRUNCATED if fragments is None else SPLIT)  # a packed record that is longer than a row
    paths = [str(source.path) for source in reader.sources]
    index_of = {path: index for index, path in enumerate(dict.fromkeys(paths))}  # repeated sources have one path
    path_of = np.array([index_of[path] for path in paths], dtype=np.int32)
    has_videos = bool(table.num_videos.any())
    schema = _SCHEMA.append(pa.field("num_videos", pa.int32())) if has_videos else _SCHEMA
    with (
        atomic_path(workspace.lengths) as lengths_file,
        atomic_path(workspace.rejects) as rejects_file,
        # The other columns have a value of their own in each row; differences of the numbers need few bytes.
        pq.ParquetWriter(lengths_file, schema, use_dictionary=_FEW_VALUES, column_encoding=_DELTAS) as writer,
        rejects_file.open("wb") as out,
    ):
        # A row group per chunk file: the ids of all records need not fit in memory.
        for chunk in record_names(table, reader):
            chunk_status, measured = status[chunk.rows], table.length[chunk.rows]
            shown = np.where((chunk_status == 0) & (measured > usable_len), cut, chunk_status)
            source, local, names, images = chunk.source, chunk.local, chunk.names, table.num_images[chunk.rows]
            rows, lines = chunk.rows, rejects.lines[chunk.rows]
            if fragments is not None:
                first, last = np.searchsorted(fragments["record"], [chunk.rows[0], chunk.rows[-1] + 1])
                of_chunk = fragments[first:last]
                parent = of_chunk["record"] - chunk.rows[0]
                source, local, lines = (np.append(own, own[parent]) for own in (source, local, lines))
                rows = np.append(rows, np.arange(len(table) + first, len(table) + last))
                names = [*names, *map(fragment_id, [names[i] for i in parent.tolist()], of_chunk["number"].tolist())]
                measured = np.append(measured, of_chunk["stop"] - of_chunk["start"])
                images = np.append(images, of_chunk["last_image"] - of_chunk["first_image"])
                shown = np.append(shown, np.full(len(of_chunk), names_of.index(FRAGMENT)))
            columns = [
                dictionary_column(path_of[source], list(index_of), np.int32),
                numeric_column(local, np.int64),
                numeric_column(lines, np.int64, valid=lines > 0),
                string_column(names),
                numeric_column(measured, np.int32, valid=measured >= 0),
                numeric_column(images, np.int32),
                dictionary_column(shown, names_of, np.int8),
                *places.columns(rows),
            ]
            if has_videos:
                videos = table.num_videos[chunk.rows]  # fragments have no videos
                columns.append(numeric_column(np.append(videos, [0] * (len(names) - len(videos))), np.int32))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            for index in np.flatnonzero(chunk_status).tolist():
                record = int(chunk.rows[index])
                rejected = rejects.row(record, int(lines[index]), chunk.names[index], chunk.details[index])
                out.write(orjson.dumps(rejected._asdict(), option=orjson.OPT_APPEND_NEWLINE))
