"""Stage 1, measure: the length of every record, in chunks of the input that run side by side.

Each chunk leaves one Arrow file with a row per record; the driver keeps only numbers of them, 34 bytes a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from energon_packed.build.columns import as_numpy, numbers, texts
from energon_packed.build.options import EncoderOptions, part_suffix
from energon_packed.conversation import Conversation, normalize
from energon_packed.encoding import Measured
from energon_packed.errors import Reason, RecordError
from energon_packed.shards.files import aside
from energon_packed.shards.layouts import layout_for
from energon_packed.sources import Row, Source

KINDS = ("text", "image", "video")
PACKED = "packed"
STATUSES = (PACKED, *(reason.value for reason in Reason))
_SCHEMA = pa.schema(
    {
        "address": pa.int64(),
        "size": pa.int32(),
        "length": pa.int32(),
        "text_bytes": pa.int32(),
        "media_bytes": pa.int64(),
        "num_images": pa.int32(),
        "kind": pa.int8(),
        "status": pa.int8(),
        "id": pa.string(),
        "detail": pa.string(),
    }
)
_NUMBERS = {name: _SCHEMA.field(name).type.to_pandas_dtype() for name in _SCHEMA.names if name not in ("id", "detail")}
_MENDABLE = [
    STATUSES.index(reason.value)
    for reason in (
        Reason.MISSING_IMAGE,
        Reason.CORRUPT_IMAGE,
        Reason.IMAGE_OUTSIDE_ROOT,
        Reason.MISSING_PATCH_POSITIONS,
    )
]
_BATCH = 256  # records held at a time
_JSON_OVERHEAD = 200  # bytes of keys, id and length of one sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A range of one source.

    Attributes:
        source: number of the source.
        start, stop: range of addresses.
        file: where the measured rows go.
    """

    source: int
    start: int
    stop: int
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """What a finished chunk tells the driver.

    Attributes:
        chunk: the chunk.
        records: rows in it.
        tokenized: texts that went through the tokenizer.
        first_reject: (row in the chunk, id, reason, detail) of the first record left out, or None.
    """

    chunk: Chunk
    records: int
    tokenized: int
    first_reject: tuple[int, str | None, str, str] | None


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Reads records of all sources as conversations, the same way in every stage.

    Attributes:
        sources: the input.
        sample_class: flavor that will hold the conversations; those it cannot hold are rejected.
        use_patch_positions: False ignores the .npy files that records name.
        part: number of the part of the input, or None for the whole.
    """

    sources: Sequence[Source]
    sample_class: str
    use_patch_positions: bool
    part: int | None = None

    def conversation(self, source: int, record: Any) -> Conversation:
        """A record as a conversation; `id` is None where the record has none.

        Raises:
            RecordError: the record cannot be used.
        """
        if isinstance(record, RecordError):
            raise record
        conversation = normalize(record, image_root=self.sources[source].image_root)
        if conversation.patch_positions and not self.use_patch_positions:
            conversation = replace(conversation, patch_positions=())
        layout_for(self.sample_class).check(conversation)
        return conversation

    def default_id(self, source: int, row: int) -> str:
        """Name of a record that has none: its file, the part of it, and its number there."""
        return f"{self._names[source]}{part_suffix(self.part)}:{row}"

    @cached_property
    def _names(self) -> list[str]:
        """Stems of the files; their paths, where two have the same stem."""
        stems = [source.path.name.split(".")[0] for source in self.sources]
        return stems if len(set(stems)) == len(stems) else [str(source.path) for source in self.sources]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures one chunk: the function of the measure stage."""

    reader: RecordReader
    encoder: EncoderOptions

    def __call__(self, chunk: Chunk) -> ChunkReport:
        """Measure a chunk and write its file; few records are held at a time, as they may hold images."""
        columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
        first: tuple[int, str | None, str, str] | None = None
        tokenized = 0
        rows = self.reader.sources[chunk.source].scan(chunk.start, chunk.stop)
        encoder = self.encoder.load()
        while batch := list(islice(rows, _BATCH)):
            read = [self._read(chunk.source, row) for row in batch]
            conversations = [None if isinstance(found, RecordError) else found for found in read]
            tokenized += sum([c is not None and c.input_ids is None for c in conversations])
            measured = iter(encoder.measure([c for c in conversations if c is not None]))
            results = [found if isinstance(found, RecordError) else next(measured) for found in read]
            if first is None:
                first = _first_reject(len(columns["id"]), batch, conversations, results)
            for name, values in _columns(batch, conversations, results).items():
                columns[name] += values
        _write_rows(chunk.file, columns)
        return ChunkReport(chunk=chunk, records=len(columns["id"]), tokenized=tokenized, first_reject=first)

    def _read(self, source: int, row: Row) -> Conversation | RecordError:
        try:
            return self.reader.conversation(source, row.record)
        except RecordError as error:
            return error


def _columns(
    rows: Sequence[Row],
    conversations: Sequence[Conversation | None],
    results: Sequence[Measured | RecordError],
) -> dict[str, list[Any]]:
    """The columns of `_SCHEMA` for some rows, their conversations where they have one, and what measuring gave."""
    pairs = list(zip(rows, conversations, strict=True))
    lengths = [result.length if isinstance(result, Measured) else -1 for result in results]
    return {
        "address": [row.address for row in rows],
        "size": [row.size for row in rows],
        "length": lengths,
        "text_bytes": [0 if c is None else _text_bytes(c) for c in conversations],
        "media_bytes": [result.media_bytes if isinstance(result, Measured) else 0 for result in results],
        "num_images": [0 if c is None else len(c.images) for c in conversations],
        "kind": [0 if c is None else KINDS.index(c.kind) for c in conversations],
        "status": [STATUSES.index(r.reason.value) if isinstance(r, RecordError) else 0 for r in results],
        "id": [_raw_id(row.record) if c is None else c.id for row, c in pairs],
        "detail": [result.detail[:500] if isinstance(result, RecordError) else None for result in results],
    }


def _first_reject(
    start: int,
    rows: Sequence[Row],
    conversations: Sequence[Conversation | None],
    results: Sequence[Measured | RecordError],
) -> tuple[int, str | None, str, str] | None:
    """(row in the chunk, id, reason, detail) of the first record left out of these, which begin at row `start`."""
    for place, (row, conversation, result) in enumerate(zip(rows, conversations, results, strict=True), start=start):
        if isinstance(result, RecordError):
            ident = _raw_id(row.record) if conversation is None else conversation.id
            return place, ident, result.reason.value, result.detail
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordTable:
    """Numbers of all n records, in input order; 34 bytes a record.

    Attributes:
        address: int64 (n,), where each record lies in its source.
        size: int32 (n,), bytes of the record, 0 where unknown.
        length: int32 (n,), tokens, -1 where the record is left out.
        text_bytes: int32 (n,), bytes of the texts with their JSON, about.
        media_bytes: int64 (n,), bytes of images and .npy files.
        num_images: int32 (n,).
        kind: int8 (n,), index into KINDS.
        status: int8 (n,), index into STATUSES; 0 means packed.
        source_starts: int64 (sources + 1,), row at which each source begins.
        files: chunk files, in input order.
    """

    address: npt.NDArray[np.int64]
    size: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    text_bytes: npt.NDArray[np.int32]
    media_bytes: npt.NDArray[np.int64]
    num_images: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    status: npt.NDArray[np.int8]
    source_starts: npt.NDArray[np.int64]
    files: list[Path]

    def __len__(self) -> int:
        return len(self.status)

    def locate(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(source, row in that source) of each row: int64 (k,), int64 (k,)."""
        source = np.searchsorted(self.source_starts, rows, side="right") - 1
        return source, rows - self.source_starts[source]


def load_table(chunks: Sequence[Chunk], sources: int) -> RecordTable:
    """Join the chunk files, which are all there."""
    counts = [measured_records(chunk) for chunk in chunks]
    total = sum(counts)
    columns = {name: np.empty(total, dtype=dtype) for name, dtype in _NUMBERS.items()}
    per_source = np.zeros(sources + 1, dtype=np.int64)
    start = 0
    for chunk, count in zip(chunks, counts, strict=True):
        table = read_rows(chunk.file)
        for name, column in columns.items():
            column[start : start + count] = as_numpy(table[name], column.dtype)
        per_source[chunk.source + 1] += count
        start += count
    return RecordTable(**columns, source_starts=np.cumsum(per_source), files=[chunk.file for chunk in chunks])


def read_rows(file: Path) -> Any:
    """The Arrow table of one chunk file, mapped into memory."""
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def measured_records(chunk: Chunk) -> int:
    """Rows in the file of a measured chunk."""
    return int(read_rows(chunk.file).num_rows)


def is_measured(chunk: Chunk) -> bool:
    """Whether an earlier run has measured a chunk, and nothing outside its file may have been mended since."""
    if not chunk.file.exists():
        return False
    try:
        status = as_numpy(read_rows(chunk.file)["status"], np.int8)
    except (pa.ArrowInvalid, OSError):
        return False
    return not np.isin(status, _MENDABLE).any()


def _write_rows(file: Path, columns: dict[str, list[Any]]) -> None:
    arrays = [numbers(columns[n], _NUMBERS[n]) if n in _NUMBERS else texts(columns[n]) for n in _SCHEMA.names]
    with aside(file) as temporary, pa.OSFile(str(temporary), "wb") as out, pa.ipc.new_file(out, _SCHEMA) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))


def _text_bytes(conversation: Conversation) -> int:
    """Bytes of a conversation in JSON, about: UTF-8 and some escapes."""
    if conversation.input_ids is not None:
        return 14 * len(conversation.input_ids) + _JSON_OVERHEAD
    texts = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    extra = sum(len(str(m.extra)) for m in conversation.messages if m.extra) + len(str(conversation.tools or ""))
    size = sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
    return size + size // 20 + extra + _JSON_OVERHEAD + 40 * len(texts) + 40 * len(conversation.images)


def _raw_id(record: Any) -> str | None:
    ident = record.get("id") if isinstance(record, dict) else None
    return None if ident is None else str(ident)[:200]
