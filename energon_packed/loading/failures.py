"""FailureLog: what happens to samples that fail while loading. Energon would skip them and only print a traceback.

Counts and rows are shared with the worker processes, so the main process sees them, and the limit holds for all of a
rank. Records of input files that are rejected are reported as `pack` does: see `pipeline.rejects`.

Errors of worker processes under torch's DataLoader: one line that says what happened, and what to do.

Torch raises `DataLoader worker (pid 7) is killed by signal: Killed.` and `DataLoader timed out after 9 seconds`, and
turns an error of a worker into its whole traceback.
"""

import contextlib
import logging
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import orjson
from torch.utils.data._utils import signal_handling

from energon_packed import errors
from energon_packed.errors import (
    BatchError,
    DataChangedError,
    EnergonPackedError,
    FormatError,
    Reason,
    RecordError,
    Reject,
    WorkerError,
)
from energon_packed.loading.process import RecordAt
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import (
    MOST_DETAIL,
    MOST_ROWS,
    Rejected,
    RejectLimits,
    RejectReport,
    example_of,
    is_failure,
    main_reason,
    warning_of,
)

_DEAD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: [^.]+|exited unexpectedly)")
_SLOW = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
_CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")
_OURS = re.compile(r"^energon_packed\.errors\.(\w+): (.*)$", re.M)
_RECORD = re.compile(r"(\w+): (.*)")
_SIGNALS = {
    "Killed": "the system kills what takes too much memory (dmesg tells): use fewer workers, a smaller "
    "`prefetch_factor` or `shuffle_buffer_size`, or more memory",
    "Bus error": "shared memory is full, or an input file was truncated while it was read: enlarge /dev/shm, or use "
    "fewer workers",
}
_CRASHED = "too little memory, or a crash: use fewer workers, or `num_workers=0` to see why"
_RESUME = "the state that was saved last is good: load it in a new loader"


def in_one_line(error: BaseException, loader: str) -> EnergonPackedError | None:
    """The error of a worker as one line; None for what is none.

    Args:
        error: what torch raised.
        loader: what to call the loader.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and (found := _DEAD.search(text)):
        remedy = next((remedy for name, remedy in _SIGNALS.items() if found[2].endswith(name)), _CRASHED)
        return WorkerError(f"a worker process of {loader} (pid {found[1]}) {found[2]}: {remedy}; {_RESUME}")
    if isinstance(error, RuntimeError) and (found := _SLOW.search(text)):
        return WorkerError(
            f"{loader} got no batch for {found[1]} seconds, its `timeout`: a file system that hangs, or samples that "
            f"take longer; check the storage, or raise `timeout`; {_RESUME}"
        )
    if _CAUGHT.match(text) and (lines := _OURS.findall(text)):
        name, message = lines[-1]
        if name == "RecordError" and (found := _RECORD.fullmatch(message)):
            return RecordError(Reason(found[1]), found[2])
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    return None


def lost_worker(error: BaseException, loader: str, batches: Any) -> WorkerError | None:
    """The error of a connection to a worker that died, as which torch may notice it first; None for what is none."""
    workers = getattr(batches, "_workers", None)
    if not workers or not isinstance(error, OSError | EOFError):
        return None
    ending = wait([worker.sentinel for worker in workers], timeout=5)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(timeout=5)  # the kernel closes connections and sentinel before the process has ended
    dead = dead_workers(batches)
    if not dead:
        return None
    return WorkerError(
        f"a worker process of {loader} (pid {dead[0]}) exited unexpectedly ({type(error).__name__}): "
        f"{_CRASHED}; {_RESUME}"
    )


def watched(batches: Iterator[Any], loader: str) -> Iterator[Any]:
    """What an iterator of torch's DataLoader gives; after the death of a worker, the others are ended.

    Raises:
        EnergonPackedError: of a worker, or its death, in one line.
        Exception: what else the iterator raised.
    """
    try:
        yield from batches
    except Exception as error:
        found = in_one_line(error, loader) or lost_worker(error, loader, batches)
        if found is None:
            raise
        if isinstance(found, WorkerError):
            end_workers(batches)
        raise found from error


def end_workers(batches: Any) -> None:
    """Kill the workers of an iterator of torch's DataLoader: one that hangs in a read ends at nothing less.

    Torch asks them to end, and Python waits for them when the process exits.
    """
    workers = getattr(batches, "_workers", None)
    if not workers:
        return
    if getattr(batches, "_worker_pids_set", False):  # or torch would raise that they died
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False
    for worker in workers:
        worker.kill()
    with contextlib.suppress(Exception):  # whatever is left of queues and threads
        batches._shutdown_workers()


def dead_workers(batches: Any) -> list[int]:
    """Process ids of the workers of an iterator of torch's DataLoader that ended."""
    return [worker.pid for worker in getattr(batches, "_workers", ()) if not worker.is_alive()]


_log = logging.getLogger(__name__)
_OF_RECORDS = tuple(reason.value for reason in Reason)
_REASONS = (*_OF_RECORDS, "bad_format", "bad_batch", "other", "drop_last")
_ROOM = 512 << 10  # bytes of the rows that are kept; most rows have some 200


class FailureLog:
    """Counts failures by reason, logs each with its key and source, and stops the run past a limit.

    A loader with epochs counts from the start of the epoch, or from the state that it was restored to.

    Args:
        limit: failures of one rank that are skipped; the next one raises. 0 raises the first one, with its place. None
            skips all.
        unchanged: raises DataChangedError for sources that are not the files of before: that is no failure of a
            sample, and is never skipped. None does not look.
        context: start method of the workers, or a context of multiprocessing; None for the default.
        readers: of the records that are loaded.

    Attributes:
        limits: on rejected records, beside `limit`.
        planned: what was rejected before loading; part of `counts` and `rows`.
    """

    def __init__(
        self,
        limit: int | None = 0,
        unchanged: Callable[[Any], None] | None = None,
        context: Any = None,
        readers: Sequence[RecordReader] = (),
    ) -> None:
        self.limit = limit
        self.limits = RejectLimits()
        self.planned = RejectReport()
        self._readers = readers
        self._is_whole = False
        self._unchanged = unchanged
        self._last_word: Exception | None = None
        given = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._counts = given.Array("q", len(_REASONS))
        self._dropped = given.Array("q", len(_REASONS))
        self._used = given.Value("q", 0)
        self._rows = _SharedLines(given)

    @property
    def counts(self) -> dict[str, int]:
        """Failures and dropped samples so far by reason; only reasons that occur."""
        both = zip(_REASONS, self._counts[:], self._dropped[:], strict=True)
        counts = {name: self.planned.counts.get(name, 0) + failed + dropped for name, failed, dropped in both}
        return {name: count for name, count in counts.items() if count}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The first 1,000 of them, each a line of rejects.jsonl: `source`, `row`, `id`, `reason` and `detail`.

        In input order. `row` is None for items that are not records of an input file. Row numbers of JSONL and tars
        are counted now, which reads these files.
        """
        found: list[Rejected] = []
        records: dict[tuple[int, int], list[list[Any]]] = {}  # by number of the reader, and of the source in it
        for line in map(orjson.loads, self._rows.read()):
            place = self._reader_of(line[0], line[1])
            if place is None:
                found.append(Rejected(line[1], None, *line[3:]))
            else:
                records.setdefault((place, line[0]), []).append(line)
        of_records: list[Rejected] = []
        for (place, source), lines in sorted(records.items()):
            rejected = self._readers[place].rejected(source, [(line[2], line[3], line[4], line[5]) for line in lines])
            of_records += sorted(rejected, key=lambda one: one.row or 0)
        return (self.planned.rows + [one._asdict() for one in [*of_records, *found]])[:MOST_ROWS]

    def start(self, *, is_whole: bool) -> None:
        """Count anew, as reading starts; `is_whole`, if it is at the start of an epoch."""
        self._is_whole = is_whole
        for shared in (self._counts, self._dropped):
            with shared.get_lock():
                shared[:] = [0] * len(_REASONS)
        with self._used.get_lock():
            self._used.value = 0
        self._rows.clear()

    def use(self, items: int) -> None:
        """Count items that are in a batch."""
        with self._used.get_lock():
            self._used.value += items

    def end_epoch(self, epoch: int, *, is_alone: bool) -> None:
        """Log the rejected records of an epoch in one line, and hold them to the limits.

        Args:
            epoch: its number.
            is_alone: this rank reads all records.

        Raises:
            RejectLimitError: more is rejected than allowed, or everything.
        """
        counts = {name: count for name, count in self.counts.items() if name in _OF_RECORDS}
        if not counts or not self._readers:
            return
        used = int(self._used.value)
        if line := warning_of(counts, used + sum(counts.values()), "`failures.rows` of the loader"):
            _log.warning("epoch %d: %s", epoch, line)
        if self._is_whole and (used or is_alone):
            replace(self.limits, max_failures=self.limit).check_all(counts, used, lambda: self._example(counts))

    def reject(self, at: RecordAt, path: str, reject: Reject, *, overlong: str = "drop") -> None:
        """Count a record of an input file that is rejected, as `pack` does.

        Args:
            at: where it is.
            path: of its file.
            reject: why.
            overlong: what happens to samples longer than a row: `error` raises.

        Raises:
            RejectLimitError: `strict` or `overlong` allow no such record, or there are more than `limit`.
        """
        reject = Reject(reject.reason, reject.detail[:MOST_DETAIL])
        shared = self._counts if is_failure(reject.reason) else self._dropped
        with shared.get_lock():
            shared[_REASONS.index(reject.reason.value)] += 1
        self._rows.add(at.source, path, at.address, at.id, reject.reason.value, reject.detail)
        limits = replace(self.limits, max_failures=self.limit, overlong=overlong)
        if limits.strict or overlong == "error":
            place = self._reader_of(at.source, path)
            rejected = Rejected(path, None, str(at.id), reject.reason.value, reject.detail)
            if place is not None:
                found = self._readers[place].rejected(
                    at.source, [(at.address, at.id, reject.reason.value, reject.detail)]
                )
                rejected = found[0]
            limits.check_record(rejected)
        if is_failure(reject.reason):
            _log.error("record %s of %s is rejected: %s", at.id or f"at {at.address}", path, reject)
            limits.check_failures(
                {name: count for name, count in zip(_REASONS, self._counts[:], strict=True) if count}
            )

    def drop(self, reason: str) -> None:
        """Count a sample that the settings drop: it is not held against the limit."""
        with self._dropped.get_lock():
            self._dropped[_REASONS.index(reason)] += 1

    def handle(self, error: Exception, sample: Any, sources: Any = None) -> None:
        """Energon's `global_error_handler`: count, log, and let the sample be skipped or stop.

        Raises:
            BatchError: more than `limit` failures; with a limit of 0, the error itself.
            DataChangedError: the files of the sample are not those of before.
        """
        if error is self._last_word:  # raised below, inside the pack that Energon now reports as failed
            raise error
        sources = sources or _field(sample, "__sources__")
        self._refuse_changed(error, sources)
        with self._counts.get_lock():
            self._counts[_REASONS.index(_reason(error))] += 1
            total = sum(self._counts[:])
        key, source = _key(sample), _source(sources)
        self._rows.add(-1, source, -1, key, _reason(error), str(error)[:MOST_DETAIL])
        _log.error("sample %s%s failed to load: %s: %s", key, source and f" of {source}", type(error).__name__, error)
        if self.limit == 0:
            self._last_word = add_location(error, key, source)
            raise self._last_word from (error if self._last_word is not error else None)
        if self.limit is not None and total > self.limit:
            by_reason = ", ".join(f"{name} {count}" for name, count in self.counts.items())
            self._last_word = BatchError(
                f"{total} samples failed to load, more than `max_failures` {self.limit} ({by_reason}); "
                f"the last is {key}: {error}; fix the data or raise `max_failures`"
            )
            raise self._last_word from error

    def _reader_of(self, source: int, path: str) -> int | None:
        """Number of the reader with a source of that number and path, or None."""
        for number, reader in enumerate(self._readers):
            if 0 <= source < len(reader.sources) and str(reader.sources[source].path) == path:
                return number
        return None

    def _example(self, counts: dict[str, int]) -> str:
        found = [one for one in self.rows if one["reason"] == main_reason(counts)]
        return example_of(Rejected(**found[0])) if found else "see `failures.rows`"

    def _refuse_changed(self, error: Exception, sources: Any) -> None:
        if isinstance(error, DataChangedError):
            self._last_word = error
            raise error
        if self._unchanged is None:
            return
        try:
            self._unchanged(sources)
        except DataChangedError as changed:
            self._last_word = changed
            raise changed from error


class _SharedLines:
    """The first lines that any process adds, in shared memory of a fixed size."""

    def __init__(self, context: Any) -> None:
        self._text = context.Array("c", _ROOM)
        self._size = context.Value("q", 0)  # bytes in use

    def add(self, *values: Any) -> None:
        """Add a line of JSON, if there is room; lone surrogates become question marks, as in rejects.jsonl."""
        clean = [one.encode(errors="replace").decode() if isinstance(one, str) else one for one in values]
        line = orjson.dumps(clean, option=orjson.OPT_APPEND_NEWLINE)
        with self._size.get_lock():
            start, end = self._size.value, self._size.value + len(line)
            if end <= _ROOM:
                self._text[start:end] = line
                self._size.value = end

    def read(self) -> list[bytes]:
        """The lines."""
        with self._size.get_lock():
            return list(self._text[: self._size.value].splitlines())

    def clear(self) -> None:
        """Remove all lines."""
        with self._size.get_lock():
            self._size.value = 0


def add_location(error: Exception, key: str, source: str) -> Exception:
    """The error with shard and pack, where it is one of their content."""
    if isinstance(error, FormatError | RecordError) and source:
        return error.at(f"{source}, pack {key}", verify_hint(os.path.dirname(source)))
    return error


def reraise_with_location(error: Exception, sample: Any, sources: Any = None) -> None:
    """Energon's `global_error_handler` where nothing is skipped.

    Raises:
        Exception: the error, with its place.
    """
    raise add_location(error, _key(sample), _source(sources or _field(sample, "__sources__"))) from error


def verify_hint(folder: str) -> str:
    """What to do about a pack that cannot be loaded."""
    return f"energon-packed verify {folder} tells whether files are damaged: copy or pack them again"


def _reason(error: Exception) -> str:
    if isinstance(error, RecordError):
        return error.reason.value
    if isinstance(error, FormatError):
        return "bad_format"
    return "bad_batch" if isinstance(error, BatchError) else "other"


def _key(sample: Any) -> str:
    """Key of a sample, of a raw sample, or of the first of several."""
    return str(_field(sample, "__key__"))


def _field(sample: Any, name: str) -> Any:
    """A field of a sample, of a raw sample, or of the first of several."""
    if isinstance(sample, list | tuple):
        return _field(sample[0], name) if sample else None
    if isinstance(getattr(sample, "data", None), tuple):  # Energon's RawSampleData
        return _field(sample.data, name)
    return sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)


def _source(sources: Any) -> str:
    names = sorted({f"{s.dataset_path}/{s.shard_name}" for s in sources or () if hasattr(s, "shard_name")})
    return ", ".join(names)
