"""Pages of a dataset for `energon-packed view`: the path and the query of a URL in, a Response out.

Packs are read by byte range, lengths.parquet by row groups and rejects.jsonl by lines, so that memory does not grow
with the dataset. Media are named by pack, sample and index: no URL names a file.
"""

import io
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.vision.images import load_image, sniff_extension
from energon_packed.errors import ConfigError, DataChangedError, EnergonPackedError, FormatError, RecordError
from energon_packed.formats.references import MEDIA_PART, complete_parts, emptied, read_locators
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.report import map_paths, page_environment
from energon_packed.inspection.report_data import (
    Player,
    ShownPack,
    Strip,
    decoded_frames,
    is_short,
    playable,
    recorded,
    shown_frames,
)
from energon_packed.inspection.run_reports import read_rejects
from energon_packed.inspection.search import Filter, matching_records
from energon_packed.inspection.tokens import MappedPack, Segment, map_pack, token_rows
from energon_packed.inspection.view import AudioView, ImageView, PackView, SampleView, VideoView, view_pack
from energon_packed.metadatasets import NV_META
from energon_packed.records import MediaReference
from energon_packed.shards.index import open_sqlite_index
from energon_packed.shards.reader import ShardReader

_PACKS = 20  # on a page
_MOST_MAPPED = 64 << 20  # bytes of packs and their media that a page of packs reads; further rows have lengths only
_ROWS = 50  # records on a page
_TOKENS = 1000  # on a page
_SEARCH_SECONDS = 2.0  # of a search for text; the page has a link to continue
_AROUND = 80  # characters shown before and after a found text
_CACHED = 8  # views of packs, without media; a page with many pictures needs one of them
_CACHED_MEDIA = 2  # a player requests a file in several ranges
_MEDIA_FIELDS = {"image": "images", "video": "videos", "frame": "videos", "audio": "audios"}
# Content that browsers show. Others are converted, or not shown: a type such as SVG or HTML could run scripts.
_IMAGES = {"jpg": "jpeg", "png": "png", "gif": "gif", "webp": "webp", "bmp": "bmp"}
_CLIPS = {"mp4": "mp4", "mov": "mp4", "webm": "webm", "mkv": "webm"}
_STATIC = {"style.css": "text/css", "page.js": "text/javascript"}


@dataclass(frozen=True, slots=True)
class Response:
    """Answer to a request: HTTP status, content and its type."""

    status: int
    content: bytes
    kind: str = "text/plain; charset=utf-8"

    @property
    def is_media(self) -> bool:
        """The content comes from the dataset as it is."""
        return self.kind.startswith(("image/", "video/", "audio/"))


class _NotFoundError(Exception):
    """There is no such page, pack, sample or medium; the text is one line."""


class _Texts:
    """Names of the parts without media, as a container."""

    def __contains__(self, part: object) -> bool:
        return not str(part).startswith(("img", "vid", "aud"))


class Viewer:
    """Pages of one dataset. Requests may come from several threads: the dataset is read by one at a time."""

    def __init__(self, folder: PackedFolder, encoder: ChatEncoder | None, not_encoded: str = "") -> None:
        """Open the dataset.

        Args:
            folder: the dataset.
            encoder: its encoder, which marks supervised tokens; None leaves them unknown.
            not_encoded: why there is no encoder.

        Raises:
            FormatError: a shard or its index is missing or damaged.
        """
        self._folder, self._encoder, self._not_encoded = folder, encoder, not_encoded
        self._shards = list(folder.shards)
        self._codec = folder.codec
        self._reader = ShardReader([folder.path / name for name in self._shards])
        self._lock = threading.Lock()
        self._environment = page_environment()
        self._index = lru_cache(_CACHED)(self._find)
        self._view = lru_cache(_CACHED)(self._read_view)
        self._media = lru_cache(_CACHED_MEDIA)(self._read_media)

    def respond(self, url: str) -> Response:
        """Answer a GET request. An error is a response with one line."""
        path, _, query = url.partition("?")
        parts = [unquote(part, errors="surrogateescape") for part in path.split("/")[1:]]
        try:
            with self._lock:
                return self._page(parts, dict(parse_qsl(query)))
        except _NotFoundError as error:
            return Response(404, f"error: {error}\n".encode(errors="backslashreplace"))
        except (EnergonPackedError, OSError) as error:
            return Response(500, f"error: {' '.join(str(error).split())}\n".encode(errors="backslashreplace"))

    def _page(self, parts: Sequence[str], query: Mapping[str, str]) -> Response:
        match parts:
            case [""]:
                return self._packs(query)
            case ["pack", key]:
                return self._pack(key)
            case ["tokens", key, sample]:
                return self._tokens(key, sample, query)
            case ["records"]:
                return self._records(query)
            case ["text"]:
                return self._text(query)
            case ["rejects"]:
                return self._rejects(query)
            case ["media", kind, key, *indices]:
                return self._media(kind, key, tuple(indices))
            case [name] if name in _STATIC:
                source = self._environment.loader.get_source(self._environment, name)[0]  # type: ignore[union-attr]
                return Response(200, source.encode(), f"{_STATIC[name]}; charset=utf-8")
        raise _NotFoundError("there is no such page; / lists the packs")

    def _render(self, name: str, query: Mapping[str, str], /, **values: Any) -> Response:
        manifest = self._folder.manifest
        text = self._environment.get_template(f"{name}.html.j2").render(
            dataset=str(self._folder.path), manifest=manifest, query={**_NO_QUERY, **query}, packs=len(self._reader),
            reasons=sorted(manifest.rejects) if manifest else (), not_encoded=self._not_encoded, **values,
        )  # fmt: skip
        return Response(200, text.encode(errors="backslashreplace"), "text/html; charset=utf-8")

    # Packs

    def _packs(self, query: Mapping[str, str]) -> Response:
        pages = max(1, -(-len(self._reader) // _PACKS))
        page = min(_number(query, "page", 1), pages)
        chosen = range((page - 1) * _PACKS, min(page * _PACKS, len(self._reader)))
        rows, problems, left = [], [], _MOST_MAPPED
        for pack in chosen:
            try:
                mapped, size = self._mapped(pack, left)
            except (FormatError, DataChangedError) as error:  # the packs around it are shown
                problems.append(f"pack {pack:,}: {error}")
                continue
            left -= size
            rows.append((mapped, self._shards[self._reader.locate(pack)[0]]))
        width = self._width([mapped for mapped, _ in rows])
        lines = [(mapped, shard, map_paths([mapped], width)) for mapped, shard in rows]
        paths = map_paths([mapped for mapped, _ in rows], width)
        return self._render("packs", query, rows=lines, width=width, paths=paths, page=page, pages=pages,
                            problems=problems, splits=self._folder.shards)  # fmt: skip

    def _mapped(self, pack: int, most: int) -> tuple[MappedPack, int]:
        """Return the segments of a pack, without kinds of tokens if more than `most` bytes must be read."""
        _, start, end = self._reader.locate(pack)
        parts = self._reader.parts(pack, only=(MEDIA_PART,))
        located = read_locators(parts).values() if MEDIA_PART in parts else ()
        size = end - start + sum(locator.size for locator in located if locator is not None)
        if size <= most:
            multiple = self._folder.manifest.pad_multiple if self._folder.manifest else 1
            return map_pack(self._reader[pack], self._codec, self._encoder, multiple=multiple), size
        key, lengths, images = recorded(self._reader, pack, self._codec)
        segments, at = [], 0
        for length, count in zip(lengths, images, strict=True):
            segments.append(Segment(id=None, start=at, length=length, media="image" if count else "text"))
            at += length
        return MappedPack(key=key, segments=segments), 0

    def _width(self, mapped: Sequence[MappedPack]) -> int:
        """Tokens of a row; without packing.json, of the longest pack on the page."""
        if self._folder.manifest is not None and self._folder.manifest.seq_len:
            return self._folder.manifest.seq_len
        return max((segment.start + segment.length for each in mapped for segment in each.segments), default=0) or 1

    def _pack(self, key: str) -> Response:
        pack = self._index(key)
        view = self._view(pack)
        mapped, _ = self._mapped(pack, _MOST_MAPPED)
        width = self._width([mapped])
        shown = ShownPack(view, {}, {}, {}, {})
        for index, sample in enumerate(view.samples):
            self._add_media(shown, index, sample, mapped.segments[index])
        near = {
            name: self._key(other)
            for name, other in (("previous", pack - 1), ("next", pack + 1))
            if 0 <= other < len(self._reader)
        }
        groups = [
            (group, list(samples))
            for group, samples in groupby(enumerate(view.samples), lambda each: each[1].group or f"{each[0]} alone")
        ]
        shard = self._shards[self._reader.locate(pack)[0]]
        return self._render("pack", {}, pack=shown, mapped=mapped, width=width, paths=map_paths([mapped], width),
                            near=near, groups=groups, shard=shard, split=self._folder.shards[shard],
                            page=pack // _PACKS + 1)  # fmt: skip

    def _add_media(self, shown: Any, index: int, sample: SampleView, segment: Segment) -> None:
        """Add the URLs of the media of a sample."""

        def url(kind: str, *indices: int) -> str:
            return "/".join(["/media", kind, _quoted(shown.view.key), str(index), *map(str, indices)])

        for number, image in enumerate(sample.images):
            if image.problem is None:
                shown.thumbnails[image.name] = url("image", number)
        # Runs of image tokens are those of single images if text is between them, as in most templates.
        runs = [length for kind, _, length in segment.runs if kind == "image"]
        if len(runs) == len(sample.images):
            shown.tokens.update(zip([image.name for image in sample.images], runs, strict=True))
        for number, video in enumerate(sample.videos):
            if video.problem is None:
                frames = [(video.timestamps[place], url("frame", number, place)) for place in shown_frames(video)]
                shown.strips[video.name] = Strip(frames, url=url("video", number) if video.is_file else "")
        for number, audio in enumerate(sample.audios):
            if audio.problem is None:
                shown.players[audio.name] = Player(url=url("audio", number) if is_short(audio) else "")

    def _tokens(self, key: str, sample: str, query: Mapping[str, str]) -> Response:
        pack = self._index(key)
        index = _index_below(sample, len(self._view(pack).samples), "sample")
        if self._encoder is None:
            raise ConfigError(f"tokens need the tokenizer of the dataset: {self._not_encoded}")
        rows = [row for row in token_rows(self._reader[pack], self._encoder, self._codec) if row.segment == index]
        pages = max(1, -(-len(rows) // _TOKENS))
        page = min(_number(query, "page", 1), pages)
        shown = rows[(page - 1) * _TOKENS : page * _TOKENS]
        return self._render("tokens", query, key=key, sample=index, ident=self._view(pack).samples[index].id,
                            rows=shown, count=len(rows), page=page, pages=pages)  # fmt: skip

    def _find(self, key: str) -> int:
        """Index of the pack with this key, from index.sqlite. It is untrusted: the tar must have the key there."""
        row = None
        try:
            with closing(open_sqlite_index(self._folder.path / NV_META / "index.sqlite")) as database:
                query = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?"
                row = database.execute(query, (key,)).fetchone()
        except UnicodeEncodeError:  # a key that is not UTF-8 is in no index
            pass
        except (sqlite3.Error, OSError) as error:
            raise FormatError(f"index.sqlite cannot be read: {error}; run energon-packed nv-meta") from error
        if row is None:
            raise _NotFoundError(f"no pack has the key {key!r}")
        shard, sample = row
        is_place = isinstance(shard, int) and isinstance(sample, int) and 0 <= shard < len(self._shards)
        pack = self._reader.first(shard) + sample if is_place else -1
        if not 0 <= pack < len(self._reader) or self._key(pack) != key:
            raise FormatError(f"index.sqlite does not match the tars at {key}; run energon-packed nv-meta")
        return pack

    def _key(self, pack: int) -> str:
        return str(self._reader.part(pack, "")["__key__"])

    def _read_view(self, pack: int) -> PackView:
        return view_pack(self._reader[pack], self._codec, self._encoder)

    # Media

    def _read_media(self, kind: str, key: str, indices: Sequence[str]) -> Response:
        if kind not in _MEDIA_FIELDS or len(indices) != (3 if kind == "frame" else 2):
            raise _NotFoundError("there is no such page; / lists the packs")
        pack = self._index(key)
        view = self._view(pack)
        sample = view.samples[_index_below(indices[0], len(view.samples), "sample")]
        of_kind: Sequence[Any] = getattr(sample, _MEDIA_FIELDS[kind])
        found = of_kind[_index_below(indices[1], len(of_kind), kind)]
        try:
            match found:
                case ImageView():
                    return _image(self._parts(pack, found.name)[found.name])
                case AudioView() if is_short(found):
                    content, subtype, _ = playable(self._parts(pack, found.name)[found.name], found, 1 << 62)
                    return Response(200, content, f"audio/{subtype}")
                case VideoView() if kind == "frame":
                    place = _index_below(indices[2], len(found.frames), "frame")
                    names = found.names if found.is_file else [found.names[place]]
                    return _png(next(decoded_frames(self._parts(pack, *names), found, [place])), "jpeg")
                case VideoView() if found.is_file:
                    content = self._parts(pack, found.names[0])[found.names[0]]
                    if (container := _CLIPS.get(sniff_extension(content))) is not None:
                        return Response(200, content, f"video/{container}")
        except RecordError as error:
            raise _NotFoundError(f"{kind} {indices[1]} of sample {indices[0]} is damaged: {error.detail}") from error
        raise _NotFoundError(f"{kind} {indices[1]} of sample {indices[0]} has a format that browsers do not show")

    def _parts(self, pack: int, *names: str) -> dict[str, Any]:
        """Read only these parts of a pack, from its tar or from the files that it refers to."""
        raw = self._reader.parts(pack, only=(MEDIA_PART, *names))
        return complete_parts(emptied(raw, lambda name: name not in names))

    # Records

    def _records(self, query: Mapping[str, str]) -> Response:
        wanted = Filter(
            ident=query.get("id", ""),
            status=query.get("status", ""),
            media=query.get("media", "") if query.get("media") in ("text", "image", "video", "audio") else "",
            shortest=_number(query, "min", None),
            longest=_number(query, "max", None),
        )
        table, problem = self._folder.path.parent / "lengths.parquet", ""
        try:
            found, start = matching_records(table, wanted, start=_number(query, "from", 0), limit=_ROWS)
        except FileNotFoundError:
            found, start = [], None
            problem = f"{table} does not exist, so records cannot be found by id, status, media or length."
        more = None if start is None else urlencode({**query, "from": start})
        return self._render("records", query, records=found, more=more, problem=problem)

    def _text(self, query: Mapping[str, str]) -> Response:
        text, pack = query.get("text", ""), _number(query, "from", 0)
        found: list[tuple[str, int, str | None, str]] = []
        first, deadline = pack, time.monotonic() + _SEARCH_SECONDS
        problems = []
        while text and pack < len(self._reader) and len(found) < _ROWS and time.monotonic() < deadline:
            try:
                found += self._with_text(pack, text)
            except (FormatError, DataChangedError) as error:
                problems.append(f"pack {pack:,}: {error}")
            pack += 1
        more = urlencode({**query, "from": pack}) if text and pack < len(self._reader) else None
        return self._render("text", query, found=found, more=more, first=first, last=pack,
                            problems=problems[:_ROWS])  # fmt: skip

    def _with_text(self, pack: int, text: str) -> Iterator[tuple[str, int, str | None, str]]:
        """Find the samples of a pack whose text has `text`: (key, sample, id, text around). Media are not read."""
        raw = emptied(self._reader.parts(pack, only=_Texts()), lambda name: name not in _Texts())
        view = view_pack(raw, self._codec, self._encoder if self._codec.stores_tokens else None)
        for index, sample in enumerate(view.samples):
            for turn in sample.turns:
                if (at := turn.shown.find(text)) >= 0:
                    yield view.key, index, sample.id, turn.shown[max(0, at - _AROUND) : at + len(text) + _AROUND]
                    break

    def _rejects(self, query: Mapping[str, str]) -> Response:
        file, reason = self._folder.path.parent / "rejects.jsonl", query.get("reason", "")
        page, problem = _number(query, "page", 1), ""
        chosen: list[dict[str, Any]] = []
        try:
            wanted = (value for value in read_rejects(file) if reason in ("", value["reason"]))
            chosen = list(islice(wanted, (page - 1) * _ROWS, page * _ROWS + 1))
        except FileNotFoundError:
            problem = f"{file} does not exist." if self._folder.manifest is None else ""
        return self._render(
            "rejects", query, records=chosen[:_ROWS], page=page, more=len(chosen) > _ROWS, problem=problem
        )


_NO_QUERY = dict.fromkeys(("id", "status", "media", "min", "max", "text", "reason"), "")


def _number(query: Mapping[str, str], name: str, default: Any) -> Any:
    """A number of a query; the default for anything else, as the form and links have only numbers."""
    value = query.get(name, "")
    return max(int(value), default or 0) if value.isascii() and value.isdecimal() and len(value) < 16 else default


def _index_below(text: str, count: int, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < count):
        raise _NotFoundError(f"there are {count:,} {what}s, from 0, got {text!r}")
    return int(text)


def _quoted(key: str) -> str:
    return quote(key, safe="", errors="surrogateescape")


def _image(data: bytes) -> Response:
    kind = _IMAGES.get(sniff_extension(data))
    return _png(load_image(MediaReference(data=data))) if kind is None else Response(200, data, f"image/{kind}")


def _png(image: Any, kind: str = "png") -> Response:
    out = io.BytesIO()
    image.save(out, kind)
    return Response(200, out.getvalue(), f"image/{kind}")
