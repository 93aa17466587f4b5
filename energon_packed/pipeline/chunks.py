"""Files of measured chunks: the restart state of the measure stage.

Input: the columns of the measured records of a chunk (a range of one source), and their tokens if the flavor stores
tokens. Output: two files that later stages and later runs read; a chunk with complete files is not measured again.

NAME.arrow   the columns of SCHEMA, a table row per record; its metadata has the counts of COUNTED
NAME.tokens  for every measured record its L input_ids and then its L labels, as little-endian int32, without a header;
             offsets follow from the lengths of the records. With this file, no text is tokenized twice.

Columns are converted by their buffers, because the conversions of pyarrow import pandas (if installed) in all workers.
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

from energon_packed.encoding import IGNORE_INDEX, EncodedSample
from energon_packed.errors import Reason
from energon_packed.files import atomic_path
from energon_packed.system import most_open

Int64 = npt.NDArray[np.int64]
_TOKEN = 8  # bytes: an id and a label
_MAX_OPEN = 128  # files that a TokenReader keeps open


KINDS = ("text", "image", "video")
PACKED = "packed"
TRUNCATED = "truncated"
"""Status in lengths.parquet of a record that is packed, but truncated to `seq_len`."""
SPLIT, FRAGMENT = "split", "fragment"
"""Status in lengths.parquet of a record that is packed as fragments, and of each fragment."""
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
        "divisible": pa.int8(),
        "id": pa.string(),
        "detail": pa.string(),
    }
)
COUNTED = ("unused_fields", "notes")
"""Attributes of a conversation that are lists of strings; a chunk file has the number of records with each string."""
StringCounts = dict[str, Counter[str]]
NUMERIC = {name: SCHEMA.field(name).type.to_pandas_dtype() for name in SCHEMA.names if name not in ("id", "detail")}
# Records that were rejected for these reasons are measured again, because the files may have been fixed.
_FIXABLE = [
    STATUSES.index(reason.value)
    for reason in (
        Reason.MISSING_IMAGE,
        Reason.CORRUPT_IMAGE,
        Reason.IMAGE_OUTSIDE_ROOT,
        Reason.MISSING_PATCH_POSITIONS,
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Range of a source, measured into a file.

    Attributes:
        source: index of the source.
        start, stop: range of addresses.
        file: file of the measured records.
        keep_tokens: their tokens are stored too.
    """

    source: int
    start: int
    stop: int
    file: Path
    keep_tokens: bool = False

    @property
    def label(self) -> str:
        """Description for messages."""
        return f"measuring input {self.source} from {self.start} to {self.stop}"

    @property
    def tokens(self) -> Path:
        """File of the tokens."""
        return tokens_file(self.file)


def write_rows(file: Path, columns: Mapping[str, Sequence[Any]], counts: StringCounts) -> None:
    """Write the columns of `SCHEMA`; the file appears when it is complete.

    Args:
        file: file of the chunk.
        columns: columns by name.
        counts: result of `count_strings` for all records of the chunk.
    """
    schema = SCHEMA.with_metadata({name: orjson.dumps(counts[name]) for name in COUNTED})
    arrays = [
        numeric_column(columns[name], NUMERIC[name]) if name in NUMERIC else string_column(columns[name])
        for name in SCHEMA.names
    ]
    with (
        atomic_path(file) as temporary,
        pa.OSFile(str(temporary), "wb") as out,
        pa.ipc.new_file(out, schema) as writer,
    ):
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def read_rows(file: Path) -> Any:
    """Map the Arrow table of a chunk file into memory."""
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def read_counts(rows: Any) -> StringCounts:
    """Return the counts that `write_rows` stored, from the table of a chunk file.

    Raises:
        KeyError: an earlier version wrote the file, without counts.
    """
    metadata = rows.schema.metadata or {}
    return {name: Counter(orjson.loads(metadata[name.encode()])) for name in COUNTED}


def count_strings(conversations: Sequence[Any]) -> StringCounts:
    """Count the conversations that list each string, by the names in `COUNTED`; None is a rejected record."""
    accepted = [conversation for conversation in conversations if conversation is not None]
    return {
        name: Counter(_utf8(string) for conversation in accepted for string in set(getattr(conversation, name, ())))
        for name in COUNTED
    }


def _utf8(string: str) -> str:
    """Replace lone surrogates, which JSON input may contain and UTF-8 cannot encode, by question marks."""
    return string if string.isascii() else string.encode(errors="replace").decode()


def measured_records(chunk: Chunk) -> int:
    """Number of records in a measured chunk."""
    return int(read_rows(chunk.file).num_rows)


def is_measured(chunk: Chunk) -> bool:
    """Whether an earlier run has measured a chunk, with no record whose missing or damaged media may be fixed now."""
    if not chunk.file.exists():
        return False
    try:
        rows = read_rows(chunk.file)
        status = as_numpy(rows["status"], np.int8)
        read_counts(rows)
        if chunk.keep_tokens and chunk.tokens.stat().st_size != tokens_size(as_numpy(rows["length"], np.int32)):
            return False
    except (pa.ArrowInvalid, OSError, KeyError):  # damaged, or of an earlier version
        return False
    return not np.isin(status, _FIXABLE).any()


def tokens_file(rows_file: Path) -> Path:
    """Path of the tokens of a chunk, beside the file of its records."""
    return rows_file.with_suffix(".tokens")


def write_tokens(file: Path, samples: Iterable[EncodedSample]) -> None:
    """Write the tokens of the measured records of a chunk, in order; the file appears when it is complete."""
    with atomic_path(file) as temporary, temporary.open("wb") as out:
        for sample in samples:
            for values in (sample.input_ids, sample.labels):
                out.write(values.astype("<i4").data)


def tokens_size(lengths: npt.NDArray[np.int32]) -> int:
    """Bytes of the file of records with these lengths; -1 for a rejected one."""
    return int(_TOKEN * lengths[lengths > 0].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenOffsets:
    """Files and offsets of the tokens of k records.

    Attributes:
        files: paths.
        file: int64 (k,), index into `files`.
        offset: int64 (k,), byte in that file.
    """

    files: Sequence[Path]
    file: Int64
    offset: Int64


class TokenCache:
    """Index of the tokens of all n records.

    Args:
        files: token files of all chunks, in order.
        starts: int64 (chunks,), index of the first record of each chunk.
        lengths: int32 (n,), tokens of each record, -1 for a rejected record.
    """

    def __init__(self, files: Sequence[Path], starts: Int64, lengths: npt.NDArray[np.int32]) -> None:
        self._files = files
        self._starts = starts
        self._before = np.zeros(len(lengths) + 1, dtype=np.int64)  # tokens of all records before
        np.cumsum(np.maximum(lengths, 0), out=self._before[1:])

    def refs(self, rows: Int64) -> TokenOffsets:
        """Files and offsets of the tokens of these records."""
        # side="right": empty chunks share their start with the chunk after them, and only the last contains the record
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        offset = _TOKEN * (self._before[rows] - self._before[self._starts[chunk]])
        used, file = np.unique(chunk, return_inverse=True)
        return TokenOffsets(files=[self._files[index] for index in used.tolist()], file=file, offset=offset)


class TokenReader:
    """Context manager that reads the tokens of records and keeps few files open.

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

    def read(self, index: int, length: int, fragment: np.void | None = None) -> EncodedSample:
        """Read the tokens and labels of a record, or of a fragment of it.

        Args:
            index: index of the record in the `TokenOffsets`.
            length: tokens of the record or fragment.
            fragment: the fragment; None for a complete record.

        Raises:
            OSError: the file is gone or too short.
        """
        offset = int(self._refs.offset[index])
        if fragment is None:  # ids and labels are adjacent
            ids, labels = self._int32(index, offset, 2 * length).reshape(2, length)
            return EncodedSample(input_ids=ids, labels=labels)
        offset += _TOKEN // 2 * int(fragment["start"])
        labels = self._int32(index, offset + _TOKEN // 2 * int(fragment["total"]), length)
        labels[: fragment["context"]] = IGNORE_INDEX
        return EncodedSample(input_ids=self._int32(index, offset, length), labels=labels)

    def _int32(self, index: int, offset: int, count: int) -> Int64:
        file = int(self._refs.file[index])
        content = os.pread(self._descriptor(file), 4 * count, offset)
        if len(content) != 4 * count:
            raise OSError(f"{self._refs.files[file]} is truncated: it contains fewer tokens than were measured")
        return np.frombuffer(content, dtype="<i4").astype(np.int64)

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._refs.files[file], os.O_RDONLY)
            if len(self._open) > most_open(_MAX_OPEN):
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(file)
        return self._open[file]


def numeric_column(
    values: Sequence[int] | npt.NDArray[Any], dtype: Any, valid: npt.NDArray[np.bool_] | None = None
) -> Any:
    """Build a numeric Arrow column.

    Args:
        values: shape (n,).
        dtype: numpy type of the column.
        valid: bool (n,), False for null; None for a column without nulls.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    bitmap = None if valid is None else _bitmap(valid)
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [bitmap, pa.py_buffer(array)])


def string_column(values: Sequence[str | None]) -> Any:
    """Build a string column, with null for None; lone surrogates become question marks."""
    encoded = [b"" if value is None else value.encode(errors="replace") for value in values]
    # Layout of pa.string(): a bitmap, n + 1 int32 offsets, and the bytes of all strings.
    ends = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(item) for item in encoded], out=ends[1:])
    valid = np.array([value is not None for value in values], dtype=bool)
    buffers = [None if valid.all() else _bitmap(valid), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def dictionary_column(codes: npt.NDArray[Any], names: Sequence[str], dtype: Any) -> Any:
    """Build a dictionary column: `names[code]` for each code.

    Args:
        codes: shape (n,).
        names: strings.
        dtype: numpy type in which the codes are stored.
    """
    return pa.DictionaryArray.from_arrays(numeric_column(codes, dtype), string_column(names))


def as_numpy(column: Any, dtype: Any) -> npt.NDArray[Any]:
    """Values of a numeric column without nulls, shape (n,); `dtype` is the numpy type of the column."""
    arrays = [
        np.frombuffer(chunk.buffers()[1], dtype=dtype)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _bitmap(valid: npt.NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
