"""RecordTable: the numbers of all records in the driver's memory, joined from the chunk files."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.pipeline.chunks import (
    COUNTED,
    NUMBERS,
    PACKED,
    STATUSES,
    Chunk,
    WorkerProgress,
    as_numpy,
    measured_records,
    read_counts,
    read_rows,
)

Int64 = npt.NDArray[np.int64]
_MOST_TEXTS = 200  # counted one by one; records with keys of their own would make the manifest large


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordRefs:
    """Where k records are.

    Attributes:
        source: int64 (k,), number of the source.
        row: int64 (k,), number of the record in its source.
        address, size: int64 (k,), int32 (k,), place in the source.
        length: int32 (k,), tokens as measured.
        media_bytes: int64 (k,), bytes of its media as measured.
    """

    source: Int64
    row: Int64
    address: Int64
    size: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    media_bytes: Int64

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordTable:
    """Numbers of all n records, in input order; 43 bytes a record.

    Attributes:
        address: int64 (n,), where each record lies in its source.
        size: int32 (n,), bytes of the record, 0 where unknown.
        length: int32 (n,), tokens, -1 where the record is rejected.
        supervised: int32 (n,), targets among them, -1 where the record is rejected or its Processor does not tell.
        text_bytes: int32 (n,), bytes of the texts with their JSON, about.
        media_bytes: int64 (n,), bytes of images and .npy files.
        num_images: int32 (n,).
        num_decoded: int32 (n,), images among them whose pixels were decoded; the others were checked by their headers.
        kind: int8 (n,), index into KINDS.
        status: int8 (n,), index into STATUSES; 0 means packed.
        narrow: int8 (n,), 1 where PackedCaptioningSample holds the record.
        source_starts: int64 (sources + 1,), row at which each source begins.
        files: chunk files, in input order.
        file_starts: int64 (chunks,), row at which each file begins.
        counts: records that list each text of `COUNTED`: fields that nothing reads, and notes.
    """

    address: Int64
    size: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.int32]
    text_bytes: npt.NDArray[np.int32]
    media_bytes: Int64
    num_images: npt.NDArray[np.int32]
    num_decoded: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    status: npt.NDArray[np.int8]
    narrow: npt.NDArray[np.int8]
    source_starts: Int64
    files: list[Path]
    file_starts: Int64
    counts: WorkerProgress

    def __len__(self) -> int:
        return len(self.status)

    def locate(self, rows: Int64) -> tuple[Int64, Int64]:
        """(source, row in that source) of each row: int64 (k,), int64 (k,)."""
        source = np.searchsorted(self.source_starts, rows, side="right") - 1
        return source, rows - self.source_starts[source]

    def refs(self, rows: Int64) -> RecordRefs:
        """Where the records of these rows are."""
        source, local = self.locate(rows)
        return RecordRefs(
            source=source,
            row=local,
            address=self.address[rows],
            size=self.size[rows],
            length=self.length[rows],
            media_bytes=self.media_bytes[rows],
        )


def load_table(chunks: Sequence[Chunk], sources: int) -> RecordTable:
    """Join the chunk files, which are all there."""
    counts = [measured_records(chunk) for chunk in chunks]
    total = sum(counts)
    columns = {name: np.empty(total, dtype=dtype) for name, dtype in NUMBERS.items()}
    per_source = np.zeros(sources + 1, dtype=np.int64)
    start = 0
    listed: WorkerProgress = {name: Counter() for name in COUNTED}
    for chunk, count in zip(chunks, counts, strict=True):
        table = read_rows(chunk.file)
        for name, column in columns.items():
            column[start : start + count] = as_numpy(table[name], column.dtype)
        for name, texts in read_counts(table).items():
            listed[name].update(texts)
        per_source[chunk.source + 1] += count
        start += count
    return RecordTable(
        **columns,
        source_starts=np.cumsum(per_source),
        files=[chunk.file for chunk in chunks],
        file_starts=np.cumsum([0, *counts], dtype=np.int64)[:-1],
        counts=listed,
    )


def most_common(counts: Counter[str]) -> dict[str, int]:
    """Counts in order, the largest first; texts past the first 200 are one entry, `(others)`."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ranked[_MOST_TEXTS:])
    return dict(ranked[:_MOST_TEXTS]) | ({"(others)": others} if others else {})


def reject_counts(status: npt.NDArray[np.int8]) -> dict[str, int]:
    """Rejected records by reason; only reasons that occur."""
    counts = np.bincount(status, minlength=len(STATUSES))
    return {name: int(count) for name, count in zip(STATUSES, counts, strict=True) if count and name != PACKED}
