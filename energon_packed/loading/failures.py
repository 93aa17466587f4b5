"""Failures while loading: exceptions of samples and workers in; counts, log lines and one-line errors out.

| part | input | output |
|---|---|---|
| `FailureLog` | samples that fail, records that are rejected | counts and rows; an error past `max_failures` |
| `watched`, `watch_workers`, `in_one_line`, `lost_worker` | exceptions of torch's DataLoader | one-line errors |
| `add_location`, `reraise_with_location` | an error of a pack | the error with shard, key and remedy |
| `sendable` | an error in a worker | an error that the main process can restore |

Without a FailureLog, Energon would skip a failing sample and only print a traceback. Its counts and rows are in memory
that workers share, so the main process sees them, and the limit is one for all workers of a rank. Rejected records of
input files are reported as `pack` reports them: see `pipeline.rejects`.

Torch raises `DataLoader worker (pid 7) is killed by signal: Killed.` and `DataLoader timed out after 9 seconds`, and
turns an error of a worker into its whole traceback. No API has these facts, so the messages are parsed. Torch raises
the death of a worker in its handler of SIGCHLD, wherever the main process is: `watch_workers` replaces the handler.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from megatron.energon.errors import FatalSampleError
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from energon_packed import errors
from energon_packed.errors import (
    REQUESTED_REJECTS,
    BatchError,
    ConfigError,
    DataChangedError,
    EnergonPackedError,
    FormatError,
    Reason,
    RecordError,
    Reject,
    WorkerError,
)
from energon_packed.libraries import private
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
    warning_of,
)
from energon_packed.system import resource_error

_log = logging.getLogger(__name__)
_DEAD = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: [^.]+|exited unexpectedly)")
_SLOW = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
_CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")
# The last line of a traceback; the errors of flavors/base.py for Energon are errors of this package, too.
_OWN_ERROR = re.compile(r"^energon_packed\.(?:errors\.|flavors\.base\.Fatal)(\w+): (.*)$", re.M)
_RECORD = re.compile(r"(\w+): (.*)")
_SIGNALS = {
    "Killed": "out of memory (see dmesg). Use fewer workers, a smaller `prefetch_factor` or `shuffle_buffer_size`, or "
    "more memory",
    "Bus error": "shared memory is full, or an input file was truncated while it was read. Enlarge /dev/shm, or use "
    "fewer workers",
}
_CRASHED = "out of memory, or a crash. Use fewer workers, or `num_workers=0` to see the cause"
_RESUME = "then resume from the last saved state in a new loader."
_RECORD_REASONS = tuple(reason.value for reason in Reason)
_REASONS = (*_RECORD_REASONS, "bad_format", "bad_batch", "other", "epoch_end")
WINDOW = 1000
"""Records for which a stream checks `max_reject_rate`."""
_MAX_BYTES = 512 << 10  # of all rows; most rows have some 200 bytes, so 1,000 fit


class FailureLog:
    """Count failures by reason, log each with its key and source, and stop the run past a limit.

    A loader with epochs counts from the start of the epoch, or from the restored state.

    Args:
        limit: failures of this rank that are skipped; the next failure raises. 0 raises the first failure, with its
            location. None skips all.
        context: start method of the workers, or a context of multiprocessing; None for the default.
        readers: readers of the records that are loaded.

    Attributes:
        limits: limits on rejected records, beside `limit`.
        planned: records that were rejected before loading; part of `counts` and `rows`.
    """

    def __init__(
        self,
        limit: int | None = 0,
        context: Any = None,
        readers: Sequence[RecordReader] = (),
    ) -> None:
        self.limit = limit
        self.limits = RejectLimits()
        self.planned = RejectReport()
        self._readers = readers
        self._is_whole = False
        shared = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        # Two arrays with the same reasons: the limit counts failures, and not samples that the settings drop.
        self._counts = shared.Array("q", len(_REASONS))
        self._dropped = shared.Array("q", len(_REASONS))
        self._used = shared.Value("q", 0)
        self._window = shared.Array("q", 2)  # records since the last WINDOW of them, and the rejected among them
        self._rows = _SharedLines(shared)

    @property
    def counts(self) -> dict[str, int]:
        """Failures and dropped samples so far by reason; only reasons that occur."""
        both = zip(_REASONS, self._counts[:], self._dropped[:], strict=True)
        counts = {name: self.planned.counts.get(name, 0) + failed + dropped for name, failed, dropped in both}
        return {name: count for name, count in counts.items() if count}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The first 1,000 failures, as lines of rejects.jsonl: `source`, `row`, `line`, `id`, `reason` and
        `detail`.

        They are in input order. `row` is None for items that are not records of an input file. Reading this property
        counts the rows of JSONL files and tars, which reads these files.
        """
        others: list[Rejected] = []
        records: dict[tuple[int, int], list[Any]] = {}  # by index of the reader, and of the source in it
        for line in map(orjson.loads, self._rows.read()):
            source, path, address, ident, reason, detail = line  # as `_SharedLines.add` was called
            reader = self._reader_of(source, path)
            if reader is None:
                others.append(Rejected(path, None, None, ident, reason, detail))
            else:
                records.setdefault((reader, source), []).append((address, ident, reason, detail))
        of_records: list[Rejected] = []
        for (reader, source), entries in sorted(records.items()):
            of_records += sorted(self._readers[reader].rejected(source, entries), key=lambda entry: entry.row or 0)
        return (self.planned.rows + [entry._asdict() for entry in [*of_records, *others]])[:MOST_ROWS]

    def start(self, *, is_whole: bool) -> None:
        """Reset the counts when reading starts; `is_whole` at the start of an epoch."""
        self._is_whole = is_whole
        for counts in (self._counts, self._dropped):
            with counts.get_lock():
                counts[:] = [0] * len(_REASONS)
        with self._used.get_lock():
            self._used.value = 0
        with self._window.get_lock():
            self._window[:] = [0, 0]
        self._rows.clear()

    def use(self, items: int) -> None:
        """Count items that are not rejected."""
        with self._used.get_lock():
            self._used.value += items
        self._move_window(items, rejected=False)

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
        used = int(self._used.value)
        if line := warning_of(counts, used + sum(counts.values()), "`failures.rows` of the loader"):
            _log.warning("epoch %d: %s", epoch, line)
        # Rates need a whole epoch. A rank without any used record may just have got none that is good, and the few
        # records of one rank say little about the rate of the input.
        if self._is_whole and (used or is_alone):
            limits = replace(self.limits, max_failures=self.limit)
            if not is_alone and used + sum(counts.values()) < WINDOW:
                limits = replace(limits, max_reject_rate=None)
            limits.check_all(counts, used, self._example)

    def reject(self, at: RecordAt, path: str, reject: Reject, *, overlong: str = "drop") -> None:
        """Count a rejected record of an input file, as `pack` does.

        Args:
            at: position of the record.
            path: path of its file.
            reject: reason and detail.
            overlong: with `error`, a sample longer than a row raises.

        Raises:
            RejectLimitError: `strict` or `overlong` allow no such record, there are more than `limit`, or more than
                `max_reject_rate` of `WINDOW` records in a row.
        """
        reject = Reject(reject.reason, reject.detail[:MOST_DETAIL])
        shared = self._counts if is_failure(reject.reason) else self._dropped
        with shared.get_lock():
            shared[_REASONS.index(reject.reason.value)] += 1
            total = sum(shared[:])
        self._rows.add(at.source, path, at.address, at.id, reject.reason.value, reject.detail)
        limits = replace(self.limits, max_failures=self.limit, overlong=overlong)
        if limits.strict or overlong == "error":
            reader = self._reader_of(at.source, path)
            rejected = Rejected(path, None, None, str(at.id), reject.reason.value, reject.detail)
            if reader is not None:
                entry = (at.address, at.id, reject.reason.value, reject.detail)
                rejected = self._readers[reader].rejected(at.source, [entry])[0]
            limits.check_record(rejected)
        if is_failure(reject.reason):
            if str(total).rstrip("0") == "1":  # 1, 10, 100 ...: a line for each would hide all other lines
                name = at.id or f"at {at.address}"
                _log.warning("%d rejected so far; the last is record %s of %s: %s", total, name, path, reject)
            limits.check_failures(
                {name: count for name, count in zip(_REASONS, self._counts[:], strict=True) if count}
            )
        if reject.reason not in REQUESTED_REJECTS:
            records, bad = self._move_window(1, rejected=True)
            limits.check_window(self.counts, bad, records, WINDOW, self._example)

    def drop(self, reason: str) -> None:
        """Count a sample that the settings drop; it does not count for the limit."""
        with self._dropped.get_lock():
            self._dropped[_REASONS.index(reason)] += 1

    def handle(self, error: Exception, sample: Any, sources: Any = None) -> None:
        """Count and log a failure; the sample is skipped on return.

        Raises:
            BatchError: there are more than `limit` failures; with a limit of 0, the error itself.
            DataChangedError: the files of the sample changed since they were opened.
            ResourceError: memory, open files or the disk fail; this is never skipped.
            ConfigError: a package is missing or has changed, or a setting does not fit; this is never skipped.
        """
        sources = sources or _field(sample, "__sources__")
        key, source = _key(sample), _source(sources)
        self._refuse_other_causes(error, source or key)
        with self._counts.get_lock():
            self._counts[_REASONS.index(_reason(error))] += 1
            total = sum(self._counts[:])
        self._rows.add(-1, source, -1, key, _reason(error), str(error)[:MOST_DETAIL])
        _log.error("sample %s%s failed to load: %s: %s", key, source and f" of {source}", type(error).__name__, error)
        if self.limit == 0:
            fatal = add_location(error, key, source)
            raise fatal from (error if fatal is not error else None)
        if self.limit is not None and total > self.limit:
            by_reason = ", ".join(f"{name} {count}" for name, count in self.counts.items())
            raise BatchError(
                f"{total} samples failed to load, more than `max_failures` {self.limit} ({by_reason}); "
                f"the last is {key}: {error}. Fix the data or raise `max_failures`."
            ) from error

    def _move_window(self, records: int, *, rejected: bool) -> tuple[int, int]:
        """Add records to the window; return its records, and the rejected among them."""
        with self._window.get_lock():
            self._window[0] += records
            self._window[1] += records * rejected
            counts = self._window[0], self._window[1]
            if counts[0] >= WINDOW:
                self._window[:] = [0, 0]
        return counts

    def _reader_of(self, source: int, path: str) -> int | None:
        """Index of the reader whose source of that index has that path, or None."""
        for i, reader in enumerate(self._readers):
            if 0 <= source < len(reader.sources) and str(reader.sources[source].path) == path:
                return i
        return None

    def _example(self, reason: str) -> str:
        """A rejected record with a reason, for messages."""
        rows = [row for row in self.rows if row["reason"] == reason]
        return example_of(Rejected(**rows[0])) if rows else "see `failures.rows`"

    def _refuse_other_causes(self, error: Exception, place: str) -> None:
        """Raise if files changed, resources fail, or a package or setting is wrong: the cause is not the sample."""
        is_fatal = isinstance(error, DataChangedError | ConfigError)
        if (fatal := error if is_fatal else resource_error(error, place)) is not None:
            raise fatal from (error if fatal is not error else None)


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


def add_location(error: Exception, key: str, source: str) -> Exception:
    """Add shard and pack to an error, if their content is the cause, and make it `sendable`."""
    if isinstance(error, FormatError | RecordError) and source:
        error = error.at(f"{source}, pack {key}", remedy_of(error, os.path.dirname(source)))
    return resource_error(error, f"{source}, pack {key}") or sendable(error)


def sendable(error: Exception) -> Exception:
    """Return an error that a worker process can send: the error, or its type and text if it cannot be restored.

    The queue of torch drops a message that cannot be pickled, and the main process would miss its batches. A class
    whose constructor needs more than a message fails when it is restored, which hides the error.
    """
    if get_worker_info() is None:
        return error
    kind = type(error)
    try:
        if isinstance(error, EnergonPackedError):
            is_restored = type(pickle.loads(pickle.dumps(error))) is kind
        else:  # torch sends the class and the text, and passes the text as `message` if the class has this attribute
            is_restored = pickle.loads(pickle.dumps(kind)) is kind and not getattr(kind, "message", None)
    except Exception:  # pickling runs code of the class
        is_restored = False
    if is_restored:
        return error
    base = EnergonPackedError if isinstance(error, EnergonPackedError) else RuntimeError
    return base(f"{kind.__name__}: {error}").with_traceback(error.__traceback__)


def reraise_with_location(error: Exception, sample: Any, sources: Any = None) -> None:
    """Raise the error of a sample, with its location. Energon's `global_error_handler` if no failure is skipped.

    Raises:
        Exception: the error.
    """
    raise add_location(error, _key(sample), _source(sources or _field(sample, "__sources__"))) from error


def named(sample: Any, sources: Any = None) -> dict[str, Any]:
    """Return key and sources of a sample, a raw sample, or the first of a list, for `FailureLog.handle`."""
    return {"__key__": _key(sample), "__sources__": sources or _field(sample, "__sources__")}


def remedy_of(error: EnergonPackedError, folder: str) -> str:
    """Return the remedy for a pack that cannot be loaded."""
    # Packed by their headers, these media were damaged in the input: neither a copy nor the same command repairs them.
    if isinstance(error, RecordError) and error.reason in (Reason.CORRUPT_IMAGE, Reason.CORRUPT_VIDEO):
        return "pack again with --check-media full, which rejects records with damaged images or videos"
    return f"energon-packed verify {folder} checks whether files are damaged: copy or pack them again"


def _reason(error: Exception) -> str:
    if isinstance(error, RecordError):
        return error.reason.value
    if isinstance(error, FormatError):
        return "bad_format"
    return "bad_batch" if isinstance(error, BatchError) else "other"


def _key(sample: Any) -> str:
    """Key of a sample, of a raw sample, or of the first in a list."""
    return str(_field(sample, "__key__"))


def _field(sample: Any, name: str) -> Any:
    """A field of a sample, of a raw sample, or of the first in a list."""
    if isinstance(sample, list | tuple):
        return _field(sample[0], name) if sample else None
    if isinstance(getattr(sample, "data", None), tuple):  # Energon's RawSampleData
        return _field(sample.data, name)
    return sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)


def _source(sources: Any) -> str:
    """Paths of the tars in `__sources__`, joined."""
    names = sorted({f"{s.dataset_path}/{s.shard_name}" for s in sources or () if hasattr(s, "shard_name")})
    return ", ".join(names)


def in_one_line(error: BaseException, loader: str) -> EnergonPackedError | None:
    """Convert the error of a worker to an error of a single line; return None for other errors.

    Args:
        error: the error that torch raised.
        loader: name of the loader in the message.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and (match := _DEAD.search(text)):
        remedy = next((remedy for name, remedy in _SIGNALS.items() if match[2].endswith(name)), _CRASHED)
        return WorkerError(f"a worker process of {loader} (pid {match[1]}) {match[2]}: {remedy}, {_RESUME}")
    if isinstance(error, RuntimeError) and (match := _SLOW.search(text)):
        return WorkerError(
            f"{loader} timed out after {match[1]} seconds (`timeout`) waiting for a batch: storage hangs, or samples "
            f"are slow. Check the storage or raise `timeout`, {_RESUME}"
        )
    cause: BaseException | None = error
    while cause is not None:  # Energon raises a FatalSampleError with the compact sample in place of the error
        if isinstance(cause, FatalSampleError) and isinstance(cause, EnergonPackedError):
            return getattr(errors, type(cause).__name__.removeprefix("Fatal"))(str(cause))  # type: ignore[no-any-return]
        cause = cause.__cause__ or cause.__context__
    if _CAUGHT.match(text) and (lines := _OWN_ERROR.findall(text)):
        name, message = lines[-1]
        # A RecordError is made of a reason and a detail; all other errors of this package of a message.
        if name == "RecordError" and (match := _RECORD.fullmatch(message)):
            return RecordError(Reason(match[1]), match[2])
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    return None


def lost_worker(error: BaseException, loader: str, batches: Any) -> WorkerError | None:
    """Convert a connection error to the error of the worker that died; return None if no worker died.

    Torch may notice the broken connection before it notices the death of the process.
    """
    workers = _workers_of(batches)
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
        f"{_CRASHED}, {_RESUME}"
    )


def watched(batches: Iterator[Any], loader: str) -> Iterator[Any]:
    """Iterate over the batches of torch's DataLoader, and convert its errors; if a worker died, kill the others.

    Raises:
        EnergonPackedError: an error of a worker, or its death, in one line.
        Exception: another error of the iterator.
    """
    watch_workers(batches, loader)
    try:
        yield from batches
    except WorkerError:
        end_workers(batches)
        raise
    except Exception as error:
        converted = in_one_line(error, loader) or lost_worker(error, loader, batches)
        if converted is None:
            raise
        if isinstance(converted, WorkerError):
            end_workers(batches)
        raise converted from error


_watched: MutableMapping[Any, str] = WeakKeyDictionary()  # name of the loader of each iterator of torch's DataLoader


def watch_workers(batches: Any, loader: str) -> None:
    """Make the death of a worker a WorkerError, wherever the main process is; the other workers are killed.

    Torch raises a RuntimeError in its handler of SIGCHLD, such as in the training step. The handler is replaced, since
    torch has no other way to change the error.

    Args:
        batches: iterator of torch's DataLoader, whose workers run.
        loader: name of the loader in the message.
    """
    if not _workers_of(batches) or batches in _watched:
        return
    _watched[batches] = loader
    of_torch = signal.getsignal(signal.SIGCHLD)
    is_main = threading.current_thread() is threading.main_thread()
    # Torch sets its handler once for each process, when the first worker starts in the main thread.
    if not is_main or not callable(of_torch) or isinstance(of_torch, _ChildHandler):
        return
    signal.signal(signal.SIGCHLD, _ChildHandler(of_torch))


@dataclass(frozen=True, slots=True)
class _ChildHandler:
    """Handler of SIGCHLD that converts the error of torch's handler."""

    of_torch: Callable[[int, Any], Any]

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.of_torch(number, frame)
        except RuntimeError as error:
            dead = _DEAD.search(str(error))
            pids = {int(pid) for pid in dead[1].split(",")} if dead else set()
            for batches, loader in list(_watched.items()):
                if pids.isdisjoint(worker.pid for worker in _workers_of(batches)):
                    continue
                # Queues are closed later: the signal may have interrupted a function that has their lock.
                _kill(batches)
                converted = in_one_line(error, loader)
                assert converted is not None
                raise converted from error
            raise  # of a DataLoader of the user


def end_workers(batches: Any) -> None:
    """Kill the workers of an iterator of torch's DataLoader.

    Torch asks workers to end, and Python waits for them when the process exits. A worker that hangs in a read does
    not answer, and would block the exit.
    """
    if not _workers_of(batches):
        return
    _kill(batches)
    shutdown = private(batches, "_shutdown_workers", "torch")
    with contextlib.suppress(Exception):  # queues and threads of killed workers may be in any state
        shutdown()


def _kill(batches: Any) -> None:
    if private(batches, "_worker_pids_set", "torch"):  # or the signal handler of torch would raise that they died
        private(signal_handling, "_remove_worker_pids", "torch")(id(batches))
        batches._worker_pids_set = False
    for worker in _workers_of(batches):
        worker.kill()


def dead_workers(batches: Any) -> list[int]:
    """Process ids of the ended workers of an iterator of torch's DataLoader."""
    return [worker.pid for worker in _workers_of(batches) if not worker.is_alive()]


def _workers_of(batches: Any) -> Sequence[Any]:
    """Worker processes of an iterator of torch's DataLoader; none if it loads in this process."""
    is_of_torch = isinstance(batches, _MultiProcessingDataLoaderIter)
    workers: Sequence[Any] = private(batches, "_workers", "torch") if is_of_torch else getattr(batches, "_workers", ())
    return workers
