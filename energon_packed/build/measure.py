"""Stage 1, measure: the length of every record, in chunks of the input that run side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from energon_packed.build.chunks import KINDS, SCHEMA, STATUSES, Chunk, write_rows
from energon_packed.build.kept_tokens import write_tokens
from energon_packed.build.options import EncoderOptions
from energon_packed.build.reader import RecordReader
from energon_packed.conversation import Conversation
from energon_packed.encoding import EncodedSample, Measured, Processor
from energon_packed.errors import RecordError
from energon_packed.sources import Row

_BATCH = 256  # records held at a time
_JSON_OVERHEAD = 200  # bytes of keys, id and length of one sample


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures one chunk: the function of the measure stage."""

    reader: RecordReader
    encoder: EncoderOptions

    def __call__(self, chunk: Chunk) -> ChunkReport:
        """Measure a chunk and write its file; few records are held at a time, as they may hold images."""
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        first: tuple[int, str | None, str, str] | None = None
        tokenized = 0
        tokens: list[EncodedSample] = []
        rows = self.reader.sources[chunk.source].scan(chunk.start, chunk.stop)
        encoder = self.encoder.load()
        while batch := list(islice(rows, _BATCH)):
            read = [self._read(chunk.source, row) for row in batch]
            conversations = [None if isinstance(found, RecordError) else found for found in read]
            tokenized += sum([c is not None and c.input_ids is None for c in conversations])
            usable = [c for c in conversations if c is not None]
            measured = iter(_keeping(usable, encoder, tokens) if chunk.keep_tokens else encoder.measure(usable))
            results = [found if isinstance(found, RecordError) else next(measured) for found in read]
            if first is None:
                first = _first_reject(len(columns["id"]), batch, conversations, results)
            for name, values in _columns(batch, conversations, results).items():
                columns[name] += values
        if chunk.keep_tokens:
            write_tokens(chunk.tokens, tokens)  # before the rows, which say that the chunk is done
        write_rows(chunk.file, columns)
        return ChunkReport(chunk=chunk, records=len(columns["id"]), tokenized=tokenized, first_reject=first)

    def _read(self, source: int, row: Row) -> Conversation | RecordError:
        try:
            return self.reader.conversation(source, row.record)
        except RecordError as error:
            return error


def _keeping(
    conversations: Sequence[Conversation], encoder: Processor, tokens: list[EncodedSample]
) -> Iterator[Measured | RecordError]:
    """As `encoder.measure`; the tokens go to `tokens`."""
    for conversation in conversations:
        try:
            measured, encoded = encoder.measure_tokens(conversation)
        except RecordError as error:
            yield error
            continue
        tokens.append(encoded)
        yield measured


def _columns(
    rows: Sequence[Row],
    conversations: Sequence[Conversation | None],
    results: Sequence[Measured | RecordError],
) -> dict[str, list[Any]]:
    """The columns of `SCHEMA` for some rows, their conversations where they have one, and what measuring gave."""
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
