"""FailureLog: failed samples and rejected records in; counts, rows and log lines out, or an error past a limit.

Without it, Energon would skip a failing sample and only print a traceback. Its counts and rows are in memory that
workers share, so the main process sees them, and the limit is one for all workers of a rank. Rejected records of
input files are reported as `pack` reports them: see `pipeline.rejects`.
"""

import logging
import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from energon_packed.errors import (
    REQUESTED_REJECTS,
    BatchError,
    ConfigError,
    DataChangedError,
    FormatError,
    Reason,
    RecordError,
    Reject,
)
from energon_packed.loading.process import Failure, PackAt, RecordAt
from energon_packed.loading.sample_errors import add_location
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import (
    MOST_DETAIL,
    MOST_ROWS,
    Rejected,
    RejectedAt,
    RejectLimits,
    RejectReport,
    example_of,
    is_failure,
    warning_of,
)
from energon_packed.system import resource_error

_log = logging.getLogger(__name__)
_RECORD_REASONS = tuple(reason.value for reason in Reason)
_REASONS = (*_RECORD_REASONS, "bad_format", "bad_batch", "other", "epoch_end")
# Places in the array of numbers that the processes of a loader share.
_FAILED, _DROPPED = slice(0, len(_REASONS)), slice(len(_REASONS), 2 * len(_REASONS))  # counts of each reason
_USED, _RECORDS, _BAD = range(_DROPPED.stop, _DROPPED.stop + 3)  # the last two: of the current window
WINDOW = 1000
"""Records for which a stream checks `max_reject_rate`."""
_MAX_BYTES = 512 << 10  # of all rows; most rows have some 200 bytes, so 1,000 fit


class FailureLog:
    """Count failures by reason, log each with its key and source, and stop the run past a limit.

    A loader with epochs counts from the start of the epoch, or from the restored state.

    Args:
        limits: limits on rejected records; `max_failures` also limits other failures of this rank. 0 raises the first
            failure, with its location.
        context: start method of the workers, or a context of multiprocessing; None for the default.
        readers: readers of the records that are loaded.

    Attributes:
        limits: as above.
        planned: records that were rejected before loading; part of `counts` and `rows`.
    """

    def __init__(
        self,
        limits: RejectLimits,
        context: Any = None,
        readers: Sequence[RecordReader] = (),
    ) -> None:
        self.limits = limits
        self.planned = RejectReport()
        self._readers = readers
        self._is_whole = False
        shared = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._numbers = shared.Array("q", _BAD + 1)
        self._rows = _SharedLines(shared)

    @property
    def used(self) -> int:
        """Items that are not rejected."""
        return int(self._numbers[_USED])

    @property
    def counts(self) -> dict[str, int]:
        """Failures and dropped samples so far by reason; only reasons that occur."""
        numbers = self._numbers[:]
        both = zip(_REASONS, numbers[_FAILED], numbers[_DROPPED], strict=True)
        counts = {name: self.planned.counts.get(name, 0) + failed + dropped for name, failed, dropped in both}
        return {name: count for name, count in counts.items() if count}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The first 1,000 failures, as lines of rejects.jsonl: `source`, `row`, `line`, `id`, `reason` and
        `detail`.

        They are in input order. `row` is None for items that are not records of an input file. Reading this property
        counts the rows of JSONL files and tars, which reads these files.
        """
        return (self.planned.rows + [entry._asdict() for entry in self._rejected()])[:MOST_ROWS]

    def _rejected(self) -> list[Rejected]:
        """The failures while loading, in input order."""
        others: list[Rejected] = []
        records: dict[tuple[int, int], list[RejectedAt]] = {}  # by index of the reader, and of the source in it
        for line in map(orjson.loads, self._rows.read()):
            source, path, address, ident, reason, detail = line  # as `_SharedLines.add` was called
            reader = self._reader_of(source, path)
            if reader is None:
                others.append(Rejected(path, None, None, ident, reason, detail))
            else:
                records.setdefault((reader, source), []).append(RejectedAt(address, ident, reason, detail))
        of_records: list[Rejected] = []
        for (reader, source), entries in sorted(records.items()):
            of_records += sorted(self._readers[reader].rejected(source, entries), key=lambda entry: entry.row or 0)
        return [*of_records, *others]

    def start(self, *, is_whole: bool) -> None:
        """Reset the counts when reading starts; `is_whole` at the start of an epoch."""
        self._is_whole = is_whole
        self._numbers[:] = [0] * len(self._numbers)
        self._rows.clear()

    def use(self, items: int) -> None:
        """Count items that are not rejected."""
        self._count_records(used=items)

    def end_epoch(self, epoch: int, *, is_alone: bool) -> None:
        """Log the rejected records of an epoch in one line, and check them against the limits.

        Args:
            epoch: index of the epoch.
            is_alone: this rank reads all records.

        Raises:
            RejectLimitError: more records are rejected than allowed, or all of them.
        """
        counts = {name: count for name, count in self.counts.items() if name in _RECORD_REASONS}
        if not counts or not self._readers:
            return
        used = self.used
        if line := warning_of(counts, used + sum(counts.values()), "`failures.rows` of the loader"):
            _log.warning("epoch %d: %s", epoch, line)
        # Rates need a whole epoch. A rank without any used record may just have got none that is good, and the few
        # records of one rank say little about the rate of the input.
        if self._is_whole and (used or is_alone):
            limits = self.limits
            if not is_alone and used + sum(counts.values()) < WINDOW:
                limits = replace(limits, max_reject_rate=None)
            limits.check_all(counts, used, self._example)

    def count(self, failures: Iterable[Failure]) -> None:
        """Count the samples of an item that cannot be used.

        Args:
            failures: samples of the item, each with its place.

        Raises:
            RejectLimitError: as `reject`.
            BatchError, DataChangedError, ResourceError, ConfigError: as `handle`.
        """
        for error, pack, record in failures:
            if record is not None and isinstance(error, RecordError):
                self.reject(record, error.reject)
            elif isinstance(error, RecordError) and error.reason in REQUESTED_REJECTS:
                self.drop(error.reason.value)
            else:
                self.handle(error, pack)

    def reject(self, at: RecordAt, reject: Reject) -> None:
        """Count a rejected record of an input file, as `pack` does.

        Raises:
            RejectLimitError: `strict` or `overlong` allow no such record, there are more than `max_failures`, or more
                than `max_reject_rate` of `WINDOW` records in a row.
        """
        reject = Reject(reject.reason, reject.detail[:MOST_DETAIL])
        failed = self._count(_FAILED if is_failure(reject.reason) else _DROPPED, reject.reason.value)
        self._rows.add(at.source, at.path, at.address, at.id, reject.reason.value, reject.detail)
        if self.limits.strict or self.limits.overlong == "error":
            reader = self._reader_of(at.source, at.path)
            rejected = Rejected(at.path, None, None, str(at.id), reject.reason.value, reject.detail)
            if reader is not None:
                entry = RejectedAt(at.address, at.id, reject.reason.value, reject.detail)
                rejected = self._readers[reader].rejected(at.source, [entry])[0]
            self.limits.check_record(rejected)
        if is_failure(reject.reason):
            total = sum(failed.values())
            if str(total).rstrip("0") == "1":  # 1, 10, 100 ...: a line for each would hide all other lines
                name = at.id or f"at {at.address}"
                _log.warning("%d rejected so far; the last is record %s of %s: %s", total, name, at.path, reject)
            self.limits.check_failures(failed)
        if reject.reason not in REQUESTED_REJECTS:
            records, bad = self._count_records(rejected=1)
            self.limits.check_window(self.counts, bad, records, WINDOW, self._example)

    def drop(self, reason: str) -> None:
        """Count a sample that the settings drop; it does not count for the limit."""
        self._count(_DROPPED, reason)

    def handle(self, error: Exception, at: PackAt) -> None:
        """Count and log the failure of a sample of a pack; the sample is skipped on return.

        Raises:
            BatchError: there are more than `max_failures`; with 0, the error itself.
            DataChangedError: the files of the sample changed since they were opened.
            ResourceError: memory, open files or the disk fail; this is never skipped.
            ConfigError: a package is missing or has changed, or a setting does not fit; this is never skipped.
        """
        is_fatal = isinstance(error, DataChangedError | ConfigError)
        if (fatal := error if is_fatal else resource_error(error, at.tars or at.key)) is not None:
            raise fatal from (error if fatal is not error else None)
        failed = self._count(_FAILED, _reason(error))
        self._rows.add(-1, at.tars, -1, at.key, _reason(error), str(error)[:MOST_DETAIL])
        place = f"{at.key} of {at.tars}" if at.tars else at.key
        _log.error("sample %s failed to load: %s: %s", place, type(error).__name__, error)
        limit = self.limits.max_failures
        if limit == 0:
            fatal = add_location(error, at)
            raise fatal from (error if fatal is not error else None)
        total = sum(failed.values())
        if limit is not None and total > limit:
            by_reason = ", ".join(f"{name} {count}" for name, count in self.counts.items())
            raise BatchError(
                f"{total} samples failed to load, more than `max_failures` {limit} ({by_reason}); "
                f"the last is {at.key}: {error}. Fix the data or raise `max_failures`."
            ) from error

    def _count(self, kind: slice, reason: str) -> dict[str, int]:
        """Count a sample as failed or dropped; return all counts of this kind by reason.

        The limit counts failures, and not samples that the settings drop.
        """
        with self._numbers.get_lock():
            self._numbers[kind.start + _REASONS.index(reason)] += 1
            return {name: count for name, count in zip(_REASONS, self._numbers[kind], strict=True) if count}

    def _count_records(self, used: int = 0, rejected: int = 0) -> tuple[int, int]:
        """Count records; return the records since the last `WINDOW` of them, and the rejected among these."""
        numbers: Any = self._numbers.get_obj()  # each access of the array itself would lock again
        with self._numbers.get_lock():
            numbers[_USED] += used
            numbers[_RECORDS] += used + rejected
            numbers[_BAD] += rejected
            window = numbers[_RECORDS], numbers[_BAD]
            if window[0] >= WINDOW:
                numbers[_RECORDS] = numbers[_BAD] = 0
        return window

    def _reader_of(self, source: int, path: str) -> int | None:
        """Index of the reader whose source of that index has that path, or None."""
        for i, reader in enumerate(self._readers):
            if 0 <= source < len(reader.sources) and str(reader.sources[source].path) == path:
                return i
        return None

    def _example(self, reason: str) -> str:
        """A rejected record with a reason, for messages."""
        found = next((entry for entry in self._rejected() if entry.reason == reason), None)
        return "see `failures.rows`" if found is None else example_of(found)


class _SharedLines:
    """The first JSON lines that any process adds, in shared memory of a fixed size.

    A queue or manager would need a thread or process in each loader, and could block a worker that dies.
    """

    def __init__(self, context: Any) -> None:
        self._text = context.Array("c", _MAX_BYTES)
        self._size = context.Value("q", 0)  # bytes in use

    def add(self, *values: Any) -> None:
        """Add a line of JSON, if it fits; lone surrogates become question marks, as in rejects.jsonl."""
        clean = [value.encode(errors="replace").decode() if isinstance(value, str) else value for value in values]
        line = orjson.dumps(clean, option=orjson.OPT_APPEND_NEWLINE)
        with self._size.get_lock():
            start, end = self._size.value, self._size.value + len(line)
            if end <= _MAX_BYTES:
                self._text[start:end] = line
                self._size.value = end

    def read(self) -> list[bytes]:
        """Return the lines."""
        with self._size.get_lock():
            return list(self._text[: self._size.value].splitlines())

    def clear(self) -> None:
        """Remove all lines."""
        with self._size.get_lock():
            self._size.value = 0


def _reason(error: Exception) -> str:
    if isinstance(error, RecordError):
        return error.reason.value
    if isinstance(error, FormatError):
        return "bad_format"
    return "bad_batch" if isinstance(error, BatchError) else "other"
