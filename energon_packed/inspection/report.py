"""`render_report`: a self-contained HTML page about a dataset or a Metadataset. All data is escaped."""

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence

from energon_packed.inspection.blend import BlendEntry
from energon_packed.inspection.charts import bars_svg, histogram_svg, require_matplotlib
from energon_packed.inspection.report_data import ReportData
from energon_packed.version import __version__

_SCRIPT = """
const segment = document.querySelector("#segment");
for (const event of ["focusin", "pointerover"])
  document.querySelector(".map")?.addEventListener(event, (e) => {
    const title = e.target.querySelector("title");
    if (title) segment.textContent = title.textContent;
  });
for (const gallery of document.querySelectorAll("[data-pages]")) {
  const packs = [...gallery.querySelectorAll("details")];
  const size = 10, pages = Math.ceil(packs.length / size);
  const label = gallery.querySelector("output");
  let page = 0;
  const show = () => {
    packs.forEach((pack, i) => { pack.hidden = Math.floor(i / size) !== page; });
    label.textContent = `page ${page + 1} of ${pages}`;
  };
  for (const button of gallery.querySelectorAll("button"))
    button.addEventListener("click", () => {
      page = Math.min(pages - 1, Math.max(0, page + Number(button.value)));
      show();
    });
  show();
}
"""


def render_report(title: str, data: ReportData | None, blend: Sequence[BlendEntry] = ()) -> str:
    """Render the page.

    Args:
        title: page heading.
        data: data of one dataset, or None for a Metadataset only.
        blend: entries of a Metadataset.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    require_matplotlib()

    source = importlib.resources.files("energon_packed.inspection").joinpath("report.html.j2").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = lambda value: f"{value:,}"
    # Blocks all other scripts and all requests, regardless of record contents.
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return environment.from_string(source).render(
        title=title,
        data=data,
        blend=blend,
        charts=_charts(data) if data is not None else [],
        policy=policy,
        script=_SCRIPT,
        version=__version__,
    )


def _charts(data: ReportData) -> list[tuple[str, str]]:
    """(caption, SVG) of each chart."""
    charts = []
    seen = "" if data.measured == data.packs else f", from {data.measured:,} of {data.packs:,} packs"
    if any(data.lengths):
        charts.append((f"Tokens per sample{seen}", histogram_svg(data.lengths, "tokens", "samples", log=True)))
    if any(data.lengths) and data.is_packed:
        used = [100 * tokens / data.manifest.seq_len for tokens in data.pack_tokens]
        charts.append((f"Pack utilization{seen}", histogram_svg(used, "% of seq_len", "packs")))
    if data.is_packed:
        charts.append((f"Samples per pack{seen}", histogram_svg(data.pack_samples, "samples", "packs", bins=30)))
    if data.token_kinds:
        caption = f"Tokens by kind, from {data.encoded:,} of {data.packs:,} packs"
        charts.append((caption, bars_svg(data.token_kinds, "tokens")))
    return charts
