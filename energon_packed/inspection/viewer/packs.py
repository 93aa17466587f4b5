"""Viewer, the pages of a packed dataset.

Packs are read by byte range, lengths.parquet by row groups and rejects.jsonl by lines, so that memory does not grow
with the dataset.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain, islice
from typing import Any

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError, DataChangedError, FormatError
from energon_packed.formats.references import MEDIA_PART, complete_parts, emptied, read_locators
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.report import quoted, render_report, script_and_policy
from energon_packed.inspection.report_data import ReportData, recorded
from energon_packed.inspection.search import FoundRecord, first_found, matching_records, record_tests
from energon_packed.inspection.tokens import token_rows
from energon_packed.inspection.view import PackView, SampleView, view_pack
from energon_packed.inspection.viewer.pages import (
    PAGE_TYPE,
    NotFoundError,
    Pages,
    Response,
    in_groups,
    index_below,
    index_in,
    number_in,
)
from energon_packed.pipeline.output.run_reports import read_rejects
from energon_packed.shards.reader import ShardReader

_PACKS = 20  # on a page
_MOST_MAPPED = 64 << 20  # bytes of packs and their media that a page of packs reads; further rows have lengths only
_ROWS = 50  # records on a page
_SEARCH_SECONDS = 2.0  # of a search; the page has a link to continue
_AROUND = 80  # characters shown before and after a found text
_CACHED = 8  # views of packs, without media; each picture of a page needs the view


class _Texts:
    """Names of the parts without media, as a container."""

    def __contains__(self, part: object) -> bool:
        return not str(part).startswith(("img", "vid", "aud"))


class Viewer(Pages):
    """Pages of one dataset."""

    links = (("/records", "records"), ("/rejects", "rejected records"), ("/report", "report"))

    def __init__(
        self, folder: PackedFolder, encoder: Callable[[], tuple[ChatEncoder | None, str]], base: str = ""
    ) -> None:
        """Open the dataset.

        Args:
            folder: the dataset.
            encoder: loads its encoder, which marks supervised tokens, or returns why there is none; called once.
            base: as in `Pages`.

        Raises:
            FormatError: a shard or its index is missing or damaged.
        """
        super().__init__(str(folder.path), base)
        self._folder, self._loaded, self._was_shown = folder, cache(encoder), False
        self._shards = list(folder.shards)
        self._codec = folder.codec
        self._reader = ShardReader([folder.path / name for name in self._shards])
        manifest = folder.manifest
        self._environment.globals |= {
            "manifest": manifest,
            "packs": len(self._reader),
            "reasons": sorted(manifest.rejects) if manifest else (),
            "all_splits": sorted(set(folder.shards.values())),
        }
        self._index = lru_cache(_CACHED)(self._find)
        self._view = lru_cache(_CACHED)(lambda pack: self._read_view(pack, self._loaded()[0]))

    def page(self, parts: Sequence[str], query: Mapping[str, str]) -> Response:
        """Answer with a page."""
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
            case ["report"]:
                encoder, reason = self._loaded()
                data = ReportData(self._folder, encoder, not_encoded=reason)
                text = render_report(self.name, data, view=self.base)
                policy = script_and_policy(self._environment)[1]
                return Response(200, text.encode(errors="backslashreplace"), PAGE_TYPE, policy)
        return super().page(parts, query)

    def samples(self, key: str) -> Sequence[SampleView]:
        """Return the samples of a pack or record."""
        return self._view(self._index(key)).samples

    def contents(self, key: str, names: Sequence[str]) -> Mapping[str, bytes]:
        """Read these files of a pack or record."""
        # Only these parts are read, from the tar or from the files that it refers to.
        raw = self._reader.parts(self._index(key), only=(MEDIA_PART, *names))
        return complete_parts(emptied(raw, lambda name: name not in names))

    # Packs

    def _packs(self, query: Mapping[str, str]) -> Response:
        # Loading takes seconds: the first page is shown without the encoder, and then requests itself again.
        is_early = not self._was_shown and not self._loaded.cache_info().currsize
        self._was_shown = True
        encoder, reason = (None, "the tokenizer is being loaded") if is_early else self._loaded()
        shards = [range(self._reader.first(shard), self._reader.first(shard + 1)) for shard in self._chosen(query)]
        pages = max(1, -(-sum(map(len, shards)) // _PACKS))
        page = min(number_in(query, "page", 1), pages)
        chosen = islice(chain(*shards), (page - 1) * _PACKS, page * _PACKS)
        rows, problems, left = [], [], _MOST_MAPPED
        for pack in chosen:
            try:
                mapped, size = self._mapped(pack, encoder, left)
            except (FormatError, DataChangedError) as error:  # the packs around it are shown
                problems.append(f"pack {pack:,}: {error}")
                continue
            left -= size
            rows.append((mapped, self._shards[self._reader.locate(pack)[0]]))
        width = self._width([mapped for mapped, _ in rows])
        return self.render("packs", query, rows=rows, width=width, page=page, pages=pages, problems=problems,
                           splits=self._folder.shards, is_early=is_early, not_encoded=reason)  # fmt: skip

    def _mapped(self, pack: int, encoder: ChatEncoder | None, most: int) -> tuple[PackView, int]:
        """Return the samples of a pack, without kinds of tokens if more than `most` bytes must be read."""
        _, start, end = self._reader.locate(pack)
        parts = self._reader.parts(pack, only=(MEDIA_PART,))
        located = read_locators(parts).values() if MEDIA_PART in parts else ()
        size = end - start + sum(locator.size for locator in located if locator is not None)
        if size <= most:
            return self._read_view(pack, encoder), size
        key, lengths, images = recorded(self._reader, pack, self._codec)
        starts, kinds = accumulate(lengths, initial=0), ["image" if count else "text" for count in images]
        values = zip(starts, lengths, kinds, strict=False)
        samples = [SampleView(id=None, start=at, length=length, kind=kind) for at, length, kind in values]
        return PackView(key=key, samples=samples), 0

    def _width(self, mapped: Sequence[PackView]) -> int:
        """Tokens of a row; without packing.json, of the longest pack on the page."""
        seq_len = self._folder.manifest.seq_len if self._folder.manifest else 0
        return seq_len or max((each.tokens or 1 for each in mapped), default=1)

    def _pack(self, key: str) -> Response:
        pack = self._index(key)
        view = self._view(pack)
        others = {"previous": pack - 1, "next": pack + 1}.items()
        near = {name: self._key(other) for name, other in others if 0 <= other < len(self._reader)}
        shard = self._shards[self._reader.locate(pack)[0]]
        return self.render("pack", {}, pack=self.shown(view), width=self._width([view]), near=near,
                           groups=in_groups(view.samples), shard=shard, split=self._folder.shards[shard],
                           page=pack // _PACKS + 1, not_encoded=self._loaded()[1])  # fmt: skip

    def _tokens(self, key: str, sample: str, query: Mapping[str, str]) -> Response:
        pack = self._index(key)
        index = index_below(sample, len(self._view(pack).samples), "sample")
        encoder, reason = self._loaded()
        if encoder is None:
            raise ConfigError(f"tokens need the tokenizer of the dataset: {reason}")
        rows = [row for row in token_rows(self._reader[pack], encoder, self._codec) if row.segment == index]
        ident, link = self._view(pack).samples[index].id, self._href(key, index)
        return self.tokens(rows, query, key=key, sample=index, ident=ident, link=link)

    def _href(self, key: str, sample: int | None) -> str:
        return f"{self.base}/pack/{quoted(key)}#sample-{sample}"

    def _find(self, key: str) -> int:
        """Index of the pack with this key: its number, else from index.sqlite. The tar must have the key there."""
        # Keys of `pack` end in the index of the pack, and an index in an object store is copied to be read.
        number = key.rpartition("_")[2]
        if (pack := index_in(number, len(self._reader))) is not None and self._key(pack) == key:
            return pack
        if (place := self._folder.indexed(key)) is None:
            raise NotFoundError(f"no pack has the key {key!r}")
        pack = self._reader.first(place[0]) + place[1]
        if not 0 <= pack < len(self._reader) or self._key(pack) != key:
            raise FormatError(f"index.sqlite does not match the tars at {key}; run energon-packed nv-meta")
        return pack

    def _key(self, pack: int) -> str:
        return str(self._reader.part(pack, "")["__key__"])

    def _read_view(self, pack: int, encoder: ChatEncoder | None) -> PackView:
        multiple = self._folder.manifest.pad_multiple if self._folder.manifest else 1
        return view_pack(self._reader[pack], self._codec, encoder, multiple=multiple)

    # Records

    def _records(self, query: Mapping[str, str]) -> Response:
        shards = self._chosen(query)
        tests = record_tests(
            ident=query.get("id", ""),
            status=query.get("status", ""),
            media=query.get("media", ""),
            shortest=number_in(query, "min", None),
            longest=number_in(query, "max", None),
            file=query.get("file", ""),
            line=number_in(query, "line", None),
            shards=None if len(shards) == len(self._shards) else [self._shards[shard] for shard in shards],
        )
        table, first = self._folder.path.parent / "lengths.parquet", number_in(query, "from", 0)
        try:
            found, place, rows = matching_records(table, tests, start=first, limit=_ROWS, seconds=_SEARCH_SECONDS)
        except FileNotFoundError:
            problem = f"{table} does not exist, so records cannot be found by id, status, media, file or length."
            return self.render("found", query, heading="Records", columns=(), rows=(), empty=problem)
        columns = ("id", "tokens", "status", "place", "sample")
        lines = [(each.id, each.length, each.status, each.place, self._sample_of(each)) for each in found]
        values = {"heading": "Records", "columns": columns, "rows": lines, "empty": "No record matches here."}
        return self.results("found", query, "/records", (first, place, rows), **values)

    def _sample_of(self, record: FoundRecord) -> Any:
        if record.pack is not None:
            return {"text": f"{record.sample} of {record.pack}", "href": self._href(record.pack, record.sample)}
        href, reasons = f"{self.base}/rejects?reason={quoted(record.status)}", self._environment.globals["reasons"]
        return {"text": "why", "href": href} if record.status in reasons else "none"

    def _chosen(self, query: Mapping[str, str]) -> list[int]:
        """Indices of the shards of a split, or of the shards whose name has a string."""
        split, part = query.get("split", ""), query.get("shard", "")
        shards = enumerate(self._folder.shards.items())
        return [index for index, (name, own) in shards if part in name and split in ("", own)]

    def _text(self, query: Mapping[str, str]) -> Response:
        text, start, problems = query.get("text", ""), number_in(query, "from", 0), list[str]()
        total = len(self._reader) if text else 0

        def steps() -> Iterator[tuple[int, Any]]:
            for pack in range(start, total):
                yield pack, None
                try:
                    yield pack, list(self._with_text(pack, text)) or None
                except (FormatError, DataChangedError) as error:
                    problems.append(f"pack {pack:,}: {error}")

        packs, place = first_found(steps(), start, _ROWS, _SEARCH_SECONDS)
        heading = f"Samples with {text}" if text else "Samples with a text"
        values = {"columns": ("sample", "pack", "text"), "rows": list(chain(*packs)), "problems": problems}
        return self.results("found", query, "/text", (start, place, total), heading=heading, empty="None.", **values)

    def _with_text(self, pack: int, text: str) -> Iterator[tuple[Any, str, str]]:
        """Find the samples of a pack whose text has `text`: (link, key, text around). Media are not read."""
        raw = emptied(self._reader.parts(pack, only=_Texts()), lambda name: name not in _Texts())
        view = view_pack(raw, self._codec, self._loaded()[0] if self._codec.stores_tokens else None)
        for index, sample in enumerate(view.samples):
            for turn in sample.turns:
                if (at := turn.shown.find(text)) >= 0:
                    name = f"sample {index}" if sample.id is None else sample.id
                    around = turn.shown[max(0, at - _AROUND) : at + len(text) + _AROUND]
                    yield {"text": name, "href": self._href(view.key, index)}, view.key, around
                    break

    def _rejects(self, query: Mapping[str, str]) -> Response:
        file, start = self._folder.path.parent / "rejects.jsonl", number_in(query, "from", 0)
        reason, manifest = query.get("reason", ""), self._folder.manifest
        try:
            lines = islice(enumerate(read_rejects(file)), start, None)
            steps = ((line, value if reason in ("", value["reason"]) else None) for line, value in lines)
            found, place = first_found(steps, start, _ROWS, _SEARCH_SECONDS)
        except FileNotFoundError:
            found, place = [], None
        total = sum(manifest.rejects.values()) if manifest else (place or start + len(found))
        values = {"columns": ("id", "reason", "place", "detail"), "rows": [self._reject(value) for value in found]}
        values |= {"heading": "Rejected records", "empty": "None." if manifest else f"{file} does not exist."}
        return self.results("found", query, "/rejects", (start, place, total), **values)

    def _reject(self, value: Mapping[str, Any]) -> tuple[Any, ...]:
        href = f"{self.base}/records?status={quoted(value['reason'])}&id={quoted(value['id'])}"
        place = f"line {value['line']}" if value.get("line") else f"row {value.get('row')}"
        return {"text": value["id"], "href": href}, value["reason"], f"{value['source']} {place}", value["detail"]
