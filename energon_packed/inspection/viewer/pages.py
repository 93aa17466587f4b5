"""Pages, the base class of the pages of `view`: the path and the query of a URL in, a Response out.

Media are named by pack, sample and index: no URL names a file. Content is returned with a type that cannot run
scripts, or converted.
"""

import io
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from energon_packed.encoding.vision.images import load_image, sniff_extension
from energon_packed.errors import EnergonPackedError, RecordError
from energon_packed.inspection.report import page_environment, quoted
from energon_packed.inspection.report_data import decoded_frames, is_short, playable, shown_frames
from energon_packed.inspection.tokens import TokenRow, heat_strips
from energon_packed.inspection.view import AudioView, ImageView, PackView, SampleView, ShownFile, VideoView
from energon_packed.records import MediaReference

_CACHED_MEDIA = 2  # a player requests a file in several ranges
_TOKENS = 1000  # on a page
_MEDIA_FIELDS = {"image": "images", "video": "videos", "frame": "videos", "audio": "audios"}
# Content that browsers show. Others are converted, or not shown: a type such as SVG or HTML could run scripts.
_IMAGES = {"jpg": "jpeg", "png": "png", "gif": "gif", "webp": "webp", "bmp": "bmp"}
# Type by the container and codec of FFmpeg, of videos that Chromium, Firefox and Safari play.
_CLIPS = {("mov", codec): "mp4" for codec in ("h264", "vp9", "av1")}
_CLIPS |= {("matroska", codec): "webm" for codec in ("vp8", "vp9", "av1")}
_MOST_CLIP = 256 << 20  # bytes of a video file that is played
PAGE_TYPE = "text/html; charset=utf-8"
"""Type of a page."""
_STATIC = {"style.css": "text/css", "page.js": "text/javascript"}


@dataclass(frozen=True, slots=True)
class Response:
    """Answer to a request: HTTP status, content and its type.

    Attributes:
        policy: Content-Security-Policy of a page that contains its own style and script; "" for the usual policy.
    """

    status: int
    content: bytes
    kind: str = "text/plain; charset=utf-8"
    policy: str = ""

    @property
    def is_media(self) -> bool:
        """The content comes from the dataset as it is."""
        return self.kind.startswith(("image/", "video/", "audio/"))


class NotFoundError(Exception):
    """There is no such page, pack, sample or medium; the message is one line."""


class Pages(ABC):
    """Pages of one dataset or input. Requests may come from several threads: the data is read by one at a time.

    Attributes:
        name: path of the data.
        base: start of the path of each of its pages, such as "/0" for the first dataset of a Metadataset.
        links: (path below `base`, name) of its pages in the navigation.
    """

    links: Sequence[tuple[str, str]] = ()

    def __init__(self, name: str, base: str = "") -> None:
        self.name, self.base = name, base
        self._lock = threading.Lock()
        self._environment: Any = page_environment(base)  # templates have values of any type
        self._media = lru_cache(_CACHED_MEDIA)(self._read_media)

    def respond(self, url: str) -> Response:
        """Answer a GET request for a path below `base`. An error is a response with one line."""
        path, _, query = url.partition("?")
        parts = [unquote(part, errors="surrogateescape") for part in path.split("/")[1:]]
        try:
            if parts[0] in _STATIC and len(parts) == 1:
                source = self._environment.loader.get_source(self._environment, parts[0])[0]
                return Response(200, source.encode(), f"{_STATIC[parts[0]]}; charset=utf-8")
            with self._lock:
                if parts[0] == "media" and len(parts) > 2:
                    return self._media(parts[1], parts[2], tuple(parts[3:]))
                return self.page(parts, dict(parse_qsl(query)))
        except NotFoundError as error:
            return Response(404, f"error: {error}\n".encode(errors="backslashreplace"))
        except (EnergonPackedError, OSError) as error:
            return Response(500, f"error: {' '.join(str(error).split())}\n".encode(errors="backslashreplace"))

    @abstractmethod
    def page(self, parts: Sequence[str], query: Mapping[str, str]) -> Response:
        """Answer a request for a page: the unquoted parts of its path below `base`.

        Raises:
            NotFoundError: there is no such page.
        """
        raise NotFoundError(f"there is no such page; {self.base}/ is the first")

    def samples(self, key: str) -> Sequence[SampleView]:
        """Return the samples of a pack or record, for their media. Raises NotFoundError."""
        raise NotFoundError("there is no such page")

    def contents(self, key: str, names: Sequence[str]) -> Mapping[str, bytes]:
        """Return files of a pack or record by their names in its samples."""
        raise NotFoundError("there is no such page")

    def render(self, name: str, query: Mapping[str, str], /, **values: Any) -> Response:
        """Render a template; values of the query without an entry are ""."""
        text = self._environment.get_template(f"{name}.html.j2").render(
            dataset=self.name, links=self.links, query=defaultdict(str, query), **values
        )  # fmt: skip
        return Response(200, text.encode(errors="backslashreplace"), PAGE_TYPE)

    def results(
        self, name: str, query: Mapping[str, str], path: str, span: tuple[int, int | None, int], **values: Any
    ) -> Response:
        """Render the page of a search, with its progress and a link to continue.

        Args:
            name: template.
            query: query of the link.
            path: path of the page below `base`.
            span: (first place that was read, place to continue from or None, all places).
            values: values of the template, such as `records`, the results.
        """
        first, place, total = span
        more = None if place is None else f"{self.base}{path}?{urlencode({**query, 'from': place})}"
        return self.render(name, query, **{"progress": (first, place or total, total), "more": more} | values)

    def tokens(self, rows: Sequence[TokenRow], query: Mapping[str, str], **values: Any) -> Response:
        """Render the page of the tokens of a sample, some at a time.

        Args:
            rows: all tokens.
            query: has the page.
            values: `key` and `sample`, name of the pack or record and index of the sample in it; `ident`, id of the
                sample; `link`, address of the pack or record.
        """
        pages = max(1, -(-len(rows) // _TOKENS))
        page = min(number_in(query, "page", 1), pages)
        shown = rows[(page - 1) * _TOKENS : page * _TOKENS]
        values |= {"count": len(rows), "page": page, "pages": pages}
        return self.render("tokens", query, rows=shown, strips=heat_strips(shown), **values)

    def shown(self, view: PackView) -> PackView:
        """Add the URLs of all media of a pack."""

        def show(kind: str, index: int, number: int, file: Any) -> ShownFile:
            place, sample = f"{quoted(view.key)}/{index}/{number}", view.samples[index]
            # Runs of image tokens belong to single images if text is between them, as in most templates.
            own = [count for name, _, count in sample.runs if name == "image"]
            tokens = own[number] if kind == "image" and len(own) == len(sample.images) else None
            if kind == "video":
                times, url = file.selection.timestamps, f"{self.base}/media/frame/{place}"
                frames = [(times[at], f"{url}/{at}") for at in shown_frames(file)]
                return ShownFile(url=f"{self.base}/media/video/{place}" if _is_clip(file) else "", frames=frames)
            is_shown = kind == "image" or is_short(file)
            return ShownFile(url=f"{self.base}/media/{kind}/{place}" if is_shown else "", tokens=tokens)

        return view.with_files(show)

    def _read_media(self, kind: str, key: str, indices: Sequence[str]) -> Response:
        if kind not in _MEDIA_FIELDS or len(indices) != (3 if kind == "frame" else 2):
            raise NotFoundError("there is no such page")
        samples = self.samples(key)
        sample = samples[index_below(indices[0], len(samples), "sample")]
        of_kind: Sequence[Any] = getattr(sample, _MEDIA_FIELDS[kind])
        found = of_kind[index_below(indices[1], len(of_kind), kind)]
        try:
            match found:
                case ImageView():
                    return _image(self.contents(key, [found.name])[found.name])
                case AudioView() if is_short(found):
                    content, subtype, _ = playable(self.contents(key, [found.name])[found.name], found, 1 << 62)
                    return Response(200, content, f"audio/{subtype}")
                case VideoView() if kind == "frame":
                    place = index_below(indices[2], len(found.selection.indices), "frame")
                    names = found.names if found.is_file else [found.names[place]]
                    return _encoded(next(decoded_frames(self.contents(key, names), found, [place])), "jpeg")
                case VideoView() if _is_clip(found):
                    content = self.contents(key, found.names[:1])[found.names[0]]
                    return Response(200, content, f"video/{_CLIPS[found.container, found.codec]}")
        except RecordError as error:
            raise NotFoundError(f"{kind} {indices[1]} of sample {indices[0]} is damaged: {error.detail}") from error
        raise NotFoundError(f"{kind} {indices[1]} of sample {indices[0]} has a format or size that is not shown")


def _is_clip(file: VideoView) -> bool:
    return (file.container, file.codec) in _CLIPS and file.bytes <= _MOST_CLIP


def in_groups(samples: Sequence[SampleView]) -> list[tuple[str, list[tuple[int, SampleView]]]]:
    """Samples with their index, the samples of a group together."""
    groups = groupby(enumerate(samples), lambda each: each[1].group or f"{each[0]} alone")
    return [(group, list(members)) for group, members in groups]


def number_in(query: Mapping[str, str], name: str, default: Any) -> Any:
    """A number of a query; the default for anything else, as the form and links have only numbers."""
    value = query.get(name, "")
    return max(int(value), default or 0) if value.isascii() and value.isdecimal() and len(value) < 16 else default


def index_in(text: str, count: int) -> int | None:
    """Read an index of a path; None if it is not below `count`."""
    is_index = text.isascii() and text.isdecimal() and len(text) < 16 and int(text) < count
    return int(text) if is_index else None


def index_below(text: str, count: int, what: str) -> int:
    """Read an index of a path. Raises NotFoundError if it is not below `count`."""
    if (index := index_in(text, count)) is None:
        raise NotFoundError(f"the {what} must be an index below {count:,}, got {text!r}")
    return index


def _image(data: bytes) -> Response:
    kind = _IMAGES.get(sniff_extension(data))
    return _encoded(load_image(MediaReference(data=data))) if kind is None else Response(200, data, f"image/{kind}")


def _encoded(image: Any, kind: str = "png") -> Response:
    out = io.BytesIO()
    image.save(out, kind)
    return Response(200, out.getvalue(), f"image/{kind}")
