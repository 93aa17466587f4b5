"""Reading single records from the files of chunks: places of records in; their tokens, columns and frames out.

RecordBytes is the index of all records, and RecordOffsets has the places of some, for other processes. chunks.py
describes the files.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.encoding import IGNORE_INDEX, EncodedSample
from energon_packed.files import of_type
from energon_packed.formats.audios import clip_from_dict
from energon_packed.formats.videos import frames_from_dict
from energon_packed.packing.planner import Allocate
from energon_packed.pipeline.measured.chunks import NUMBER, TOKEN
from energon_packed.records import AudioClip, FrameSelection
from energon_packed.records.columns import Columns
from energon_packed.system import most_open

Int64 = npt.NDArray[np.int64]
_HEADER = 1 << 16  # bytes of a .npy header, which names all columns
_MAX_OPEN = 128  # files that a TokenReader keeps open
Read = Callable[[npt.NDArray[Any]], Any]
"""Returns the values of some records in a column of all records."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordOffsets:
    """Files and offsets of the bytes of k records.

    Attributes:
        files: paths.
        file: int64 (k,), index into `files`.
        offset: int64 (k,), byte in that file.
        size: int64 (k,), bytes of each record.
        sizes: int64 (files,), bytes of all records in each file. In token files, loss weights follow them.
        columns: of token files, the place of the columns of each record; None if no record has columns.
    """

    files: Sequence[Path]
    file: Int64
    offset: Int64
    size: Int64
    sizes: Int64
    columns: "RecordOffsets | None" = None


class RecordBytes:
    """Index of the bytes of all n records in a file of each chunk, in which they are in order and without gaps.

    Args:
        files: files of all chunks, in order.
        starts: int64 (chunks,), index of the first record of each chunk.
        sizes: (n,), bytes of each record, or units of `unit` bytes; -1 for a rejected record.
        empty: makes an array of 4 or 8 bytes per record.
        unit: bytes of a unit.
        columns: of token files, the index of the columns of all records; None if no record has columns.
    """

    def __init__(
        self,
        files: Sequence[Path],
        starts: Int64,
        sizes: npt.NDArray[np.integer],
        empty: Allocate,
        *,
        unit: int = 1,
        columns: "RecordBytes | None" = None,
    ) -> None:
        self._files, self._starts, self._sizes = files, starts, sizes
        self._unit, self._columns = unit, columns
        chunks = [sizes[start:stop] for start, stop in pairwise([*starts.tolist(), len(sizes)])]
        self._units = np.array([np.maximum(own, 0).sum(dtype=np.int64) for own in chunks], dtype=np.int64)
        # Units of the records of the chunk that are before each record: half the memory of units of all chunks.
        self._before = empty(len(sizes), np.uint32 if self._units.max(initial=0) < 1 << 32 else np.int64)
        for start, own in zip(starts.tolist(), chunks, strict=True):
            self._before[start : start + len(own)][1:] = np.cumsum(np.maximum(own[:-1], 0), dtype=np.int64)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """Arrays of all records that `refs` reads."""
        return [self._before, self._sizes, *(self._columns.arrays if self._columns else ())]

    def refs(self, rows: Int64, read: Read | None = None) -> RecordOffsets:
        """Files and offsets of the bytes of these records.

        Args:
            rows: int64 (k,), indices of the records.
            read: returns the values of these records in one of `arrays`; None reads them by their indices.
        """
        read = read or itemgetter(rows)
        # side="right": empty chunks share their start with the chunk after them, and only the last contains the record
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        used, file = np.unique(chunk, return_inverse=True)
        return RecordOffsets(
            files=[self._files[index] for index in used.tolist()],
            file=file,
            offset=self._unit * read(self._before).astype(np.int64),
            size=self._unit * np.maximum(read(self._sizes), 0).astype(np.int64),
            sizes=self._unit * self._units[used],
            columns=self._columns.refs(rows, read) if self._columns else None,
        )


class TokenReader:
    """Context manager that reads the tokens of records and keeps few files open.

    with TokenReader(refs) as tokens:
        sample = tokens.read(0, 17)
    """

    def __init__(self, refs: RecordOffsets) -> None:
        self._refs = refs
        self._open: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # descriptor, and whether the file has weights

    def __enter__(self) -> "TokenReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor, _ in self._open.values():
            os.close(descriptor)

    def read(self, index: int, length: int, fragment: np.void | None = None) -> EncodedSample:
        """Read the tokens, labels, loss weights and columns of a record, or of a fragment of it.

        Args:
            index: index of the record in the `RecordOffsets`.
            length: tokens of the record or fragment.
            fragment: the fragment; None for a complete record.

        Raises:
            OSError: the file is gone or too short.
        """
        start, total, context = 0, length, 0
        if fragment is not None:
            start, total, context = (int(fragment[name]) for name in ("start", "total", "context"))
        offset = int(self._refs.offset[index]) + NUMBER * start
        labels = self._int32(index, offset + NUMBER * total, length)
        labels[:context] = IGNORE_INDEX
        return EncodedSample(
            input_ids=self._int32(index, offset, length),
            labels=labels,
            loss_weights=self._weights(index, start, length),
            columns=self._columns(index, start, length),
        )

    def _int32(self, index: int, offset: int, count: int) -> Int64:
        return np.frombuffer(self._read(index, offset, count), dtype="<i4").astype(np.int64)

    def _weights(self, index: int, start: int, count: int) -> npt.NDArray[np.float32] | None:
        """Loss weights of tokens from `start` of a record, float32 (count,); None if the file has none."""
        file = int(self._refs.file[index])
        if not self._opened(file)[1]:
            return None
        first = int(self._refs.offset[index]) // TOKEN + start
        content = self._read(index, int(self._refs.sizes[file]) + NUMBER * first, count)
        return np.frombuffer(content, dtype="<f4").astype(np.float32)

    def _columns(self, index: int, start: int, count: int) -> Columns | None:
        """Columns of tokens from `start` of a record; None if it has none."""
        refs = self._refs.columns
        if refs is None or (size := int(refs.size[index])) == 0:
            return None
        file, offset = refs.files[int(refs.file[index])], int(refs.offset[index])
        with file.open("rb") as stream:
            try:
                stream.seek(offset)
                np.lib.format.read_magic(stream)
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=_HEADER)
                if stream.tell() + shape[0] * dtype.itemsize != offset + size or start + count > shape[0]:
                    raise ValueError(f"{shape[0]} tokens")
                stream.seek(start * dtype.itemsize, os.SEEK_CUR)
                rows = np.frombuffer(stream.read(count * dtype.itemsize), dtype=dtype, count=count)
            except ValueError as error:
                raise OSError(f"{file} is damaged: {error}") from error
        return {name: np.ascontiguousarray(rows[name]) for name in dtype.names or ()}

    def _read(self, index: int, offset: int, count: int) -> bytes:
        """Read `count` numbers of 4 bytes."""
        file = int(self._refs.file[index])
        content = os.pread(self._opened(file)[0], 4 * count, offset)
        if len(content) != 4 * count:
            raise OSError(f"{self._refs.files[file]} is truncated: it contains fewer tokens than were measured")
        return content

    def _opened(self, file: int) -> tuple[int, bool]:
        """Descriptor of a file, and whether it has loss weights."""
        if file not in self._open:
            descriptor = os.open(self._refs.files[file], os.O_RDONLY)
            self._open[file] = (descriptor, os.fstat(descriptor).st_size > int(self._refs.sizes[file]))
            if len(self._open) > most_open(_MAX_OPEN):
                os.close(self._open.popitem(last=False)[1][0])
        self._open.move_to_end(file)
        return self._open[file]


def read_frames(refs: RecordOffsets, index: int) -> tuple[tuple[FrameSelection, ...], tuple[AudioClip, ...]]:
    """Read the selected frames of the videos of record `index` of the `RecordOffsets`, and its clips of audio files.

    Raises:
        OSError: the file is gone or damaged.
    """
    if (size := int(refs.size[index])) == 0:
        return (), ()
    file = refs.files[int(refs.file[index])]
    with file.open("rb") as stream:
        stream.seek(int(refs.offset[index]))
        content = stream.read(size)
    try:
        values = [of_type(value, dict) for value in of_type(orjson.loads(content), list)]
        frames = tuple([frames_from_dict(value) for value in values if "frames" in value])
        return frames, tuple([clip_from_dict(value) for value in values if "frames" not in value])
    except (ValueError, LookupError) as error:
        raise OSError(f"{file} is damaged: {error}") from error
