"""Stage 1, measure: the length of every record.

Input: a RecordReader over all sources. Output: a RecordTable with the length, status and address of every record,
joined from one file per chunk. Chunks are measured in parallel, and only if no earlier run has measured them.

    MeasureStage (driver) ──Chunk──► Measurer (worker) ──► chunk file;  ChunkReport ──► MeasureStage
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energon_packed.encoding import ChatEncoder, EncodedSample, Measurement, Processor
from energon_packed.encoding.audio.audio_file import check_audio, decode_audio, is_cut
from energon_packed.encoding.vision.images import frame_as_jpeg
from energon_packed.encoding.vision.media import ImageCheck, check_pixels
from energon_packed.encoding.vision.video_file import check_video, decode_frames
from energon_packed.errors import REQUESTED_REJECTS, Reason, RecordError, Reject, RejectLimitError
from energon_packed.formats.references import MOST_BYTES
from energon_packed.pipeline.batches import batches
from energon_packed.pipeline.encoders import EncoderLoader, prepare_workers
from energon_packed.pipeline.engine import Engine, Progress
from energon_packed.pipeline.measured.chunks import (
    COLUMNS,
    COUNTED,
    FRAMES,
    KINDS,
    MEMBER,
    MORE_COLUMNS,
    SCHEMA,
    STATUSES,
    TOKENS,
    WEIGHTED,
    Chunk,
    MediaFiles,
    MediaInMemory,
    StringCounts,
    compare_media,
    count_strings,
    dump_columns,
    dump_frames,
    has_media,
    is_measured,
    measured_records,
    write_beside,
    write_rows,
    write_tokens,
)
from energon_packed.pipeline.measured.table import RecordTable, load_table
from energon_packed.pipeline.options import AUTO, InputOptions, PackOptions
from energon_packed.pipeline.output.run_state import COUNTERS
from energon_packed.pipeline.reader import RecordReader, raw_id
from energon_packed.pipeline.rejects import MOST_DETAIL, RejectedAt, RejectLimits
from energon_packed.records import Conversation, FrameSelection, MediaReference
from energon_packed.records.groups import group_key
from energon_packed.records.media.reference import urls_of
from energon_packed.records.media.unlisted import IMAGE_URL
from energon_packed.sources import SourceRecord
from energon_packed.storage import MOST_TOGETHER, request_objects

_log = logging.getLogger(__name__)
_BATCH = 256  # records in memory at a time, as they may contain images; also the batch size of the tokenizer
_ENCODED_FRAMES = 4  # at least this many frames of a video, if it has them: encoding all is as slow as decoding
_NOT_MEASURED = Measurement(0)
_JSON_OVERHEAD = 60  # bytes of keys and length of a stored sample, beside its id


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureStage:
    """The measure stage: measures the chunks that no earlier run has measured.

    Attributes:
        options: options of the run.
        reader: reads the input.
        folder: folder of the chunk files, named after the fingerprint of the stage.
        engine: runs the chunks.
        keep_tokens: store the tokens beside the lengths.
        keep_media: store the digests of images and videos in memory beside the lengths.
        progress: notified of each chunk.
        strict: stop at the first rejected record.
        counters: `measured`, `tokenized` and `reused` records are added.
        tokenizer_engines: names of the tokenizer engines in use are added.
    """

    options: InputOptions
    reader: RecordReader
    folder: Path
    engine: Engine
    keep_tokens: bool
    keep_media: bool = False
    progress: Progress = field(default_factory=Progress)
    strict: bool = False
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    tokenizer_engines: set[str] = field(default_factory=set)

    @property
    def measurer(self) -> "Measurer":
        """The function that measures one chunk."""
        return Measurer(
            reader=self.reader,
            encoder=self.options.encoder_loader,
            check_media=self.options.image_check,
            check_frames=isinstance(self.options, PackOptions) and self.options.extract_frames,
            keep_groups=isinstance(self.options, PackOptions) and self.options.sample_class == AUTO,
        )

    def chunks(self) -> list[Chunk]:
        """Chunks of the complete input."""
        return [
            self.chunk(f"{number:05d}-{index:07d}", number, start, stop)
            for number, source in enumerate(self.reader.sources)
            for index, (start, stop) in enumerate(source.chunks())
        ]

    def chunk(self, name: str, source: int, start: int, stop: int) -> Chunk:
        """Chunk of a source, measured into a file of that name."""
        file = self.folder / f"{name}.arrow"
        keep = {"keep_tokens": self.keep_tokens, "keep_media": self.keep_media}
        return Chunk(source=source, start=start, stop=stop, file=file, **keep)

    def run(self, chunks: Sequence[Chunk] | None = None) -> RecordTable:
        """Measure the chunks and return the table of their records.

        Args:
            chunks: chunks to measure; by default the complete input.

        Raises:
            RejectLimitError: a record is rejected, with `strict`; or every record has only the URL of an image.
        """
        chunks = self.chunks() if chunks is None else chunks
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self.reusable(chunks)
        self.progress.start("measure", sum(chunk.stop - chunk.start for chunk in chunks), "records")
        todo = []
        for chunk in chunks:
            if chunk in done:
                records = measured_records(chunk)
                self.counters["reused"] += records
                self.progress.advance(chunk.stop - chunk.start, records)
            else:
                todo.append(chunk)
        prepare_workers(self.options.encoder_loader, len(todo))  # before the engine forks
        with closing(self.engine.run(self.measurer, todo)) as reports:
            for report in reports:
                self._count(report)
        table = load_table(chunks, len(self.reader.sources), self.folder)
        check_image_urls(table)
        return table

    def reusable(self, chunks: Sequence[Chunk]) -> set[Chunk]:
        """Return the chunks that an earlier run has measured, and whose media files have not changed since then.

        Every media file needs a `stat`, so workers share them: on a network file system it needs 0.1 ms and more.
        """
        measured = {chunk for chunk in chunks if is_measured(chunk)}
        to_compare = [chunk for chunk in chunks if chunk in measured and has_media(chunk)]
        if not to_compare:
            return measured
        start, changed = time.perf_counter(), set()
        self.progress.start("compare", len(to_compare), "images")
        with closing(self.engine.run(compare_media, to_compare)) as compared:
            for chunk, files, is_unchanged in compared:
                self.progress.advance(1, files)
                if not is_unchanged:
                    changed.add(chunk)
        self.progress.finish(time.perf_counter() - start)
        if changed:
            records = sum(measured_records(chunk) for chunk in changed)
            _log.warning("media files have changed since they were measured: %d records are measured again", records)
        return measured - changed

    def _count(self, report: "ChunkReport") -> None:
        """Add the counts of a chunk; with `strict`, refuse its first rejected record."""
        if report.tokenized and report.tokenizer_engine:
            self.tokenizer_engines.add(report.tokenizer_engine)
        self.counters["measured"] += report.records
        self.counters["tokenized"] += report.tokenized
        self.progress.advance(report.chunk.stop - report.chunk.start, report.records)
        if self.strict and report.first_reject is not None:
            rejected = self.reader.rejected(report.chunk.source, [report.first_reject])
            RejectLimits(strict=True).check_record(rejected[0])


def check_image_urls(table: RecordTable) -> None:
    """Refuse an input whose records all have the URL of an image in a field that is not read, such as COYO's `url`.

    In a single record, such a URL may be the address of a web page.

    Raises:
        RejectLimitError: all records that can be packed have it in the same field, and none has an image.
    """
    packed = sum(map(len, table.packable(table.status)))
    for note, count in table.counts["notes"].items():
        if note.startswith(IMAGE_URL) and count >= packed:  # notes are of records that can be packed
            name = note.removeprefix(IMAGE_URL).strip()
            raise RejectLimitError(
                f"all {packed} records have the URL of an image in the field {name}, and no image. Nothing is "
                "fetched: download the images and add their paths as `image`, or remove the field, with an `adapter`."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """Report of a finished chunk to the driver; the records themselves are in the file.

    Attributes:
        chunk: the chunk.
        records: number of records.
        tokenized: records that went through the tokenizer: not records that were rejected before, or have tokens.
        first_reject: the first rejected record, or None.
        tokenizer_engine: the engine in use; "" for an encoder without a tokenizer.
    """

    chunk: Chunk
    records: int
    tokenized: int
    tokenizer_engine: str
    first_reject: RejectedAt | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Function of the measure stage: measures a chunk and writes its files.

    Attributes:
        reader: reads the input.
        encoder: loads the encoder in each process.
        check_media: images to decode, as in `check_pixels`; `full` also decodes audio files and the tracks that are
            used, and compares the selected frames of video files with all frames.
        check_frames: decode the selected frames of videos, and estimate their bytes as images.
        keep_groups: store the tokens of chunks with groups, roles or labels, as their flavor does.
    """

    reader: RecordReader
    encoder: EncoderLoader
    check_media: ImageCheck = "header"
    check_frames: bool = False
    keep_groups: bool = False

    def __call__(self, chunk: Chunk) -> ChunkReport:
        """Measure a chunk in batches of records and write its files."""
        encoder = self.encoder.load()
        content = _ChunkContent(chunk, encoder)
        rows = self.reader.sources[chunk.source].scan(chunk.start, chunk.stop)
        all_records = map(partial(self._read, chunk.source), rows)
        for batch in batches(all_records, _BATCH, _Record.remote_files, MOST_TOGETHER):
            urls = [url for record in batch for url in urls_of(record.files)]
            content.media.add(urls)
            request_objects(urls)
            records = [self._checked(chunk.source, record, content.media) for record in batch]
            if self.keep_groups and not chunk.keep_tokens and any([record.needs_tokens for record in records]):
                return self(replace(chunk, keep_tokens=True))  # from its start; mostly, this is the first batch
            self._measure(encoder, records, keep_tokens=chunk.keep_tokens)
            content.add(records)
        content.write()
        return content.report()

    def records(self, source: int, rows: Sequence[SourceRecord]) -> list[tuple[Conversation | None, Measurement]]:
        """Read and measure some records, to show them: conversation, if it can be read, and measurement."""
        records = [self._checked(source, self._read(source, row), MediaFiles()) for row in rows]
        self._measure(self.encoder.load(), records, keep_tokens=False)
        return [(record.conversation, record.result) for record in records]

    def _read(self, source: int, row: SourceRecord) -> "_Record":
        """Read a record as a conversation."""
        try:
            conversation = self.reader.conversation(source, row)
        except RecordError as error:
            group = _hashed(source, self.reader.group_of(row.record))
            return _Record(row, None, Measurement.rejected(error.reject), group=group)
        narrow, group = self.reader.fits_captioning(conversation), _hashed(source, conversation.group)
        return _Record(row, conversation, _NOT_MEASURED, narrow=narrow, group=group, files=conversation.files)

    def _checked(self, source: int, record: "_Record", media: MediaFiles) -> "_Record":
        """Check the images of a record, after taking the stamp of its files."""
        if record.conversation is None or not record.files:
            return record
        stamp = media.stamp(record.files)
        try:
            result = Measurement(0, decoded=check_pixels(record.conversation, self.check_media))
            return record._replace(result=result, stamp=stamp)
        except RecordError as error:
            group = _hashed(source, self.reader.group_of(record.row.record))
            return _Record(record.row, None, Measurement.rejected(error.reject), stamp, group=group)

    def _measure(self, encoder: Processor, records: list["_Record"], *, keep_tokens: bool) -> None:
        """Set the measurements of the conversations, which are encoded together."""
        conversations = {i: record.conversation for i, record in enumerate(records) if record.conversation is not None}
        samples = [sample for own in conversations.values() for sample in own.members or (own,)]
        measured = iter(encoder.measure(samples, keep_tokens=keep_tokens))
        for i, conversation in conversations.items():
            if conversation.members:
                members = list(islice(measured, len(conversation.members)))
                measurement = Measurement.joined(members, [member.role for member in conversation.members])
            else:
                measurement = next(measured)
            result = self._with_videos(conversation, measurement)
            # The check and the encoder may both have decoded the images of a record: not the sum.
            if decoded := max(records[i].result.decoded, result.decoded):
                result = replace(result, decoded=decoded)
            records[i] = records[i]._replace(result=result)

    def _with_videos(self, conversation: Conversation, measurement: Measurement) -> Measurement:
        """Check the audio and the selected frames of a record, and estimate their bytes if they become images."""
        if measurement.reject is not None:
            return measurement
        try:
            if len(measurement.clips) != len(conversation.audios):
                detail = "its encoder counts no samples of audio; use a ChatEncoder"
                raise RecordError(Reason.UNSUPPORTED_MEDIA, detail)
            for audio, clip in zip(conversation.audios, measurement.clips, strict=True):
                if self.check_media == "full" and clip.is_whole:
                    check_audio(audio.file)
                elif self.check_media == "full":  # a file may have thousands of parts
                    decode_audio(audio.file, clip, clip.rate)
                if measurement.media_bytes > MOST_BYTES and not is_cut(clip, audio.file.num_bytes()):
                    _check_size(audio.file, "cut it")
        except RecordError as error:
            return Measurement.rejected(error.reject)
        if not conversation.videos:
            return measurement
        if len(measurement.frames) != len(conversation.videos):
            detail = "its encoder selects no frames of videos; use a ChatEncoder, or frames as images"
            return Measurement.rejected(Reject(Reason.UNSUPPORTED_MEDIA, detail))
        extracted = measurement.media_bytes
        try:
            for video, frames in zip(conversation.videos, measurement.frames, strict=True):
                if video.file is not None and self.check_media == "full":
                    check_video(video.file, frames)
                    if measurement.track_clips:
                        check_audio(video.file)
                if video.file is not None and self.check_frames:
                    extracted += _extracted_bytes(video.file, frames) - video.file.num_bytes()
                elif video.file is not None and measurement.media_bytes > MOST_BYTES:
                    _check_size(video.file)
        except RecordError as error:
            return Measurement.rejected(error.reject)
        return replace(measurement, extracted_bytes=extracted) if self.check_frames else measurement


class _Record(NamedTuple):
    """A record of a chunk.

    Attributes:
        row: the record in its source.
        conversation: the record as a conversation; None if it cannot be read.
        result: its measurement, perhaps a reject.
        stamp: of its media files, from before any of them is read.
        narrow: PackedCaptioningSample can store it.
        group: hash of its source and the key of its group; 0 without a group.
        files: its media and patch positions.
    """

    row: SourceRecord
    conversation: Conversation | None
    result: Measurement
    stamp: int = 0
    narrow: bool = True
    group: int = 0
    files: tuple[MediaReference, ...] = ()

    def remote_files(self) -> int:
        """Number of the files that are in object stores."""
        return sum([file.is_remote for file in self.files]) if self.files else 0

    @property
    def is_labeled(self) -> bool:
        """Whether it is a sample with a role, a label, or per-token values."""
        own = self.conversation
        return own is not None and not (own.role is None and own.label is None and not own.per_token_values)

    @property
    def needs_tokens(self) -> bool:
        """Whether only a flavor of tokens can store it: it is a group, in a group, or has labels."""
        return self.conversation is not None and bool(self.group or self.conversation.members or self.is_labeled)


class _ChunkContent:
    """Content of the files of a chunk, batch by batch.

    Args:
        chunk: the chunk.
        encoder: it measured the records.
    """

    def __init__(self, chunk: Chunk, encoder: Processor) -> None:
        self.media = MediaFiles()
        self._chunk = chunk
        self._encoder = encoder if isinstance(encoder, ChatEncoder) else None
        self._columns: dict[str, list[Any]] = {name: [] for name in (*SCHEMA.names, *MORE_COLUMNS)}
        self._counts: StringCounts = {name: Counter() for name in COUNTED}
        self._tokens: list[EncodedSample] = []
        self._tokenized = 0
        self._frames: list[bytes] = []
        self._token_columns: list[bytes] = []
        self._members: list[tuple[int, int, int]] = []  # of `MEMBER`
        self._in_memory = MediaInMemory(chunk)
        self._first_reject: RejectedAt | None = None

    def add(self, records: Sequence[_Record]) -> None:
        """Add a batch of measured records."""
        for name, values in _columns(records).items():
            self._columns[name] += values
        frames = [dump_frames(record.result.frames, record.result.clips) for record in records]
        self._columns["frames_bytes"] += [len(content) for content in frames]
        self._frames += filter(None, frames)
        columns = [dump_columns(record.result.sample) for record in records]
        self._columns["columns_bytes"] += map(len, columns)
        self._token_columns += filter(None, columns)
        self._tokens += [record.result.sample for record in records if record.result.sample is not None]
        conversations = [record.conversation for record in records if record.conversation is not None]
        samples = [sample for own in conversations for sample in own.members or (own,)]
        self._tokenized += sum([sample.input_ids is None for sample in samples])
        for record in records:
            if record.conversation is not None and record.result.members:
                pairs = zip(record.result.members, record.conversation.members, strict=True)
                self._members += [(measured.length, measured.supervised, len(own.images)) for measured, own in pairs]
        # Only of accepted records: the counts describe what is trained on.
        accepted = [record for record in records if record.result.reject is None]
        for row, conversation, *_ in accepted:
            if conversation is not None and conversation.media_files:
                self._in_memory.add(row.address, row.size, conversation.media_files)
        self._count([record.conversation for record in accepted if record.conversation is not None])
        notes = self._counts["notes"]
        notes.update(note for record in accepted for note in record.result.notes)
        if weighted := sum([record.result.weighted for record in records]):
            notes[WEIGHTED] += weighted
        if self._first_reject is None:
            self._first_reject = next(filter(None, map(_unrequested_reject, records)), None)

    def _count(self, conversations: Sequence[Conversation]) -> None:
        """Count the notes and unused fields of accepted records."""
        if self._encoder is not None:
            renderer = self._encoder.renderer
            for own in conversations:  # a note counts once for a record with several samples
                notes = dict.fromkeys(note for one in own.members or (own,) for note in renderer.notes(one))
                self._counts["notes"].update([*notes])
            conversations = [self._encoder.noted(conversation) for conversation in conversations]
        for name, counted in count_strings(conversations).items():
            self._counts[name].update(counted)

    def write(self) -> None:
        """Write the files."""
        file = self._chunk.file
        # The other files first: a complete record file marks the chunk as measured.
        if self._chunk.keep_tokens:
            write_tokens(file.with_suffix(TOKENS), self._tokens)
            write_beside(file, COLUMNS, b"".join(self._token_columns))
        else:
            file.with_suffix(TOKENS).unlink(missing_ok=True)  # of a run that found groups, which it stores as tokens
        write_beside(file, FRAMES, b"".join(self._frames))
        members = np.array(self._members, dtype=MEMBER) if self._members else None
        write_rows(file, self._columns, self._counts, self.media, self._in_memory.write(), members)

    def report(self) -> ChunkReport:
        """Return the report of the chunk."""
        tokenizer = None if self._encoder is None else self._encoder.text_tokenizer
        return ChunkReport(
            chunk=self._chunk,
            records=len(self._columns["id"]),
            tokenized=self._tokenized,
            first_reject=self._first_reject,
            tokenizer_engine="" if tokenizer is None else tokenizer.engine,
        )


def _hashed(source: int, group: str | None) -> int:
    """Hash the key of a group: int64 other than 0; 0 without a group."""
    if group is None:
        return 0
    digest = blake2b(group_key(source, group).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _unrequested_reject(record: _Record) -> RejectedAt | None:
    """Return a record that is rejected, and not on request; else None."""
    reject = record.result.reject
    if reject is None or reject.reason in REQUESTED_REJECTS:
        return None
    return RejectedAt(record.row.address, _id(record), reject.reason, reject.detail[:MOST_DETAIL])


def _extracted_bytes(file: MediaReference, frames: FrameSelection) -> int:
    """Decode the selected frames, and estimate their bytes as images from some of them.

    The JPEG of a pixel has 0.03 bytes (drawings) to 0.6 bytes (noise of a camera), so that a constant is not enough.
    """
    count = len(frames.indices)
    chosen = range(0, count, max(1, count // _ENCODED_FRAMES))
    sizes = [len(frame_as_jpeg(image)) for place, image in enumerate(decode_frames(file, frames)) if place in chosen]
    return sum(sizes) * count // max(len(sizes), 1)


def _check_size(file: MediaReference, remedy: str = "set `extract_frames`, or cut the video") -> None:
    if (num_bytes := file.num_bytes()) > MOST_BYTES:
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA,
            f"{file.label} has {num_bytes:,} bytes, and packs have files of at most {MOST_BYTES:,}; {remedy}",
        )


def _columns(records: Sequence[_Record]) -> dict[str, list[Any]]:
    """Build the columns of `SCHEMA` and `MORE_COLUMNS`, without sizes of files."""
    rows, conversations, results, stamps, narrow, groups, _ = map(list, zip(*records, strict=True))
    rejects = [result.reject for result in results]
    return {
        "address": [row.address for row in rows],
        "size": [row.size for row in rows],
        "length": [result.length for result in results],
        "supervised": [result.supervised for result in results],
        "weight_checksum": [result.weight_checksum for result in results],
        "text_bytes": [0 if c is None else _text_bytes(c) for c in conversations],
        "media_bytes": [result.media_bytes for result in results],
        "media_stamp": stamps,
        "num_images": [0 if c is None else len(c.images) for c in conversations],
        "num_videos": [0 if c is None else len(c.videos) for c in conversations],
        "num_frames": [sum([len(frames.indices) for frames in result.frames]) for result in results],
        "num_audios": [0 if c is None else len(c.audios) for c in conversations],
        "audio_ms": [
            round(sum([1000 * clip.seconds for clip in (*result.clips, *result.track_clips)])) for result in results
        ],
        "extracted_bytes": [result.extracted_bytes for result in results],
        "num_decoded": [result.decoded for result in results],
        "kind": [0 if c is None else KINDS.index(c.kind) for c in conversations],
        "narrow": narrow,
        "divisible": [c is not None and _is_divisible(c) for c in conversations],
        "group": groups,
        "members": [len(result.members) for result in results],
        "labeled": [record.is_labeled for record in records],
        "status": [0 if reject is None else STATUSES.index(reject.reason.value) for reject in rejects],
        "id": [_id(record) for record in records],
        "detail": [None if reject is None else reject.detail[:MOST_DETAIL] for reject in rejects],
    }


def _id(record: _Record) -> str | None:
    return raw_id(record.row.record) if record.conversation is None else record.conversation.id


def _is_divisible(conversation: Conversation) -> bool:
    return not (conversation.messages or conversation.videos or conversation.audios or conversation.members)


def _text_bytes(conversation: Conversation) -> int:
    """Estimated bytes of a conversation in JSON, from which the planner cuts shards."""
    if conversation.members:
        return sum(map(_text_bytes, conversation.members))
    overhead = _JSON_OVERHEAD + len(conversation.id or "")
    if conversation.input_ids is not None:
        # an id and a label, each of 6 digits and a comma, and a weight
        return (14 if conversation.loss_weights is None else 24) * len(conversation.input_ids) + overhead
    strings = [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]
    extra = sum(len(str(m.extra)) for m in conversation.messages if m.extra) + len(str(conversation.tools or ""))
    size = sum(len(string) if string.isascii() else len(string.encode(errors="replace")) for string in strings)
    # 5 % for escapes such as \n and \", 36 bytes for the keys of each message and the name of each image
    return size + size // 20 + extra + overhead + 36 * len(strings) + 40 * len(conversation.images)
