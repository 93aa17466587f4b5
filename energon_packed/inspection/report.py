"""Render a report: ReportData, the splits of a Metadataset or a Comparison in, one self-contained HTML page out.

The page needs no network, and its histograms are inline SVG in the colors of the page. Strings of the dataset are
untrusted: they are escaped, and a content security policy blocks every script but the script of the page.
"""

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.files import visible
from energon_packed.inspection.blend import BlendSplit
from energon_packed.inspection.compare import Rows
from energon_packed.inspection.report_data import MOST_SHOWN, ReportData, facts, splits, warnings
from energon_packed.inspection.tokens import KINDS
from energon_packed.inspection.view import PackView
from energon_packed.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

    from energon_packed.inspection.steps import ExpectedSteps  # needs Energon

Edges = npt.NDArray[np.float64]
"""Edges of the bins of a histogram, float64 (bins + 1,)."""
_TEXT, _BAR = "#010203", "#010204"  # matplotlib accepts no CSS variables: placeholders, replaced in the SVG
_ROW = 8  # height of a row of the map, in units of the SVG and pixels of the report
_FENCE = 3.0  # interquartile ranges below the first quartile: Tukey's outer fence, lower values are outliers
_MAX_TICKS = 6  # labels of an axis
_MAX_OUTLIERS = 5  # percent of the packs that the chart may leave out


def page_environment(base: str | None) -> "Environment":
    """Return the Jinja environment of all pages: strings are escaped, and control characters are shown as escapes.

    Args:
        base: start of the URLs of the pages of `view`, to which packs and samples are links; None for no links.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("energon_packed.inspection"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control and direction characters become escapes; jinja2 escapes HTML afterwards. Markup (not exactly `str`)
        # comes from the templates and stays as it is.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.globals |= {"row_height": _ROW, "base": base, "linked": base is not None, "map_paths": map_paths}
    environment.filters["number"] = _number
    environment.filters["each"] = lambda items, *columns: [[_cell(item, name) for name in columns] for item in items]
    environment.filters["percent"] = partial(_number, form=".2%")
    environment.filters["quoted"] = quoted
    return environment


def render_report(
    title: str,
    data: ReportData | None = None,
    *,
    blend: Sequence[BlendSplit] = (),
    steps: tuple[Sequence["ExpectedSteps"], Sequence[str]] = ((), ()),
    comparison: Mapping[str, Rows] | None = None,
    names: Sequence[str] = (),
    view: str | None = None,
) -> str:
    """Render the HTML page.

    Args:
        title: page heading.
        data: data of a dataset, or None for a Metadataset or a comparison.
        blend: splits of a Metadataset.
        steps: result of `steps_of_ranks`.
        comparison, names: differences of two datasets, and their paths.
        view: as `base` of `page_environment`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("reports require matplotlib. Run pip install 'energon-packed[report]'.") from error
    environment = page_environment(view)
    script, policy = script_and_policy(environment)
    functions = {"charts": _charts, "facts": facts, "splits": splits, "warnings": warnings, "most_shown": MOST_SHOWN}
    values = {"data": data, "blend": blend, "steps": steps, "comparison": comparison, "names": names, "hrefs": ()}
    parts = {"compare": comparison is not None, "blend": blend, "dataset": data is not None, "steps": any(steps)}
    page = {"title": title, "parts": parts, "policy": policy, "script": script, "version": __version__}
    return environment.get_template("report.html.j2").render(functions | page | values)


def quoted(name: str) -> str:
    """Escape a key or an id of the dataset for a link: all characters but letters, digits and `_.-~`."""
    return quote(name, safe="", errors="surrogateescape")


def _cell(item: Any, column: str) -> Any:
    """Return an attribute of an item, in the format after a colon; "?" for None."""
    name, _, form = column.partition(":")
    value = attrgetter(name)(item)
    return _number(value, form) if form else value


def _number(value: Any, form: str = ",.0f") -> str:
    return "?" if value is None else format(value, form)


def script_and_policy(environment: "Environment") -> tuple[str, str]:
    """Return the script of a page that contains it, and the Content-Security-Policy of this page."""
    assert environment.loader is not None
    script, _, _ = environment.loader.get_source(environment, "page.js")
    # Escaping is the first line of defence; the policy blocks all other scripts and all requests if it has a gap.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return script, (
        f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def _charts(data: ReportData) -> Iterator[tuple[str, str]]:
    """Draw the histograms: (caption, SVG)."""
    # A caption names the number of packs if not all packs were read.
    packs = data.measured
    seen = "" if len(packs) == data.packs else f", from {len(packs):,} of {data.packs:,} packs"
    lengths = [length for pack in packs for length in pack.lengths]
    images = [count for pack in packs for count in pack.images]
    if any(lengths):
        # Lengths of samples span several orders of magnitude.
        edges = log_integer_bins(lengths)
        yield f"Tokens per sample{seen}", histogram_svg(lengths, edges, "tokens", "samples", log=True)
    if any(lengths) and data.is_packed and not data.is_counted:
        used, outside = _zoomed([100 * pack.tokens / data.manifest.seq_len for pack in packs])
        caption = f"Pack utilization{seen}"
        if outside:
            caption += f"; {outside:,} pack{'' if outside == 1 else 's'} below {min(used):.4g}% not shown"
        yield caption, histogram_svg(used, even_bins(used), "% of seq_len", "packs")
    if packs and data.is_packed:
        counts = [len(pack.lengths) for pack in packs]
        yield f"Samples per pack{seen}", histogram_svg(counts, integer_bins(counts), "samples", "packs")
    if any(images):
        yield f"Images per sample{seen}", histogram_svg(images, integer_bins(images), "images", "samples")
    if data.image_sizes:
        pixels = [width * height / 1e6 for width, height in data.image_sizes]
        caption = f"Image sizes, from {len(pixels):,} of {data.manifest.images:,} images"
        yield caption, histogram_svg(pixels, even_bins(pixels), "megapixels (width x height / 1,000,000)", "images")
    if videos := data.videos:
        read = f", from {len(videos):,} of {data.manifest.videos:,} videos"
        frames = [len(video.indices) for video in videos]
        yield f"Frames per video{read}", histogram_svg(frames, integer_bins(frames), "selected frames", "videos")
        seconds = [video.num_frames / video.fps for video in videos if video.fps]
        if seconds:
            yield f"Seconds per video{read}", histogram_svg(seconds, even_bins(seconds), "seconds", "videos")
    if clips := data.audios:
        seconds = [clip.seconds for clip in clips]
        caption = f"Seconds per audio file, from {len(clips):,} of {data.manifest.audios:,} audio files"
        yield caption, histogram_svg(seconds, even_bins(seconds), "seconds", "audio files")


def _zoomed(used: Sequence[float]) -> tuple[list[float], int]:
    """Select the utilizations that the chart shows, and count the lower outliers."""
    # The last pack of a dataset is often nearly empty. It would stretch the axis, and all others would share one bin.
    quartile, third = np.percentile(used, (25, 75))
    low = min(quartile - _FENCE * (third - quartile), np.percentile(used, _MAX_OUTLIERS, method="lower"))
    inside = [value for value in used if value >= low]
    return inside, len(used) - len(inside)


def map_paths(mapped: Sequence[PackView], seq_len: int) -> dict[str, str]:
    """Draw the rows of the map as SVG paths: one path for each kind of token, or of sample if kinds are unknown.

    A token is one unit wide, and a row is `_ROW` units high.
    """
    # A rectangle for each run would make the page many times larger.
    paths: dict[str, list[str]] = {"free": []}
    known = any(sample.runs for pack in mapped for sample in pack.samples)
    paths |= {name: [] for name in (KINDS if known else ("text", "image", "video", "audio"))}
    for row, pack in enumerate(mapped):
        runs = [("free", 0, seq_len)]
        for sample in pack.samples:
            whole = "unknown" if known else sample.kind
            own = sample.runs or [(whole, 0, sample.length or 0)]
            runs += [(kind, (sample.start or 0) + first, count) for kind, first, count in own]
        for name, start, length in runs:
            shape = f"M{start} {row * _ROW}h{length}v{_ROW - 1}h-{length}z"
            paths.setdefault(name, []).append(shape)
    return {name: "".join(shapes) for name, shapes in paths.items()}


def integer_bins(values: Sequence[int]) -> Edges:
    """Divide the range of the integers into at most about 60 bins with the same number of integers each.

    Edges are halfway between integers, so that no integer lies on an edge.
    """
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // 60)
    return np.arange(low, high + width + 1, width, dtype=np.float64) - 0.5


def log_integer_bins(values: Sequence[int] | npt.NDArray[np.integer[Any]], limit: int = 40) -> Edges:
    """Divide the range of the integers into bins that grow with the value, with edges halfway between integers."""
    low, high = max(int(np.min(values)), 1), int(np.max(values))
    # Small integers round to the same edge, and `unique` merges these bins.
    return np.asarray(np.unique(np.geomspace(low, high + 1, limit + 1).round()) - 0.5)


def even_bins(values: Sequence[float]) -> Edges:
    """Divide the range of the values into 40 equal bins; equal values result in one bin around them."""
    return np.histogram_bin_edges(values, 1 if min(values) == max(values) else 40)


def histogram_svg(values: Sequence[float], edges: Edges, xlabel: str, ylabel: str, *, log: bool = False) -> str:
    """Render a histogram as an inline SVG. Equal values are one bar, with the value below it.

    Args:
        values: values to count.
        edges: edges of the bins.
        xlabel, ylabel: axis labels.
        log: use a logarithmic x axis if the edges span more than a factor of 4.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    counts, _ = np.histogram(values, edges)
    # A logarithmic axis over a small range would have hardly any labels.
    log = log and edges[-1] > 4 * edges[0]
    is_integer = all(float(value).is_integer() for value in values)
    settings = {
        "svg.fonttype": "none",  # text stays text, in the font of the page
        "svg.hashsalt": "energon-packed",  # ids that do not change between runs
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
    } | {name: _TEXT for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.4, 2.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        # Integers closer to each other than labels would be shown several times.
        is_short = is_integer and edges[-1] - edges[0] <= _MAX_TICKS
        integers: list[float] = (np.arange(np.ceil(edges[0]), edges[-1]) + 0).tolist() if is_short else []  # not -0
        if len(integers) == len(counts):  # bars of equal height would look like a single bar without gaps
            axes.bar(integers, counts, width=0.8, color=_BAR)
        else:
            axes.stairs(counts, edges, fill=True, color=_BAR)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if log else "linear")
        if is_constant := min(values) == max(values):
            axes.set_xlim(edges[0] - 2 * (edges[-1] - edges[0]), edges[-1] + 2 * (edges[-1] - edges[0]))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if is_constant or integers:
            axes.set_xticks([values[0]] if is_constant else integers)
        elif log:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(_MAX_TICKS, integer=is_integer))
        if log or is_integer or is_constant:
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if is_integer else "{x:g}"))
        else:
            axes.ticklabel_format(axis="x", useOffset=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor").replace(_BAR, "var(--accent)")
    return text.replace("<svg ", '<svg role="img" ', 1)
