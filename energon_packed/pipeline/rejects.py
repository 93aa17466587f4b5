"""Rejected records: their limits, counts and messages.

`pack`, `lengths`, `plan_in_memory` and streams all use this module, so that they stop at the same limits with the same
messages; reports.py applies it to a measured input:

    RejectLimits: `strict`, `overlong='error'`, `max_failures`, `max_reject_rate`
    a stream ──► FailureLog (loading) ──► the counts and rows of reports.py
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energon_packed.arrays import blocks
from energon_packed.errors import REQUESTED_REJECTS, TOO_LONG, Reason, RejectLimitError
from energon_packed.files import DiskList, disk_array

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
    Reason.OVERLONG_GROUP: "raise `seq_len`; groups are neither truncated nor split",
}


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


class RejectedAt(NamedTuple):
    """Rejected record of a source, before its row and line are counted.

    Attributes:
        address: address of the record in the source.
        id: id of the record; None or made of the address for a record without an id.
        reason, detail: as in `Reject`.
    """

    address: int
    id: str | None
    reason: str
    detail: str


class Details(Mapping[int, str]):
    """Details of records that are rejected after they were measured, by index of the record.

    They are in files, so that memory does not grow with their number: the text of each and its size, and for each
    record the end of its text, 0 without a text.

    Args:
        records: number of records.
        folder: as for `disk_array`.
    """

    def __init__(self, records: int, folder: Path) -> None:
        self._records, self._folder = records, folder
        self._ends = np.zeros(0, dtype=np.int64)  # until there is a text: most runs have none
        self._texts = DiskList(np.uint8, folder)
        self._count = 0

    def __setitem__(self, record: int, detail: str) -> None:
        if not len(self._ends):
            self._ends = disk_array(self._folder, self._records, np.int64)
        text = detail.encode(errors="surrogatepass")
        self._texts.extend(text + len(text).to_bytes(4, "little"))
        self._count += self._ends[record] == 0
        self._ends[record] = len(self._texts)

    def __getitem__(self, record: int) -> str:
        if not len(self._ends) or not self._ends[record]:
            raise KeyError(record)
        texts, end = self._texts.values, int(self._ends[record]) - 4
        size = int.from_bytes(texts[end : end + 4].tobytes(), "little")
        return texts[end - size : end].tobytes().decode(errors="surrogatepass")

    def __iter__(self) -> Iterator[int]:
        for block in blocks(len(self._ends)):
            yield from (block.start + np.flatnonzero(self._ends[block])).tolist()

    def __len__(self) -> int:
        return self._count


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
        if rejected.reason in TOO_LONG and self.overlong == "error":
            remedy = "drop" if rejected.reason == Reason.OVERLONG_GROUP else "drop or truncate"
            raise RejectLimitError(
                f"{record}{more} (`overlong` is 'error'); raise `seq_len`, or set `overlong` to {remedy}"
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


def is_failure(reason: str) -> bool:
    """Whether `max_failures` counts a reason: records that the settings leave out do not count."""
    return reason not in (*REQUESTED_REJECTS, *TOO_LONG)


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
