"""ArrowSource: rows of a memory-mapped Arrow IPC file or stream; image bytes stay in the file until they are used."""

import bisect
import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from energon_packed.errors import SourceError
from energon_packed.sources.base import Row, Source, changed_at


class ArrowSource(Source):
    """An Arrow IPC file (.arrow, .feather) or stream (as Hugging Face datasets writes).

    Args:
        json_cells: cells of columns that hold lists are parsed as JSON: for tables that come from CSV.
    """

    def __init__(
        self,
        path: Path,
        *,
        data: Path | None = None,
        image_root: Path | None = None,
        json_cells: bool = False,
    ) -> None:
        super().__init__(path, data=data, image_root=image_root)
        self.json_cells = json_cells

    @property
    def chunk_limits(self) -> tuple[int, int]:
        """64 to 512 rows: rows may hold images."""
        return 64, 512

    def extent(self) -> int:
        """Number of rows."""
        return self._batches().rows

    def scan(self, start: int, stop: int) -> Iterator[Row]:
        """Rows [start, stop)."""
        batches = self._batches()
        for begin in range(start, stop, 64):
            for number, record in enumerate(batches.rows_between(begin, min(begin + 64, stop)), start=begin):
                yield Row(number, 0, self._record(record))

    def read(self, address: int, size: int) -> Any:
        """The row with that number."""
        return self._record(next(iter(self._batches().rows_between(address, address + 1))))

    def _batches(self) -> "_Batches":
        return _open_batches(self.data, self.data.stat().st_size, changed_at(self.data))

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.json_cells:
            return _from_cells(record)
        if record.get("tools"):
            record["tools"] = _without_nulls(record["tools"])
        for message in record.get("messages") or ():
            if isinstance(message, dict) and message.get("tool_calls"):
                message["tool_calls"] = _without_nulls(message["tool_calls"])
        return record


_STRUCTURED = (
    "messages",
    "conversations",
    "images",
    "videos",
    "video",
    "tools",
    "input_ids",
    "labels",
    "loss_mask",
    "patch_positions",
)
_TURNS = ("prompts", "captions")


def _without_nulls(value: Any) -> Any:
    """Objects without the keys that only other rows have: a column has one type, with the keys of all its rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _from_cells(record: dict[str, Any]) -> dict[str, Any]:
    """A row of texts, with JSON where lists belong. Prompts and captions are lists where both are; else texts."""
    out = {name: _json_cell(value) if name in _STRUCTURED else value or None for name, value in record.items()}
    turns = {name: _json_cell(out[name]) for name in _TURNS if out.get(name)}
    if all(_are_texts(value) for value in turns.values()):
        out |= turns
    return out


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


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


def _json_cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value or None
