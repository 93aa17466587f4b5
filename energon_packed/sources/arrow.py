"""Arrow: rows of a memory-mapped IPC file or stream; image bytes stay in the file until they are used."""

import bisect
import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from energon_packed.errors import SourceError
from energon_packed.sources.base import Row, Source, changed_at

_ROWS_AT_A_TIME = 64  # rows may hold images


class ArrowSource(Source):
    """An Arrow IPC file (.arrow, .feather) or stream (as Hugging Face datasets writes)."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather")

    def extent(self) -> int:
        """Number of rows."""
        return self._batches().rows

    def scan(self, start: int, stop: int) -> Iterator[Row]:
        """Rows [start, stop)."""
        batches = self._batches()
        for begin in range(start, stop, _ROWS_AT_A_TIME):
            rows = batches.rows_between(begin, min(begin + _ROWS_AT_A_TIME, stop))
            for number, values in enumerate(rows, start=begin):
                yield Row(number, 0, self.record(values))

    def read(self, address: int, size: int) -> Row:
        """The row with that number."""
        return Row(address, 0, self.record(next(iter(self._batches().rows_between(address, address + 1)))))

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """The record of a row of columns."""
        if values.get("tools"):
            values["tools"] = _without_nulls(values["tools"])
        for message in values.get("messages") or ():
            if isinstance(message, dict) and message.get("tool_calls"):
                message["tool_calls"] = _without_nulls(message["tool_calls"])
        return values

    def _batches(self) -> "_Batches":
        return _open_batches(self.data, self.data.stat().st_size, changed_at(self.data))


def _without_nulls(value: Any) -> Any:
    """Objects without the keys that only other rows have: a column has one type, with the keys of all its rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class _Batches:
    """Record batches of one file, with random access by row."""

    def __init__(self, path: Path) -> None:
        try:
            source = pa.memory_map(str(path))
            try:
                reader = pa.ipc.open_file(source)
                counts = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
                self._batch = lru_cache(maxsize=4)(reader.get_batch)
            except pa.ArrowInvalid:
                source.seek(0)
                batches = pa.ipc.open_stream(source).read_all().to_batches()
                counts = [batch.num_rows for batch in batches]
                self._batch = batches.__getitem__
        except (pa.ArrowInvalid, OSError) as error:
            raise SourceError(f"{path} is not an Arrow file or stream: {error}") from error
        self._starts = list(itertools.accumulate(counts, initial=0))
        self.rows: int = self._starts[-1]

    def rows_between(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        while start < stop:
            number = bisect.bisect_right(self._starts, start) - 1
            count = min(stop, self._starts[number + 1]) - start
            yield from self._batch(number).slice(start - self._starts[number], count).to_pylist()
            start += count


@lru_cache(maxsize=64)
def _open_batches(path: Path, size: int, changed: int) -> _Batches:
    """One mapping per file and version of it."""
    return _Batches(path)
