"""Charts as inline SVG that uses the colours of the page."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from energon_packed.errors import ConfigError

_TEXT, _BAR = "#010203", "#010204"  # placeholders, replaced by CSS colours


def histogram_svg(values: Sequence[float], xlabel: str, ylabel: str, *, log: bool = False, bins: int = 40) -> str:
    """Render a histogram.

    Args:
        values: values to count.
        xlabel, ylabel: axis labels.
        log: use logarithmic bins.
        bins: number of bins.
    """
    import numpy as np
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
        log = False
    edges = np.geomspace(max(low, 1), high, bins + 1) if log else np.linspace(low, high, bins + 1)
    counts, _ = np.histogram(values, edges)

    def draw(axes: Any) -> None:
        axes.stairs(counts, edges, fill=True, color=_BAR)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if log else "linear")
        if log:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    return _svg(draw)


def bars_svg(values: Mapping[str, float], xlabel: str) -> str:
    """Render a horizontal bar chart with one bar per name."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    def draw(axes: Any) -> None:
        bars = axes.barh(list(values), list(values.values()), color=_BAR)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values.values()], padding=4, color=_TEXT)
        axes.margins(x=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.invert_yaxis()
        axes.set(xlabel=xlabel)

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
        figure = Figure(figsize=(6, 2.6), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor").replace(_BAR, "var(--accent)")
    return text.replace("<svg ", '<svg role="img" ', 1)
