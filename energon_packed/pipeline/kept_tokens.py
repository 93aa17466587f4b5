"""Kept tokens: what measuring tokenized, kept for the stage that stores it, so that no text is tokenized twice.

One file for each chunk, without a header: for every measured record its L input_ids and then its L labels, as
little-endian int32. The lengths of the records say where each one lies.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import EncodedSample
from energon_packed.files import aside
from energon_packed.system import most_open

Int64 = npt.NDArray[np.int64]
_TOKEN = 8  # bytes: an id and a label
_MAX_OPEN = 128


def tokens_file(rows_file: Path) -> Path:
    """Where the tokens of a chunk go, beside the file of its rows."""
    return rows_file.with_suffix(".tokens")


def write_tokens(file: Path, samples: Iterable[EncodedSample]) -> None:
    """Write the tokens of the measured records of one chunk, in order; the file appears when it is complete."""
    with aside(file) as temporary, temporary.open("wb") as out:
        for sample in samples:
            out.write(np.concatenate([sample.input_ids, sample.labels]).astype("<i4").tobytes())


def tokens_size(lengths: npt.NDArray[np.int32]) -> int:
    """Bytes of the file of records with these lengths; -1 for a rejected one."""
    return int(_TOKEN * lengths[lengths > 0].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRefs:
    """Where the tokens of k records are.

    Attributes:
        files: paths.
        file: int64 (k,), index into `files`.
        offset: int64 (k,), byte in that file.
    """

    files: Sequence[Path]
    file: Int64
    offset: Int64


class KeptTokens:
    """The kept tokens of all n records.

    Args:
        files: of all chunks, in order.
        starts: int64 (chunks,), number of the first record of each.
        lengths: int32 (n,), tokens of each record, -1 where it is rejected.
    """

    def __init__(self, files: Sequence[Path], starts: Int64, lengths: npt.NDArray[np.int32]) -> None:
        self._files = files
        self._starts = starts
        self._before = np.zeros(len(lengths) + 1, dtype=np.int64)  # tokens of all records before
        np.cumsum(np.maximum(lengths, 0), out=self._before[1:])

    def refs(self, rows: Int64) -> TokenRefs:
        """Where the tokens of these records are."""
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        offset = _TOKEN * (self._before[rows] - self._before[self._starts[chunk]])
        used, file = np.unique(chunk, return_inverse=True)
        return TokenRefs(files=[self._files[number] for number in used.tolist()], file=file, offset=offset)


class TokenReader:
    """Reads kept tokens; few files are open at a time.

    with TokenReader(refs) as tokens:
        sample = tokens.read(0, 17)
    """

    def __init__(self, refs: TokenRefs) -> None:
        self._refs = refs
        self._open: OrderedDict[int, int] = OrderedDict()

    def __enter__(self) -> "TokenReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, place: int, length: int) -> EncodedSample:
        """Tokens and labels of one record, whose length is known.

        Raises:
            OSError: its file is gone or too short.
        """
        file = int(self._refs.file[place])
        content = os.pread(self._descriptor(file), _TOKEN * length, int(self._refs.offset[place]))
        if len(content) != _TOKEN * length:
            raise OSError(f"{self._refs.files[file]} is shorter than what was measured")
        ids, labels = np.frombuffer(content, dtype="<i4").reshape(2, length).astype(np.int64)
        return EncodedSample(input_ids=ids, labels=labels)

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._refs.files[file], os.O_RDONLY)
            if len(self._open) > most_open(_MAX_OPEN):
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(file)
        return self._open[file]
