"""Chunk: a range of one source and the Arrow file that its measured records go to, one row each.

The files are restart state: a run that finds a complete one does not measure that range again. Datasets that store
tokens keep those too, in a second file (`kept_tokens`).

Arrow columns from and to numpy and lists, by their buffers.

pyarrow's own conversions import pandas wherever it is installed, in every worker; these avoid that.

Kept tokens: what measuring tokenized, kept for the stage that stores it, so that no text is tokenized twice.

One file for each chunk, without a header: for every measured record its L input_ids and then its L labels, as
little-endian int32. The lengths of the records say where each one lies.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from energon_packed.encoding import EncodedSample
from energon_packed.errors import Reason
from energon_packed.files import atomic_path
from energon_packed.system import most_open

Int64 = npt.NDArray[np.int64]
_TOKEN = 8  # bytes: an id and a label
_MAX_OPEN = 128


def tokens_file(rows_file: Path) -> Path:
    """Where the tokens of a chunk go, beside the file of its rows."""
    return rows_file.with_suffix(".tokens")


def write_tokens(file: Path, samples: Iterable[EncodedSample]) -> None:
    """Write the tokens of the measured records of one chunk, in order; the file appears when it is complete."""
    with atomic_path(file) as temporary, temporary.open("wb") as out:
        for sample in samples:
            out.write(np.concatenate([sample.input_ids, sample.labels]).astype("<i4").tobytes())


def tokens_size(lengths: npt.NDArray[np.int32]) -> int:
    """Bytes of the file of records with these lengths; -1 for a rejected one."""
    return int(_TOKEN * lengths[lengths > 0].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenOffsets:
    """Where the tokens of k records are.

    Attributes:
        files: paths.
        file: int64 (k,), index into `files`.
        offset: int64 (k,), byte in that file.
    """

    files: Sequence[Path]
    file: Int64
    offset: Int64


class TokenCache:
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

    def refs(self, rows: Int64) -> TokenOffsets:
        """Where the tokens of these records are."""
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        offset = _TOKEN * (self._before[rows] - self._before[self._starts[chunk]])
        used, file = np.unique(chunk, return_inverse=True)
        return TokenOffsets(files=[self._files[number] for number in used.tolist()], file=file, offset=offset)


class TokenReader:
    """Reads kept tokens; few files are open at a time.

    with TokenReader(refs) as tokens:
        sample = tokens.read(0, 17)
    """

    def __init__(self, refs: TokenOffsets) -> None:
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


KINDS = ("text", "image", "video")
PACKED = "packed"
TRUNCATED = "truncated"
"""Status in lengths.parquet of a record that is packed, but truncated to `seq_len`."""
STATUSES = (PACKED, *(reason.value for reason in Reason))
SCHEMA = pa.schema(
    {
        "address": pa.int64(),
        "size": pa.int32(),
        "length": pa.int32(),
        "supervised": pa.int32(),
        "text_bytes": pa.int32(),
        "media_bytes": pa.int64(),
        "num_images": pa.int32(),
        "num_decoded": pa.int32(),
        "kind": pa.int8(),
        "status": pa.int8(),
        "narrow": pa.int8(),
        "id": pa.string(),
        "detail": pa.string(),
    }
)
COUNTED = ("unused_fields", "notes")
"""Attributes of a conversation that list texts; the metadata of a chunk file counts the records with each."""
WorkerProgress = dict[str, Counter[str]]
NUMBERS = {name: SCHEMA.field(name).type.to_pandas_dtype() for name in SCHEMA.names if name not in ("id", "detail")}
_FIXABLE = [
    STATUSES.index(reason.value)
    for reason in (
        Reason.MISSING_IMAGE,
        Reason.CORRUPT_IMAGE,
        Reason.IMAGE_OUTSIDE_ROOT,
        Reason.MISSING_PATCH_POSITIONS,
    )
]


def numbers(values: Sequence[int] | npt.NDArray[Any], dtype: Any, valid: npt.NDArray[np.bool_] | None = None) -> Any:
    """A column of numbers; null where `valid` is False.

    Args:
        values: shape (n,).
        dtype: numpy type of the column.
        valid: bool (n,), or None.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    bitmap = None if valid is None else _bitmap(valid)
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [bitmap, pa.py_buffer(array)])


def texts(values: Sequence[str | None]) -> Any:
    """A column of texts; null where a value is None. Lone surrogates become question marks."""
    encoded = [b"" if value is None else value.encode(errors="replace") for value in values]
    ends = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(item) for item in encoded], out=ends[1:])
    valid = np.array([value is not None for value in values], dtype=bool)
    buffers = [None if valid.all() else _bitmap(valid), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def named(codes: npt.NDArray[Any], names: Sequence[str], dtype: Any) -> Any:
    """A dictionary column: `names[code]` for each code.

    Args:
        codes: shape (n,).
        names: texts.
        dtype: numpy type that the codes are kept in.
    """
    return pa.DictionaryArray.from_arrays(numbers(codes, dtype), texts(names))


def as_numpy(column: Any, dtype: Any) -> npt.NDArray[Any]:
    """The values of a column of numbers without nulls, shape (n,); `dtype` is the numpy type of the column."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype=dtype)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _bitmap(valid: npt.NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A range of one source.

    Attributes:
        source: number of the source.
        start, stop: range of addresses.
        file: where the measured rows go.
        keep_tokens: their tokens are kept too.
    """

    source: int
    start: int
    stop: int
    file: Path
    keep_tokens: bool = False

    @property
    def label(self) -> str:
        """For messages."""
        return f"measuring input {self.source} from {self.start} to {self.stop}"

    @property
    def tokens(self) -> Path:
        """Where their tokens go."""
        return tokens_file(self.file)


def read_rows(file: Path) -> Any:
    """The Arrow table of one chunk file, mapped into memory."""
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def measured_records(chunk: Chunk) -> int:
    """Rows in the file of a measured chunk."""
    return int(read_rows(chunk.file).num_rows)


def is_measured(chunk: Chunk) -> bool:
    """Whether an earlier run has measured a chunk, and no missing or damaged medium may have been fixed since."""
    if not chunk.file.exists():
        return False
    try:
        rows = read_rows(chunk.file)
        status = as_numpy(rows["status"], np.int8)
        read_counts(rows)
        if chunk.keep_tokens and chunk.tokens.stat().st_size != tokens_size(as_numpy(rows["length"], np.int32)):
            return False
    except (pa.ArrowInvalid, OSError, KeyError):
        return False
    return not np.isin(status, _FIXABLE).any()


def count_texts(conversations: Sequence[Any]) -> WorkerProgress:
    """How many conversations list each text, by the names in `COUNTED`; None stands for a rejected record."""
    found = [one for one in conversations if one is not None]
    return {name: Counter(_utf8(text) for one in found for text in set(getattr(one, name, ()))) for name in COUNTED}


def _utf8(text: str) -> str:
    """Lone surrogates as question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def read_counts(rows: Any) -> WorkerProgress:
    """What `write_rows` was given, from the table of a chunk file.

    Raises:
        KeyError: the file has no counts; an earlier version wrote it.
    """
    metadata = rows.schema.metadata or {}
    return {name: Counter(orjson.loads(metadata[name.encode()])) for name in COUNTED}


def write_rows(file: Path, columns: Mapping[str, Sequence[Any]], counts: WorkerProgress) -> None:
    """Write the columns of `SCHEMA`; the file appears when it is complete.

    Args:
        file: of the chunk.
        columns: by name.
        counts: as `count_texts` gives them, for all records of the chunk.
    """
    schema = SCHEMA.with_metadata({name: orjson.dumps(counts[name]) for name in COUNTED})
    arrays = [numbers(columns[n], NUMBERS[n]) if n in NUMBERS else texts(columns[n]) for n in SCHEMA.names]
    with (
        atomic_path(file) as temporary,
        pa.OSFile(str(temporary), "wb") as out,
        pa.ipc.new_file(out, schema) as writer,
    ):
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
