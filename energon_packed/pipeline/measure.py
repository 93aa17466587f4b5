"""Stage 1, measure: the length of every record, in chunks of the input that run in parallel."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from energon_packed.encoding import ChatEncoder, EncodedSample, Measurement
from energon_packed.encoding.vision.media import ImageCheck, check_pixels
from energon_packed.errors import REQUESTED_REJECTS, RecordError
from energon_packed.packing import load_kernels
from energon_packed.pipeline.chunks import (
    COUNTED,
    KINDS,
    SCHEMA,
    STATUSES,
    Chunk,
    WorkerProgress,
    count_texts,
    is_measured,
    measured_records,
    write_rows,
    write_tokens,
)
from energon_packed.pipeline.encoders import EncoderLoader, prepare_workers
from energon_packed.pipeline.engine import Engine, Progress
from energon_packed.pipeline.options import InputOptions, image_check
from energon_packed.pipeline.reader import RecordReader, raw_id
from energon_packed.pipeline.rejects import MOST_DETAIL, RejectLimits
from energon_packed.pipeline.run_state import COUNTERS
from energon_packed.pipeline.table import RecordTable, load_table
from energon_packed.records import Conversation
from energon_packed.sources import SourceRecord

_BATCH = 256  # records held at a time
_JSON_OVERHEAD = 200  # bytes of keys, id and length of one sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureStage:
    """Measures the chunks that no earlier run has measured.

    Attributes:
        options: of the run.
        reader: of the input.
        folder: of the chunk files, named after the key of the stage.
        engine: runs the chunks.
        keep_tokens: tokens are kept beside the lengths.
        progress: notified of each chunk.
        strict: stop at the first rejected record.
        counters: `measured`, `tokenized` and `reused` records are added.
        tokenizer_engines: the engines that tokenized are added.
    """

    options: InputOptions
    reader: RecordReader
    folder: Path
    engine: Engine
    keep_tokens: bool
    progress: Progress = field(default_factory=Progress)
    strict: bool = False
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    tokenizer_engines: set[str] = field(default_factory=set)

    @property
    def measurer(self) -> "Measurer":
        """Measures one chunk."""
        return Measurer(
            reader=self.reader, encoder=self.options.encoder_loader, check_images=image_check(self.options)
        )

    def chunks(self) -> list[Chunk]:
        """All of the input."""
        ranges = [
            (number, place, *chunk)
            for number, source in enumerate(self.reader.sources)
            for place, chunk in enumerate(source.chunks())
        ]
        return [self.chunk(f"{number:05d}-{place:07d}", number, *edges) for number, place, *edges in ranges]

    def chunk(self, name: str, source: int, start: int, stop: int) -> Chunk:
        """A range of a source, measured into a file of that name."""
        file = self.folder / f"{name}.arrow"
        return Chunk(source=source, start=start, stop=stop, file=file, keep_tokens=self.keep_tokens)

    def run(self, chunks: Sequence[Chunk] | None = None) -> RecordTable:
        """Lengths, statuses and places of the records.

        Args:
            chunks: what is measured; by default all of the input.

        Raises:
            RejectLimitError: a record is rejected, with `strict`.
        """
        chunks = self.chunks() if chunks is None else chunks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.progress.start("measure", sum(chunk.stop - chunk.start for chunk in chunks), "records")
        todo = []
        for chunk in chunks:
            if is_measured(chunk):
                records = measured_records(chunk)
                self.counters["reused"] += records
                self.progress.advance(chunk.stop - chunk.start, records)
            else:
                todo.append(chunk)
        prepare_workers(self.options.encoder_loader, len(todo))
        with closing(self.engine.run(self.measurer, todo)) as reports:
            for report in reports:
                self._take(report)
                load_kernels()  # while the workers are busy
        return load_table(chunks, len(self.reader.sources))

    def _take(self, report: "ChunkReport") -> None:
        """Count what a chunk had."""
        if report.tokenized and report.tokenizer_engine:
            self.tokenizer_engines.add(report.tokenizer_engine)
        self.counters["measured"] += report.records
        self.counters["tokenized"] += report.tokenized
        self.progress.advance(report.chunk.stop - report.chunk.start, report.records)
        if self.strict and report.first_reject is not None:
            found = self.reader.rejected(report.chunk.source, [report.first_reject])
            RejectLimits(strict=True).check_record(found[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """What a finished chunk reports to the driver.

    Attributes:
        chunk: the chunk.
        records: rows in it.
        tokenized: texts that went through the tokenizer.
        first_reject: address, id, reason and detail of the first rejected record, or None.
        tokenizer_engine: the engine in use; "" for an encoder without one.
    """

    chunk: Chunk
    records: int
    tokenized: int
    tokenizer_engine: str
    first_reject: tuple[int, str | None, str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures one chunk: the function of the measure stage.

    Attributes:
        reader: of the input.
        encoder: loads the encoder in each process.
        check_images: which images are decoded, as `check_pixels` takes it.
    """

    reader: RecordReader
    encoder: EncoderLoader
    check_images: ImageCheck = "header"

    def __call__(self, chunk: Chunk) -> ChunkReport:
        """Measure a chunk and write its file; few records are held at a time, as they may hold images."""
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        counts: WorkerProgress = {name: Counter() for name in COUNTED}
        first: tuple[int, str | None, str, str] | None = None
        tokenized = 0
        tokens: list[EncodedSample] = []
        rows = self.reader.sources[chunk.source].scan(chunk.start, chunk.stop)
        encoder = self.encoder.load()
        tokenizer = encoder.text_tokenizer if isinstance(encoder, ChatEncoder) else None
        while batch := list(islice(rows, _BATCH)):
            conversations, results = self._read(chunk.source, batch)
            usable = [place for place, one in enumerate(conversations) if one is not None]
            found = encoder.measure([c for c in conversations if c is not None], keep_tokens=chunk.keep_tokens)
            for place, measurement in zip(usable, found, strict=True):
                decoded = max(results[place].decoded, measurement.decoded)
                results[place] = replace(measurement, decoded=decoded) if decoded else measurement
            tokens += [one.sample for one in found if one.sample is not None]
            tokenized += sum([c is not None and c.input_ids is None for c in conversations])
            made = _columns(batch, conversations, results)
            made["narrow"] = [c is None or self.reader.fits_captioning(c) for c in conversations]
            for name, found_texts in count_texts(conversations).items():
                counts[name].update(found_texts)
            if isinstance(encoder, ChatEncoder):
                counts["notes"].update(note for c in conversations if c for note in encoder.renderer.notes(c))
            if first is None:
                described = zip(made["address"], made["id"], made["detail"], results, strict=True)
                failed = ((*place, one.reject.reason, detail) for *place, detail, one in described if one.reject)
                first = next((one for one in failed if one[2] not in REQUESTED_REJECTS), None)
            for name, values in made.items():
                columns[name] += values
        if chunk.keep_tokens:
            write_tokens(chunk.tokens, tokens)  # before the rows, which say that the chunk is done
        write_rows(chunk.file, columns, counts)
        return ChunkReport(
            chunk=chunk,
            records=len(columns["id"]),
            tokenized=tokenized,
            first_reject=first,
            tokenizer_engine=tokenizer.engine if tokenizer is not None else "",
        )

    def _read(self, source: int, rows: Sequence[SourceRecord]) -> tuple[list[Conversation | None], list[Measurement]]:
        """Conversations, None where a record is rejected, and the measurement of those."""
        conversations: list[Conversation | None] = []
        results: list[Measurement] = []
        for row in rows:
            try:
                conversation = self.reader.conversation(source, row)
                results.append(Measurement(0, decoded=check_pixels(conversation, self.check_images)))
                conversations.append(conversation)
            except RecordError as error:
                conversations.append(None)
                results.append(Measurement.rejected(error.reject))
        return conversations, results


def _columns(
    rows: Sequence[SourceRecord], conversations: Sequence[Conversation | None], results: Sequence[Measurement]
) -> dict[str, list[Any]]:
    """The columns of `SCHEMA` for some rows, their conversations where they have one, and what measuring gave."""
    pairs = list(zip(rows, conversations, strict=True))
    rejects = [result.reject for result in results]
    return {
        "address": [row.address for row in rows],
        "size": [row.size for row in rows],
        "length": [result.length for result in results],
        "supervised": [result.supervised for result in results],
        "text_bytes": [0 if c is None else _text_bytes(c) for c in conversations],
        "media_bytes": [result.media_bytes for result in results],
        "num_images": [0 if c is None else len(c.images) for c in conversations],
        "num_decoded": [result.decoded for result in results],
        "kind": [0 if c is None else KINDS.index(c.kind) for c in conversations],
        "status": [0 if reject is None else STATUSES.index(reject.reason.value) for reject in rejects],
        "id": [raw_id(row.record) if c is None else c.id for row, c in pairs],
        "detail": [None if reject is None else reject.detail[:MOST_DETAIL] for reject in rejects],
    }


def _text_bytes(conversation: Conversation) -> int:
    """Bytes of a conversation in JSON, about: UTF-8 and some escapes."""
    if conversation.input_ids is not None:
        return 14 * len(conversation.input_ids) + _JSON_OVERHEAD
    texts = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    extra = sum(len(str(m.extra)) for m in conversation.messages if m.extra) + len(str(conversation.tools or ""))
    size = sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
    return size + size // 20 + extra + _JSON_OVERHEAD + 40 * len(texts) + 40 * len(conversation.images)
