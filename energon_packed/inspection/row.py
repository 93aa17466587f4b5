"""`row_html`: the samples of a row, with their tokens, in; the view of the row for a notebook out.

The view has the templates of `view` and `report`, in a frame without scripts, so that it and the notebook have their
own styles.
"""

from collections.abc import Sequence

from energon_packed.encoding import EncodedSample
from energon_packed.inspection.report import page_environment
from energon_packed.inspection.tokens import token_runs
from energon_packed.inspection.view import PackView, SampleView

_MOST = 64  # samples in the table


def row_html(name: str, samples: Sequence[EncodedSample], width: int) -> str:
    """Render a row: its tokens by kind, and a table of its samples.

    Args:
        name: heading.
        samples: samples of the row.
        width: tokens of the row, with padding.
    """
    views: list[SampleView] = []
    at = 0
    for sample in samples:
        runs = token_runs(sample.input_ids, sample.labels, sample)
        views.append(SampleView(id=sample.id, start=at, length=len(sample), runs=runs))
        at += len(sample)
    mapped = [PackView(key=name, samples=views)]
    rows = [
        (
            sample.id or "",
            view.start,
            view.length,
            view.tokens["supervised"],
            sum(view.tokens[kind] for kind in ("image", "video", "audio")),
            " ".join(filter(None, (sample.group, sample.role))),
        )
        for sample, view in zip(samples[:_MOST], views, strict=False)
    ]
    values = {"name": name, "mapped": mapped, "rows": rows, "width": max(width, at, 1), "samples": len(samples)}
    height = min(180 + 32 * len(rows), 480)
    return page_environment(None).get_template("row.html.j2").render(values, tokens=at, height=height)
