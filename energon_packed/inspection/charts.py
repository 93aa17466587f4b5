"""Histograms as inline SVG that use the colours of the page."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError

_TEXT, _BAR = "#010203", "#010204"  # placeholders, replaced by CSS colours
Edges = npt.NDArray[np.float64]


def integer_bins(values: Sequence[int], most: int = 60) -> Edges:
    """Edges of equal bins that each hold the same number of integers: one, where `most` bins are enough.

    Edges lie halfway between integers, so that no integer is on one.
    """
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // most)
    return np.arange(low, high + width + 1, width, dtype=np.float64) - 0.5


def log_integer_bins(values: Sequence[int] | npt.NDArray[np.integer[Any]], most: int = 40) -> Edges:
    """Edges of bins that grow with the value, each a whole number of integers wide; edges as in `integer_bins`."""
    low, high = max(min(values), 1), max(values)
    return np.asarray(np.unique(np.geomspace(low, high + 1, most + 1).round()) - 0.5)


def even_bins(values: Sequence[float], most: int = 40) -> Edges:
    """Edges of bins between the lowest and the highest value; one bin around them where they are equal."""
    low, high = min(values), max(values)
    if low == high:
        half = abs(low) * 0.01 or 0.5
        return np.array([low - half, high + half])
    return np.linspace(low, high, most + 1)


def histogram_svg(values: Sequence[float], edges: Edges, xlabel: str, ylabel: str, *, log: bool = False) -> str:
    """Render a histogram.

    Args:
        values: values to count.
        edges: float64 (bins + 1,), of the bins.
        xlabel, ylabel: axis labels.
        log: logarithmic x axis.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    counts, _ = np.histogram(values, edges)
    log = log and edges[-1] > 4 * edges[0]
    is_integer = all(float(value).is_integer() for value in values)

    def draw(axes: Any) -> None:
        axes.stairs(counts, edges, fill=True, color=_BAR)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if log else "linear")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if log:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=is_integer))
        if log or is_integer:
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if is_integer else "{x:g}"))
        else:
            axes.ticklabel_format(axis="x", useOffset=False)

    return _svg(draw)


def require_matplotlib() -> None:
    """Raise ConfigError with the install command if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("reports require matplotlib; run pip install 'energon-packed[report]'") from error


def _svg(draw: Any) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "energon-packed",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
    } | {name: _TEXT for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.4, 2.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor").replace(_BAR, "var(--accent)")
    return text.replace("<svg ", '<svg role="img" ', 1)
