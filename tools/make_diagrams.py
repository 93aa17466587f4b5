"""Write the diagrams of docs/images: `python tools/make_diagrams.py [--check]`.

Each diagram is an SVG of at most 480 x N pixels, which is readable at the width of a phone. Pages include the file in
the HTML, so that the colors follow the theme of the site; elsewhere they follow the light or dark mode of the browser.
What a diagram states about the code (positions, labels, boundaries, packs, orders) is computed with the package.
With --check, files are not written, and the exit status is 1 if one is out of date.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed import EncodedSample, PaddingFreeCollator, pack_lengths
from energon_packed.loading.datasets.map_data import map_data
from energon_packed.loading.order import Order, Segment

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 480
_STYLE = """
.d-text { fill: var(--md-default-fg-color, #1f2328); font: 14px system-ui, sans-serif; text-anchor: middle }
.d-code { font: 13px ui-monospace, monospace }
.d-note { fill: var(--md-default-fg-color--light, #59636e); font-size: 12px }
.d-left { text-anchor: start } .d-bold { font-weight: 600 } .d-dark { fill: #1f2328 } .d-pale { opacity: .65 }
.d-box { fill: none; stroke: var(--md-default-fg-color--light, #59636e) }
.d-line { fill: none; stroke: var(--md-default-fg-color--light, #59636e); stroke-width: 1.5 }
.d-line.d-cut { stroke: #e5534b; stroke-width: 2 } .d-dash { stroke-dasharray: 4 4 }
.d-0 { fill: #a8d0f5 } .d-1 { fill: #fbd38d } .d-2 { fill: #b5e3b5 } .d-3 { fill: #e3c5f0 } .d-4 { fill: #f5bcbc }
@media (prefers-color-scheme: dark) {
  .d-text { fill: var(--md-default-fg-color, #e6edf3) } .d-text.d-dark { fill: #1f2328 }
  .d-note { fill: var(--md-default-fg-color--light, #9198a1) }
  .d-box, .d-line { stroke: var(--md-default-fg-color--light, #9198a1) }
}
"""


class Drawing:
    """Shapes with coordinates in pixels; `svg` returns the file."""

    def __init__(self, name: str, title: str, height: float) -> None:
        self._name, self._title, self._height = name, title, height
        self._shapes: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write a line of text around x, or from x on if `kind` has `d-left`; y is the middle of the line."""
        classes = f"d-text {kind}".strip()
        self._shapes.append(f'<text class="{classes}" x="{x:g}" y="{y + 5:g}">{escape(text, quote=False)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, kind: str = "d-box", title: str = "") -> None:
        """Draw a rectangle from its corner; `title` is shown by the pointer."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        shown = f"<title>{escape(title)}</title>" if title else ""
        self._shapes.append(f'<rect class="{kind}" {size} rx="3">{shown}</rect>')

    def box(self, x: float, y: float, width: float, lines: Sequence[str], kind: str = "d-box") -> float:
        """Draw a box of lines, the first in bold type, and return its bottom."""
        height = 14 + 18 * len(lines)
        self.rectangle(x, y, width, height, kind)
        for number, line in enumerate(lines):
            style = "d-bold" if number == 0 else "d-note"
            self.text(x + width / 2, y + 16 + 18 * number, line, style)
        return y + height

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow through these points."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self._shapes.append(f'<path class="d-line" marker-end="url(#d-{self._name})" d="{path}"/>')

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str = "") -> None:
        """Draw a line."""
        path = f"M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}"
        self._shapes.append(f'<path class="{f"d-line {kind}".strip()}" d="{path}"/>')

    def svg(self) -> str:
        """Return the file."""
        marker = (
            f'<defs><marker id="d-{self._name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="d-line" d="M1 1 L7 4 L1 7"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height:g}" width="{WIDTH}" '
            f'role="img" aria-label="{escape(self._title)}" style="max-width:100%;height:auto">'
        )
        style = f"<style>{_STYLE}</style>"
        return "\n".join([head, f"<title>{escape(self._title)}</title>", style, marker, *self._shapes, "</svg>", ""])


def record() -> Drawing:
    """Draw the path of a record from a file to a batch."""
    offline = [
        (["records", "jsonl, parquet, arrow, tar, ..."], "record format"),
        (["Conversation", "one form for all records"], "encoder"),
        (["length", "tokens of each sample"], "planner: all lengths at once"),
        (["plan", "samples of each pack"], "write"),
        (["shards", "tars and .nv-meta"], ""),
    ]
    training = [
        (["packs", "order of the epoch"], "read"),
        (["samples", "text and image bytes"], "the same encoder"),
        (["EncodedSample", "tokens, labels, pixels"], "collator"),
        (["one row", "samples side by side"], "framework"),
        (["PackedBatch", "input_ids, labels, position_ids,", "cu_seqlens, pixel_values"], ""),
    ]
    drawing = Drawing("record", "The path of a record: packed offline, then read in training", 470)
    width, columns = 208, (8.0, WIDTH - 8 - 208.0)
    bottoms, tops = [], []
    for x, head, boxes in ((columns[0], "offline", offline), (columns[1], "training", training)):
        drawing.text(x + width / 2, 12, head, "d-note")
        y = 28.0
        tops.append(y)
        for lines, step in boxes:
            bottom = drawing.box(x, y, width, lines)
            if step:
                drawing.arrow((x + 24, bottom), (x + 24, bottom + 38))
                drawing.text(x + 34, bottom + 18, step, "d-note d-left")
                y = bottom + 40
        bottoms.append(bottom)
    middle = WIDTH / 2
    edge = bottoms[0] - 25
    start, end = (columns[0] + width, edge), (columns[1] - 2, tops[1] + 25)
    drawing.arrow(start, (middle, edge), (middle, end[1]), end)
    return drawing


def row() -> Drawing:
    """Draw a row of three samples, as the collator makes it."""
    words = [["user:", "Who?", "Ann", "."], ["user:", "2+2", "4"], ["user:", "Hi", "Hello", "!"]]
    prompts = (2, 2, 2)
    samples, start = [], 0
    for sample, prompt in zip(words, prompts, strict=True):
        ids = np.arange(start, start + len(sample))
        samples.append(EncodedSample(input_ids=ids, labels=np.where(np.arange(len(sample)) < prompt, -100, ids)))
        start += len(sample)
    batch = PaddingFreeCollator().collate(samples)
    tokens = [word for sample in words for word in sample]
    boundaries = batch.cu_seqlens.tolist()
    sample_of = np.repeat(np.arange(len(words)), np.diff(boundaries))
    drawing = Drawing("row", "A row of three samples: tokens, positions, labels and boundaries", 232)
    left, cell, height = 8, (WIDTH - 16) / len(tokens), 28
    rows: list[tuple[str, list[str]]] = [
        ("input_ids (shown as text)", tokens),
        ("position_ids", [str(value) for value in batch.position_ids[0].tolist()]),
        ("labels (-100: not supervised)", ["-100" if v == -100 else tokens[v] for v in batch.labels[0].tolist()]),
    ]
    for number, (name, values) in enumerate(rows):
        top = 24 + number * 60
        drawing.text(left, top - 12, name, "d-note d-left")
        for column, value in enumerate(values):
            is_pale = value == "-100"
            drawing.rectangle(
                left + column * cell, top, cell - 2, height, f"d-{sample_of[column]}" + " d-pale" * is_pale
            )
            drawing.text(left + column * cell + cell / 2 - 1, top + height / 2, value, "d-dark")
    for boundary in boundaries:
        x = min(max(left + boundary * cell - 1, left), WIDTH - 9)
        for number in range(len(rows)):
            drawing.line((x, 20 + number * 60), (x, 56 + number * 60), "d-cut")
        drawing.text(x, 196, str(boundary), "d-code")
    drawing.text(
        left, 218, "cu_seqlens: a token attends to earlier tokens between the same two lines", "d-note d-left"
    )
    return drawing


def planner() -> Drawing:
    """Draw lengths in the order of the file, and the packs of the planner."""
    lengths = [700, 320, 560, 900, 410, 130, 640, 260, 380, 820, 200, 450, 570, 120, 310, 240]
    capacity = 1024
    plan = pack_lengths(np.array(lengths), capacity)
    packs = list(plan)
    scale, bar, left = (WIDTH - 16) / capacity, 20, 8
    drawing = Drawing(
        "planner",
        "Samples of different lengths, and the packs that the planner makes",
        60 + (len(lengths) + len(packs)) * (bar + 4) + 44,
    )
    drawing.text(
        left,
        12,
        f"{len(lengths)} samples, in the order of the file; the line is seq_len = {capacity:,}",
        "d-note d-left",
    )
    y = 26.0
    for index, length in enumerate(lengths):
        _bar(drawing, left, y, length, index, scale, bar)
        y += bar + 4
    middle = y
    y += 36
    drawing.text(
        left,
        y - 12,
        f"{len(packs)} packs: {plan.utilization:.1%} of the tokens of their rows are used",
        "d-note d-left",
    )
    first = y
    for members in packs:
        x = float(left)
        for index in members.tolist():
            _bar(drawing, x, y, lengths[index], index, scale, bar)
            x += lengths[index] * scale
        y += bar + 4
    drawing.line((left + capacity * scale, 22), (left + capacity * scale, middle), "d-dash")
    drawing.line((left + capacity * scale, first - 4), (left + capacity * scale, y), "d-cut")
    return drawing


def _bar(drawing: Drawing, x: float, y: float, length: int, index: int, scale: float, height: float) -> None:
    drawing.rectangle(x, y, length * scale - 2, height, f"d-{index % 5}", f"sample {index}: {length} tokens")
    drawing.text(x + length * scale / 2 - 1, y + height / 2, str(length), "d-dark")


def resume() -> Drawing:
    """Draw the steps of an epoch that is killed and resumed with more ranks."""
    order = Order(map_data(range(12)))
    first = order.segment(2, 1)
    second = first.continued(2, order.segment(3, 1))
    packs = order.items(range(12), 0, 0, [first]).tolist()
    assert order.items(range(12), 0, 0, [first, second]).tolist() == packs
    drawing = Drawing("resume", "An epoch of 12 packs: 2 ranks, a kill, and a restart with 3 ranks", 318)
    left, cell = 8.0, (WIDTH - 16) / len(packs)
    drawing.text(left, 12, "the order of the epoch, computed from seed and epoch: 12 packs", "d-note d-left")
    for place, pack in enumerate(packs):
        _pack(drawing, left + place * cell, 24, pack, cell, "d-box")
    drawing.text(left, 84, "first run, 2 ranks: 4 steps, then it is killed", "d-note d-left")
    _run(drawing, order, [first], range(4), 96, cell)
    drawing.line((left + 8 * cell, 90), (left + 8 * cell, 146), "d-cut")
    drawing.text(left + 8 * cell + 8, 110, "killed", "d-note d-left")
    drawing.line((left + 4 * cell - 1, 92), (left + 4 * cell - 1, 146), "d-dash")
    drawing.text(left, 166, "the dashed line is the last checkpoint: loader state (epoch 0, step 2)", "d-note d-left")
    drawing.text(left, 200, "second run, 3 ranks", "d-note d-left")
    _run(drawing, order, [first, second], range(2, 5), 186, cell)
    for rank in range(3):
        drawing.rectangle(left + rank * 90, 262, 18, 18, f"d-{rank}")
        drawing.text(left + rank * 90 + 26, 271, f"rank {rank}", "d-note d-left")
    drawing.text(left, 300, "every pack counts once: steps 2 and 3 of the first run are lost with it", "d-note d-left")
    return drawing


def _run(
    drawing: Drawing, order: Order, segments: Sequence[Segment], steps: Iterable[int], y: float, cell: float
) -> None:
    """Draw the packs of each rank at their places in the order of the epoch."""
    layout = segments[-1]
    for step in steps:
        for rank in range(layout.ranks):
            for place in order.places(layout, step, rank):
                (pack,) = order.numbers([place], 0, 0, segments)
                _pack(drawing, 8 + place * cell, y, pack, cell, f"d-{rank}")
        middle = layout.first_item(step) + min(layout.ranks, len(order) - layout.first_item(step)) / 2
        drawing.text(8 + middle * cell, y + 44, f"step {step}", "d-note")


def _pack(drawing: Drawing, x: float, y: float, pack: int, cell: float, kind: str) -> None:
    drawing.rectangle(x, y, cell - 2, 30, kind)
    drawing.text(x + cell / 2 - 1, y + 15, str(pack), "" if kind == "d-box" else "d-dark")


def nodes() -> Drawing:
    """Draw the two ways to pack on several nodes."""
    drawing = Drawing("nodes", "Two ways to pack on several nodes", 380)
    third = (WIDTH - 16) / 3
    drawing.text(8, 12, "--engine ray: one plan over all nodes, one dataset", "d-left d-bold")
    for node in range(3):
        x = 8 + node * third
        drawing.box(x + 4, 28, third - 8, [f"node {node}", "measures"])
        drawing.arrow((x + third / 2, 78), (x + third / 2, 92))
        drawing.arrow((x + third / 2, 128), (x + third / 2, 142))
        drawing.box(x + 4, 144, third - 8, [f"node {node}", "writes shards"])
    drawing.box(12, 94, WIDTH - 24, ["one plan over all lengths"])
    drawing.line((8, 212), (WIDTH - 8, 212), "d-dash")
    drawing.text(8, 232, "--part I/N: one dataset per input part, blended", "d-left d-bold")
    for node in range(3):
        x = 8 + node * third
        drawing.box(x + 4, 248, third - 8, [f"part {node}/3", "measure, plan, write"])
        drawing.arrow((x + third / 2, 298), (x + third / 2, 316))
    drawing.box(12, 318, WIDTH - 24, ["Metadataset", "weights by samples, packs or tokens"])
    return drawing


def main() -> int:
    """Write or check all diagrams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a diagram is out of date")
    check = parser.parse_args().check
    stale = []
    for draw in (record, row, planner, resume, nodes):
        file = FOLDER / f"{draw.__name__}.svg"
        text = draw().svg()
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file.name)
    if stale:
        print(f"Out of date in docs/images: {', '.join(stale)}. Run python tools/make_diagrams.py.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
