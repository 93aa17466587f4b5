"""The reject report: which records were left out and why, the limits on them, and their messages.

`pack`, `lengths`, `plan_in_memory` and streams make it from here, so that the same file has the same counts, reasons
and rows in all of them:

    RecordTable ──► TableRejects ──► rejects.jsonl, RejectReport (planned datasets)
    a stream    ──► FailureLog (dataflow) ──► the same counts and rows
                    RejectLimits: `strict`, `overlong='error'`, `max_failures`, `max_reject_rate`
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from energon_packed.errors import REQUESTED_REJECTS, Reason, RejectLimitError
from energon_packed.files import atomic_path
from energon_packed.pipeline.chunks import STATUSES, TRUNCATED, named, numbers, read_rows, texts
from energon_packed.pipeline.table import RecordTable, reject_counts
from energon_packed.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from energon_packed.pipeline.options import RejectOptions
    from energon_packed.pipeline.reader import RecordReader

MOST_ROWS = 1000
"""Rejected rows that are kept in memory; the counts are always exact."""
MOST_DETAIL = 500
"""Characters of a detail in the report."""
_LONGEST = 200  # characters of a detail in a message
_SHAPE = (
    'the page "My data looks like" (docs/my-data.md) has a record and a command for each known format; for others, '
    "name the fields with `map`, or convert them with an `adapter`"
)
_IMAGES = "set `image_root` to the folder that image paths start from"
_ADVICE = {
    Reason.BAD_JSON: "each line must be one JSON object",
    Reason.MISSING_FIELD: _SHAPE,
    Reason.BAD_ROLE: _SHAPE,
    Reason.MISSING_IMAGE: _IMAGES,
    Reason.IMAGE_OUTSIDE_ROOT: _IMAGES,
    Reason.MISSING_PATCH_POSITIONS: "set `use_patch_positions=False` to ignore patch positions",
    Reason.OVERLONG: "raise `seq_len`, or set `overlong` to 'truncate'",
    Reason.NOT_SAMPLED: "raise its weight",
}
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


class Rejected(NamedTuple):
    """One rejected record: a line of rejects.jsonl.

    Attributes:
        source: path of its file.
        row: number of the record in the file, from 0; None for an item that is not a record of an input file.
        id: name of the record.
        reason, detail: as in `Reject`.
    """

    source: str
    row: int | None
    id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RejectReport:
    """Rejected records.

    Attributes:
        counts: rejected records by reason; only reasons that occur.
        rows: the first 1,000 of them in input order, each a line of rejects.jsonl: `source`, `row`, `id`, `reason`
            and `detail`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLimits:
    """The limits on rejected records.

    Attributes:
        strict: the first rejected record stops the run.
        max_failures: rejected records that are allowed, overlong ones not counted; None for any number.
        max_reject_rate: share of the records that may be rejected, 0 to 1; None for any.
        overlong: `error` stops the run at a sample longer than a row.
    """

    strict: bool = False
    max_failures: int | None = None
    max_reject_rate: float | None = None
    overlong: str = "drop"

    def check_record(self, rejected: Rejected, *, more: int = 0) -> None:
        """Refuse a rejected record, with `strict` and `overlong='error'`.

        Args:
            rejected: the first one.
            more: overlong records that are known beside it.

        Raises:
            RejectLimitError: it names the record.
        """
        if rejected.reason in REQUESTED_REJECTS:
            return
        found = f"record {rejected.id} of {rejected.source} is rejected: {rejected.reason}: {rejected.detail}"
        if rejected.reason == Reason.OVERLONG and self.overlong == "error":
            first = f", the first of {more + 1} such records" if more else ""
            raise RejectLimitError(
                f"{found}{first} (`overlong` is 'error'); raise `seq_len`, or set `overlong` to drop or truncate"
            )
        if self.strict:
            raise RejectLimitError(f"{found} (`strict` stops at the first)")

    def check_failures(self, counts: Mapping[str, int]) -> None:
        """Hold the number of rejected records to `max_failures`.

        Raises:
            RejectLimitError: there are more.
        """
        failed = sum(count for reason, count in counts.items() if is_failure(reason))
        if self.max_failures is not None and failed > self.max_failures:
            raise RejectLimitError(
                f"{failed} records are rejected, more than `max_failures` {self.max_failures} ({by_reason(counts)}); "
                "fix the data, or raise `max_failures`"
            )

    def check_all(self, counts: Mapping[str, int], packed: int, example: Callable[[], str], where: str = "") -> None:
        """Hold all records of an input to the limits.

        Args:
            counts: rejected records by reason.
            packed: records that are not rejected.
            example: describes a record of the main reason.
            where: what lists all rejected records.

        Raises:
            RejectLimitError: more is rejected than allowed, or everything.
        """
        rejected = sum(count for reason, count in counts.items() if reason not in REQUESTED_REJECTS)
        if packed and not rejected:
            return
        remedy = "; ".join(part for part in (advice(counts), where and f"{where} lists all") if part)
        if not packed:
            raise none_packed(sum(counts.values()), summary(counts, example), remedy)
        self.check_failures(counts)
        considered = packed + rejected
        if self.max_reject_rate is not None and rejected > self.max_reject_rate * considered:
            raise RejectLimitError(
                f"{rejected} of {considered} records ({rejected / considered:.1%}) are rejected, more than "
                f"`max_reject_rate` {self.max_reject_rate:g}: {summary(counts, example)}; "
                f"{remedy and f'{remedy}; '}fix the data or raise the limit"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableRejects:
    """The rejected records of a measured input.

    Attributes:
        table: measured records.
        reader: names sources and records.
        status: int8 (n,), index into STATUSES, rejects of planning included.
        details: of records that cannot be truncated, by record number.
        options: decide which samples fit a row; None without a row.
        max_images: images that fit a row; None for any number.
    """

    table: RecordTable
    reader: "RecordReader"
    status: npt.NDArray[np.int8]
    details: Mapping[int, str] = field(default_factory=dict)
    options: "RejectOptions | None" = None
    max_images: int | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Rejected records by reason; only reasons that occur."""
        return reject_counts(self.status)

    def report(self) -> RejectReport:
        """The counts and the first rows."""
        return RejectReport(self.counts, [one._asdict() for one in islice(self.rows(), MOST_ROWS)])

    def rows(self, reason: str | None = None) -> Iterator[Rejected]:
        """The rejected records in input order.

        Args:
            reason: only those that are rejected for it; None for all.
        """
        wanted = self.status != 0 if reason is None else self.status == STATUSES.index(reason)
        for file, start, stop in zip(
            self.table.files, self.table.file_starts, [*self.table.file_starts[1:], len(self.table)], strict=True
        ):
            if not wanted[start:stop].any():
                continue
            rows = read_rows(file)
            ids, details = rows["id"], rows["detail"]
            for place in np.flatnonzero(wanted[start:stop]).tolist():
                yield self.row(int(start) + place, ids[place].as_py(), details[place].as_py())

    def row(self, record: int, ident: str | None, detail: str | None) -> Rejected:
        """One rejected record.

        Args:
            record: its number in the table.
            ident, detail: of its chunk file.
        """
        sources, rows = self.table.locate(np.array([record]))
        source, row = int(sources[0]), int(rows[0])
        return Rejected(
            source=str(self.reader.sources[source].path),
            row=row,
            id=self.reader.default_id(source, row) if ident is None else ident,
            reason=STATUSES[int(self.status[record])],
            detail=detail or self.details.get(record) or self._limit(record),
        )

    def _limit(self, record: int) -> str:
        """Why a measured record fits no row."""
        options, length, images = self.options, int(self.table.length[record]), int(self.table.num_images[record])
        if options is None:
            return ""
        if length > options.usable_len:
            return overlong_detail(length, options.row_length, options.pad_multiple)
        return "" if self.max_images is None else images_detail(images, self.max_images)

    def check(self, limits: RejectLimits, where: str = "") -> None:
        """Hold the rejected records to the limits.

        Args:
            limits: of the run.
            where: what lists all rejected records.

        Raises:
            RejectLimitError: more is rejected than allowed, or everything.
        """
        counts = self.counts
        overlong = counts.get(Reason.OVERLONG.value, 0)
        if overlong and limits.overlong == "error":
            limits.check_record(next(self.rows(Reason.OVERLONG.value)), more=overlong - 1)
        if limits.strict:
            for one in self.rows():
                limits.check_record(one)
        limits.check_all(counts, int(np.count_nonzero(self.status == 0)), self._example, where)

    def summary(self, *, is_sample: bool = False) -> str:
        """As the function `summary`.

        Args:
            is_sample: the table has some records of each source, so that row numbers are unknown.
        """
        return summary(self.counts, lambda: self._example(is_sample=is_sample))

    def _example(self, *, is_sample: bool = False) -> str:
        return example_of(next(self.rows(main_reason(self.counts))), is_sample=is_sample)


class NamedRecords(NamedTuple):
    """The k records of a chunk file.

    Attributes:
        rows: int64 (k,), their numbers in the table.
        source, local: int64 (k,), number of the source, and of the record in it.
        names: ids, made of the place of a record that has none.
        details: why a record was rejected when it was measured, or None.
    """

    rows: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    local: npt.NDArray[np.int64]
    names: list[str]
    details: list[str | None]


def record_names(table: RecordTable, reader: "RecordReader") -> Iterator[NamedRecords]:
    """The records of each chunk file with their names, in input order."""
    for file, start in zip(table.files, table.file_starts.tolist(), strict=True):
        part = read_rows(file)
        if not part.num_rows:
            continue
        rows = np.arange(start, start + part.num_rows)
        source, local = table.locate(rows)
        ids = zip(part["id"].to_pylist(), source, local, strict=True)
        names = [reader.default_id(int(s), int(r)) if ident is None else ident for ident, s, r in ids]
        yield NamedRecords(rows, source, local, names, part["detail"].to_pylist())


def is_failure(reason: str) -> bool:
    """Whether `max_failures` counts a reason: not if the settings ask to leave such records out."""
    return reason not in REQUESTED_REJECTS and reason != Reason.OVERLONG


def overlong_detail(length: int, seq_len: int, multiple: int = 1) -> str:
    """The detail of a sample of `length` tokens, which is longer than a row of `seq_len`.

    Args:
        length, seq_len: tokens.
        multiple: each sample is padded to a multiple of this many tokens.
    """
    limit = f"{length} tokens, more than seq_len {seq_len}"
    if usable := seq_len % multiple:
        limit += f" down to a multiple of pad_multiple {multiple}, {seq_len - usable}"
    return limit


def images_detail(images: int, max_images: int, what: str = "images") -> str:
    """The detail of a sample with more images (or patches, by `what`) than fit a row."""
    return f"{images} {what}, more than max_{what} {max_images}"


def summary(counts: Mapping[str, int], example: Callable[[], str]) -> str:
    """All reasons with their counts, the most common first, and an example of that one.

    For example `40 x missing_field, e.g. row 0 of data.jsonl: no messages`; "" when nothing is rejected.

    Args:
        counts: rejected records by reason.
        example: describes a record of the main reason, if there is one.
    """
    if not counts:
        return ""
    reason = main_reason(counts)
    listed = [f"{counts[reason]} x {reason}, e.g. {example()}"]
    listed += [f"{count} x {name}" for name, count in _ranked(counts) if name != reason]
    return "; ".join(listed)


def example_of(rejected: Rejected, *, is_sample: bool = False) -> str:
    """A rejected record in a message; without its row, if `is_sample`."""
    detail = " ".join(rejected.detail.split())
    detail = detail if len(detail) <= _LONGEST else f"{detail[: _LONGEST - 1]}…"
    name = "a record" if is_sample else f"row {rejected.row}"
    return f"{name} of {rejected.source}: {detail}"


def by_reason(counts: Mapping[str, int]) -> str:
    """All reasons with their counts, the most common first."""
    return ", ".join(f"{name} {count}" for name, count in _ranked(counts))


def warning_of(counts: Mapping[str, int], records: int, where: str) -> str:
    """The log line about the rejected records of an input, "" if none is rejected that was not left out by choice.

    Args:
        counts: rejected records by reason.
        records: rejected or not.
        where: what lists them.
    """
    if all(reason in REQUESTED_REJECTS for reason in counts):
        return ""
    return f"{sum(counts.values())} of {records} records are rejected ({by_reason(counts)}); see {where}"


def advice(counts: Mapping[str, int]) -> str:
    """What to do about the most common reason; "" where it depends on the record."""
    return _ADVICE.get(Reason(main_reason(counts)), "") if counts else ""


def main_reason(counts: Mapping[str, int]) -> str:
    """The most common reason, of those that are not by choice if there are any."""
    return _ranked(counts)[0][0]


def none_packed(records: int, listed: str, remedy: str) -> RejectLimitError:
    """The error of an input without a usable record.

    Args:
        records: in the input.
        listed: `summary` of their reasons; "" for an empty input.
        remedy: what to do.
    """
    if not listed:
        return RejectLimitError(
            f"none of {records} records can be packed: the input is empty; pass a file with records"
        )
    return RejectLimitError(f"none of {records} records can be packed: {listed}; {remedy}".removesuffix("; "))


def _ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (item[0] in REQUESTED_REJECTS, -item[1], item[0]))


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
        atomic_path(space.lengths) as lengths_aside,
        atomic_path(space.rejects) as rejects_aside,
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
