"""RecordsViewer, the pages of the records of an input before they are packed.

Records are read by the reader of `pack` and measured by its measure stage, so that a page shows the samples and the
rejects that a run would have. Some records are read at a time, from an address of a file.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from energon_packed.encoding import ChatEncoder, EncodedSample, Measurement, Processor
from energon_packed.encoding.audio.media import clip_of
from energon_packed.encoding.template import UNFINISHED
from energon_packed.encoding.vision.images import read_header
from energon_packed.encoding.vision.video_file import read_video_info
from energon_packed.errors import ConfigError, EnergonPackedError, Reason, RecordError, Reject
from energon_packed.formats import StoredSample
from energon_packed.inspection.search import first_found
from energon_packed.inspection.tokens import sample_rows
from energon_packed.inspection.view import PackView, SampleView, record_samples, view_samples
from energon_packed.inspection.viewer.pages import NotFoundError, Pages, Response, in_groups, index_below, number_in
from energon_packed.pipeline.options import InputOptions
from energon_packed.pipeline.reader import open_reader, raw_id
from energon_packed.pipeline.stages.measure import Measurer
from energon_packed.records import Conversation, FrameSelection, MediaReference, VideoReference
from energon_packed.sources import JsonlSource, Source, SourceRecord
from energon_packed.sources.tar_records import leaves

_RECORDS = 20  # on a page
_SECONDS = 2.0  # of a search; the page has a link to continue
_COUNTED = 64 << 20  # bytes of a file from its start whose lines are counted for the line of a record
_FRAMES = 8  # of a video whose selection is not known
_CACHED = 32  # records; each picture of a page needs its record
_LONGEST = 20_000  # characters of a record that are shown


class HeaderReader(Processor):
    """Reader of the headers of media, in place of an encoder: lengths and supervised text are unknown."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Raise ConfigError: there is no tokenizer."""
        raise ConfigError("tokens need `tokenizer`")

    def measure(self, conversations: Sequence[Conversation], *, keep_tokens: bool = False) -> list[Measurement]:
        """Return the samples of audio and evenly spaced frames of videos, or the reason of a damaged file."""
        return [self._headers(conversation) for conversation in conversations]

    def _headers(self, conversation: Conversation) -> Measurement:
        try:
            for image in conversation.images:
                read_header(image)
            frames = [video.frames or _spread(video) for video in conversation.videos]
            return Measurement(0, frames=frames, clips=[clip_of(audio)[0] for audio in conversation.audios])
        except RecordError as error:
            return Measurement.rejected(error.reject)


def _spread(video: VideoReference) -> FrameSelection:
    assert video.file is not None  # a video of images has its frames
    info = read_video_info(video.file)
    return info.selection(np.unique(np.arange(_FRAMES) * info.num_frames // _FRAMES))


class RecordsViewer(Pages):
    """Pages of the records of an input."""

    def __init__(self, options: InputOptions, work_dir: Path) -> None:
        """Open the input.

        Args:
            options: options of the run; the encoder is a HeaderReader if there is no tokenizer.
            work_dir: folder for converted copies.

        Raises:
            SourceError: an input cannot be read.
            ConfigError, TemplateError: the encoder cannot be loaded.
        """
        super().__init__(", ".join(dict.fromkeys("/".join(source.path) for source in options.source_configs)))
        self._reader = open_reader(options, work_dir)
        self._measurer = Measurer(reader=self._reader, encoder=options.encoder_loader, check_media=options.image_check)
        encoder = options.encoder_loader.load()  # the first page needs it, and its errors end the command
        self._encoder = None if isinstance(encoder, HeaderReader) else encoder
        self._environment.globals |= {
            "sources": [str(source.path) for source in self._reader.sources],
            "reasons": [str(reason.value) for reason in Reason],
            "measured": self._encoder is not None,
        }
        self._record = lru_cache(_CACHED)(self._read)

    def page(self, parts: Sequence[str], query: Mapping[str, str]) -> Response:
        """Answer with a page."""
        match parts:
            case [""]:
                return self._records(query)
            case ["record", key]:
                source, *record = self._record(key)
                return self.render("raw", {}, records=self._shown(source, [record]), source=str(source), alone=True)
            case ["tokens", key, sample]:
                return self._tokens(key, sample, query)
        return super().page(parts, query)

    def samples(self, key: str) -> Sequence[SampleView]:
        """Return the samples of a pack or record."""
        return view_samples(self._stored(key), None)

    def contents(self, key: str, names: Sequence[str]) -> Mapping[str, bytes]:
        """Read these files of a pack or record."""
        files: dict[str, MediaReference] = {}
        for sample, view in zip(self._stored(key), self.samples(key), strict=True):
            files |= zip(view.file_names, sample.conversation.media_files, strict=True)
        return {name: files[name].read() for name in names}

    def _stored(self, key: str) -> Sequence[StoredSample]:
        *_, conversation, measured = self._record(key)
        return () if conversation is None else record_samples(conversation, measured)

    def _records(self, query: Mapping[str, str]) -> Response:
        number = index_below(query.get("source") or "0", len(self._reader.sources), "source")
        source = self._reader.sources[number]
        stop = source.extent()
        start = min(number_in(query, "from", 0), stop)
        if query.get("percent"):
            start = stop * min(number_in(query, "percent", 0), 100) // 100
        elif query.get("line"):
            start = _address(source, number_in(query, "line", 0))
        rows = source.scan(start, stop)

        def steps() -> Iterator[tuple[int, Any]]:
            while batch := list(islice(rows, _RECORDS + 1)):
                yield batch[0].address, None
                yield from ((found[0].address, found) for found in self._matching(number, batch, query))

        found, place = first_found(steps(), start, _RECORDS, _SECONDS)
        progress = (start, stop if place is None else place, stop)
        query = {**query, "percent": "", "line": "", "source": str(number)}
        if place is None and number + 1 < len(self._reader.sources):
            query, place = {**query, "source": str(number + 1)}, 0
        values = {"records": self._shown(number, found), "progress": progress, "source": str(number)}
        return self.results("raw", query, "/", (start, place, stop), **values)

    def _tokens(self, key: str, sample: str, query: Mapping[str, str]) -> Response:
        source, row, conversation, _ = self._record(key)
        members = () if conversation is None else conversation.members or (conversation,)
        index = index_below(sample, len(members), "sample")
        if not isinstance(self._encoder, ChatEncoder):
            raise ConfigError("tokens need --tokenizer")
        [encoded] = self._encoder.encode_many(members[index : index + 1])
        if isinstance(encoded, Reject):
            raise NotFoundError(f"sample {index} is rejected: {encoded}")
        [place] = self._places(source, [(row,)])
        rows, link = sample_rows([encoded], self._encoder), f"{self.base}/record/{key}"
        return self.tokens(rows, query, key=place, sample=index, ident=encoded.id, link=link)

    def _matching(self, source: int, rows: Sequence[SourceRecord], query: Mapping[str, str]) -> list[Any]:
        """Measure the records that have the text, and select those with the status, media and length."""
        text, status, media = (query.get(name, "") for name in ("text", "status", "media"))
        low, high = number_in(query, "min", None), number_in(query, "max", None)
        if text:
            rows = [row for row in rows if any(text in leaf for leaf in leaves(row.record) if isinstance(leaf, str))]
        measured = self._measurer.records(source, rows) if rows else []
        found = []
        for row, (conversation, result) in zip(rows, measured, strict=True):
            reason = "usable" if result.reject is None else str(result.reject.reason.value)
            is_wanted = status in ("", reason) or (status == "rejected" and result.reject is not None)
            is_wanted &= not media or (conversation is not None and conversation.kind == media)
            is_wanted &= (low is None or result.length >= low) and (high is None or 0 <= result.length <= high)
            if is_wanted:
                found.append((row, conversation, result))
        return found

    def _read(self, key: str) -> tuple[int, SourceRecord, Conversation | None, Measurement]:
        """Index of the source, record and measurement by `SOURCE-ADDRESS`."""
        source, _, address = key.partition("-")
        number = index_below(source, len(self._reader.sources), "source")
        at = index_below(address, self._reader.sources[number].extent(), "address")
        row = next(self._reader.sources[number].scan(at, at + 1), None)
        if row is None:
            raise NotFoundError(f"no record starts at {address}")
        [(conversation, result)] = self._measurer.records(number, [row])
        return number, row, conversation, result

    def _shown(self, source: int, found: Sequence[Any]) -> list[Any]:
        """Values of the template for each record."""
        shown = []
        for (row, conversation, result), place in zip(found, self._places(source, found), strict=True):
            key = f"{source}-{row.address}"
            stored = [] if conversation is None else record_samples(conversation, result)
            is_unfinished = result.reject is not None and result.reject.detail.startswith(UNFINISHED)
            encoder = None if is_unfinished else self._encoder  # which would need the same time again
            views = view_samples(stored, encoder)
            view, rendered = PackView(key=key, samples=views), ""
            if stored and conversation.messages and isinstance(encoder, ChatEncoder):
                with suppress(EnergonPackedError):
                    rendered = encoder.renderer.render(conversation).text
            shown.append({
                "url": f"{self.base}/record/{key}",
                "place": place,
                "id": conversation.id if conversation is not None else raw_id(row.record),
                "format": self._reader.format_of(source, row),
                "reject": result.reject,
                "notes": () if conversation is None else (*conversation.notes, *result.notes),
                "unused": () if conversation is None else conversation.unused_fields,
                "pack": self.shown(view),
                "groups": in_groups(views),
                "rendered": rendered,
                "raw": _json(row.record),
            })  # fmt: skip
        return shown

    def _places(self, source: int, found: Sequence[Any]) -> list[str]:
        """Line or row of each record; the byte where lines would have to be counted over much of the file."""
        addresses = np.array([row.address for row, *_ in found], dtype=np.int64)
        opened = self._reader.sources[source]
        is_table = type(opened).row_numbers is Source.row_numbers
        if not is_table and len(found) and addresses[-1] > _COUNTED:
            return [f"{opened.path} at byte {address:,}" for address in addresses.tolist()]
        lines = opened.line_numbers(addresses, np.zeros_like(addresses)).tolist()
        rows = opened.row_numbers(addresses.tolist())
        return [f"{opened.path} line {line:,}" if line else f"{opened.path} row {row:,}"
                for line, row in zip(lines, rows, strict=True)]  # fmt: skip


def _address(source: Source, number: int) -> int:
    """Address of a line, from 1, or of a row, from 0, if records are not lines."""
    if not isinstance(source, JsonlSource):
        return min(number, source.extent())
    start, deadline = np.zeros(1, dtype=np.int64), time.monotonic() + _SECONDS
    at, before = 0, number - int(source.line_numbers(start, start)[0])
    with source.data.open("rb") as stream:
        for line in islice(stream, max(0, before)):
            at += len(line)
            if time.monotonic() > deadline:
                raise NotFoundError(f"line {number:,} must be reached in {_SECONDS:g} s; enter a percentage")
    return at


def _json(record: Any) -> str:
    def plain(value: Any) -> Any:
        return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)

    try:
        text = orjson.dumps(record, default=plain, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # nested too deeply, or integers above 64 bits
        text = repr(record)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... {len(text) - _LONGEST:,} more characters"
