"""FailureLog: what happens to samples that fail while loading. Energon would skip them and only print a traceback.

Counts are shared with the worker processes, so the main process sees them, and the limit holds for all of a rank.
"""

import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from energon_packed.errors import BatchError, DataChangedError, FormatError, Reason, RecordError

_log = logging.getLogger(__name__)
_REASONS = (*(reason.value for reason in Reason), "bad_format", "bad_batch", "other", "drop_last")


class FailureLog:
    """Counts failures by reason, logs each with its key and source, and stops the run past a limit.

    Args:
        limit: failures of one rank that are skipped; the next one raises. 0 raises the first one, with its place.
        unchanged: raises DataChangedError for sources that are not the files of before: that is no failure of a
            sample, and is never skipped. None does not look.
        context: start method of the workers, or a context of multiprocessing; None for the default.
    """

    def __init__(self, limit: int = 0, unchanged: Callable[[Any], None] | None = None, context: Any = None) -> None:
        self.limit = limit
        self._unchanged = unchanged
        self._last_word: Exception | None = None
        given = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._counts = given.Array("q", len(_REASONS))
        self._dropped = given.Array("q", len(_REASONS))

    @property
    def counts(self) -> dict[str, int]:
        """Failures and dropped samples so far by reason; only reasons that occur."""
        both = zip(_REASONS, self._counts[:], self._dropped[:], strict=True)
        return {name: failed + dropped for name, failed, dropped in both if failed + dropped}

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
        _log.error("sample %s%s failed to load: %s: %s", key, source and f" of {source}", type(error).__name__, error)
        if self.limit == 0:
            self._last_word = placed(error, key, source)
            raise self._last_word from (error if self._last_word is not error else None)
        if total > self.limit:
            by_reason = ", ".join(f"{name} {count}" for name, count in self.counts.items())
            self._last_word = BatchError(
                f"{total} samples failed to load, more than `max_failures` {self.limit} ({by_reason}); "
                f"the last is {key}: {error}; fix the data or raise `max_failures`"
            )
            raise self._last_word from error

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


def placed(error: Exception, key: str, source: str) -> Exception:
    """The error with shard and pack, where it is one of their content."""
    if isinstance(error, FormatError | RecordError) and source:
        return error.at(f"{source}, pack {key}", verify_tells(os.path.dirname(source)))
    return error


def raise_placed(error: Exception, sample: Any, sources: Any = None) -> None:
    """Energon's `global_error_handler` where nothing is skipped.

    Raises:
        Exception: the error, with its place.
    """
    raise placed(error, _key(sample), _source(sources or _field(sample, "__sources__"))) from error


def verify_tells(folder: str) -> str:
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
