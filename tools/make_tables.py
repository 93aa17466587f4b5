"""Write the tables of results in docs/ from their data files: `python tools/make_tables.py [--check]`.

- docs/reliability.md: tests/trainers/NAME/result.json, which `make test-trainers` writes.
- docs/isolation.md: energon_packed/integrations/isolation_table.json, which tools/isolation_table.py writes.
- docs/vision-families.md: energon_packed/encoding/vision/vision_families.json, which tools/family_table.py writes.
- docs/index.md: tools/install_sizes.json, which tools/install_sizes.py writes.
- docs/isolation.md and docs/performance.md: tools/gpu/PART.json, which tools/bench_gpu.py writes.
- docs/comparison.md and README.md: tools/compare/result.json, which tools/bench_compare.py writes.

The text between the markers of a table is replaced. With --check, pages are not written, and the exit status is 1 if
a page is out of date.
"""

import argparse
import functools
import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COLUMNS = "trainer, versions, every sample, loss, gradient, SIGKILL and resume, uneven end, dropout after resume"
_ATTENTION = ("sdpa", "eager")
_EXTRAS = {
    "": "`lengths`, `pack`, `inspect`, `nv-meta`, `materialize`, `metadataset`; most checks of `verify`",
    "train": "loaders; `steps`, `order`, `state`, `inspect --tokens`, all of `verify` and `report`",
    "megatron": "Megatron-LM and Megatron-Bridge, with `train`",
    "transformers-train": "`Trainer` of Transformers, with `train`",
    "ray": "`pack --engine ray`, on [many nodes](many-nodes.md)",
    "report": "[`report`](inspect.md)",
    "video": "[video](videos.md) and [audio](audio.md) files",
    "s3": "[object stores](media.md#object-stores)",
}


def trainers() -> str:
    """Render the results of all trainers, in the order of their titles."""
    files = sorted((ROOT / "tests" / "trainers").glob("*/result.json"))
    results = [result for file in files for result in json.loads(file.read_text(encoding="utf-8")).values()]
    return _table(_COLUMNS.split(", "), sorted(map(_trainer, results), key=lambda cells: cells[0].lower()))


def _trainer(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if name != "torch")
    every = "once, but for one pack" if result["uneven"] == "one pack twice" else "once"
    title = result["title"].replace("](#", "](trainers.md#")  # harness: relative to docs/trainers.md
    cells = [title, versions or "torch " + result["versions"]["torch"], every, result["loss"]]
    return [*cells, result["gradient"], result["resume"], result["uneven"], result["dropout"]]


def families() -> str:
    """Render for each tested class the attention with which it keeps samples apart, and the logits of its loss."""
    table = _isolation()
    flash = _flash(table)
    cells = [
        [f"`{name}`", cell, row.get("loss_logits", "not tested")]
        for name, row in sorted(table["families"].items())
        if (cell := _clean(row, flash.get(name)))
    ]
    head = (
        f"Transformers {table['transformers']}: {len(cells)} classes. {len(table['families']) - len(cells)} other "
        "classes could not be tested with a tiny model."
    )
    listed = _narrow_table(["model class", "clean with", "logits of the loss"], cells)
    return f'{head}\n\n<div class="searchable" markdown>\n\n{listed}\n\n</div>'


def _flash(table: dict[str, Any]) -> dict[str, str]:
    """Return the results with flash attention on a GPU by class; they name families with images by model type."""
    classes = {row["model_type"]: name for name, row in table["families"].items() if row["kind"] == "vision"}
    rows = [*_gpu("families")[1]["families"], *_gpu("isolation")[1]["isolation"]]
    return {
        classes.get(row["family"], row["family"]): row["result"]
        for row in rows
        if row.get("attention") == "flash_varlen"
    }


def _clean(row: dict[str, Any], flash: str | None) -> str:
    """Return the cell of a class; empty if it was not tested."""
    results = {name: row.get("with_kernel") if row.get(name) == "kernel" else row.get(name) for name in _ATTENTION}
    results["flash"] = flash
    clean = ", ".join(name for name, result in results.items() if result == "clean")
    if clean:
        return f"{clean}; needs `{row['needs']}`" if "needs" in row else clean
    return next((result for result in ("leaks", "refuses") if result in results.values()), "")


def vision_families() -> str:
    """Render the results of the trial of every vision-language model type."""
    file = ROOT / "energon_packed" / "encoding" / "vision" / "vision_families.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["families"]
    order = ("packed", "one sample", "kernel", "refused", "wrong", "not tested")
    cells = [
        [
            f"`{row['model_type']}`",
            row["processor"] and f"`{row['processor']}`",
            row["result"],
            _plain(row["reason"]),
            _plain(row.get("video", "not tested")),
            _plain(row.get("audio", "none")),
        ]
        for row in sorted(rows, key=lambda row: order.index(row["result"]))
    ]
    return _table(["model type", "processor", "result", "reason", "videos", "audio"], cells)


def _plain(text: str) -> str:
    """Text of a cell as it is, without marks of Markdown and HTML, such as `<image>`."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("_", "\\_").replace("*", "\\*")


def _gpu(part: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Return a line with the machine, and the tables of a part."""
    values = json.loads((ROOT / "tools" / "gpu" / f"{part}.json").read_text(encoding="utf-8"))
    machine = values["machine"]
    return f"{machine['device']}, torch {machine['torch']}, Transformers {machine['transformers']}", values["tables"]


def gpu_throughput() -> str:
    """Render training steps with all logits on a GPU; speeds are relative to padded batches with flash attention."""
    machine, tables = _gpu("throughput")
    shown = {("packed", "flash_varlen"), ("packed", "sdpa"), ("packed", "flex_attention"), ("padded", "flash_varlen")}
    rows = [row for row in tables["throughput"] if (row["batches"], row["attention"]) in shown]
    cells = []
    for row in rows:
        first = [f"{row['row']:,}", row["batches"], f"`{row['attention']}`"]
        speed = row.get("tokens per second")
        if not speed:
            cells.append([*first, row["result"], "", "", ""])
            continue
        padded = next(
            (r for r in rows if (r["row"], r["batches"], r["attention"]) == (row["row"], "padded", "flash_varlen")), {}
        )
        ratio = f"{speed / padded['tokens per second']:.2f}" if "tokens per second" in padded else ""
        cells.append([*first, f"{speed:,.0f}", ratio, f"{row['MFU']:.1%}", f"{row['memory, GiB']:.1f}"])
    names = ["row", "batches", "attention", "useful tokens per second", "compared with padded", "MFU", "memory, GiB"]
    peak = tables["peak"][0]["matrix product, TFLOP/s"]
    return f"{machine}; a matrix product runs at {peak:.0f} TFLOP/s.\n\n{_table(names, cells)}"


def extras() -> str:
    """Render the use and the installed size of each extra."""
    file = ROOT / "tools" / "install_sizes.json"
    sizes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["extras"]
    cells = [
        [f"`{extra}`" if extra else "none", _EXTRAS[extra], f"{size['bytes'] / 1e6:,.0f} MB"]
        for extra, size in sizes.items()
    ]
    return _table(["extra", "needed for", "installed size"], cells)


def _lost(values: dict[str, Any], kind: str) -> str:
    bad = values["bad"][kind]
    others = f", {-bad['others']} others lost" if bad["others"] else ""
    return f"{bad['result']}{others}; {'a message' if bad['message'] else 'no message'}"


def _utilization(values: dict[str, Any]) -> str:
    return f"{values['utilization']:.1%}" if values["longest"] <= values["seq_len"] else "rows have no limit"


def _seconds(values: dict[str, Any], index: int, prefix: str = "") -> str:
    measured = values["preparation"][index]
    return f"{measured[prefix + 'wall']:.0f} ({measured[prefix + 'cpu']:.0f})"


def _rate(values: dict[str, Any]) -> str:
    """Return the records of a second between the two measured numbers of records, without the time of a start."""
    less, more = values["preparation"]
    if values["streams"]:
        return "while training"
    return f"{(more['records'] - less['records']) / (more['wall'] - less['wall']):,.0f}"


_NOT_MEASURED = "not measured"
_TIME, _RATE = "seconds until the first step (CPU)", "conversations prepared per second"
_LOSS = "largest difference of a sample's loss"
_BAD = {"too long": "5 records that are too long", "no answer": "5 records without an answer"}
_BAD |= {"corrupt image": "5 corrupt images", "missing image": "5 missing images"}
# Rows of the comparison: name, and the cell of a tool.
_COMPARED: dict[str, Callable[[dict[str, Any]], str]] = {
    _TIME: functools.partial(_seconds, index=0),
    "the same, started again": functools.partial(_seconds, index=0, prefix="warm_"),
    "the same with ten times the conversations": functools.partial(_seconds, index=1),
    _RATE: _rate,
    "peak memory, MiB": lambda values: f"{values['preparation'][1]['memory'] / 2**20:,.0f}",
    "tokens per second of training steps": lambda values: f"{values['tokens_per_second']:,.0f}",
    "the same, with the optimizer and reading": lambda values: f"{values['tokens_per_second_read']:,.0f}",
    "peak memory of a training step, MiB": lambda values: f"{values['step_memory'] / 2**20:,.0f}",
    "utilization": _utilization,
    _LOSS: lambda values: f"{values['leakage']:.0e}",
    "resume from a checkpoint": lambda values: values["resume"],
    **{title: functools.partial(_lost, kind=kind) for kind, title in _BAD.items()},
}


def comparison(*, short: bool = False) -> str:
    """Render the comparison of packers, a table for each kind of data; `short`: some rows of the text."""
    file = ROOT / "tools" / "compare" / "result.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    parts, versions = [], set[str]()
    for kind in ["text"] if short else ["text", "images"]:
        tools = {name: values for name, values in results[kind].items() if "rows" in values}
        if len({values["digest"] for values in tools.values()}) != 1:
            raise SystemExit(f"{file}: tools have trained on different records of {kind}. Run bench_compare.py again.")
        names = sorted(tools, key=lambda name: (name != "energon-packed", name.lower()))
        names = [name for name in names if name != "energon-packed, stored tokens"]
        bad = {
            title for name, title in _BAD.items() if any(name in values.get("bad", ()) for values in tools.values())
        }
        short_rows = {_TIME, _RATE, "utilization", _LOSS, _BAD["too long"]}
        wanted = short_rows if short else {*_COMPARED} - {*_BAD.values()} | bad
        cells = [
            [title, *(_cell(cell, tools[name]) for name in names)]
            for title, cell in _COMPARED.items()
            if title in wanted
        ]
        cells = [row for row in cells if {*row[1:]} != {_NOT_MEASURED}]
        parts.append(_table(["" if short else kind, *names], cells))
        failed = sorted(name for name, values in results[kind].items() if "error" in values)
        if failed and not short:
            parts.append(f"Errors with {kind}: {', '.join(failed)}.")
        versions |= {", ".join(" ".join(pair) for pair in tools[name]["versions"].items()) for name in names}
    return "\n\n".join(parts if short else [*parts, f"Versions: {'; '.join(sorted(versions, key=str.lower))}."])


def _cell(cell: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> str:
    try:
        return cell(values)
    except KeyError:
        return _NOT_MEASURED


def _isolation() -> dict[str, Any]:
    file = ROOT / "energon_packed" / "integrations" / "isolation_table.json"
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def _table(names: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _narrow_table(names: list[str], rows: list[list[str]]) -> str:
    """Return a long table of few columns, without the outer bars."""
    return "\n".join(" | ".join(row) for row in [names, ["---"] * len(names), *rows])


TABLES = {
    "results of trainers": ("reliability.md", trainers, "end of results"),
    "sizes of extras": ("index.md", extras, "end of sizes"),
    "families table": ("vision-families.md", vision_families, "end of families table"),
    "comparison": ("comparison.md", comparison, "end of comparison"),
    "short comparison": ("../README.md", functools.partial(comparison, short=True), "end of short comparison"),
    "training on a GPU": ("performance.md", gpu_throughput, "end of training on a GPU"),
    "isolation table": ("isolation.md", families, "end of isolation table"),
}


def write_pages(*, check: bool = False) -> int:
    """Write the tables into the pages, or compare them; return the exit status."""
    status = 0
    for name, (page, render, end) in TABLES.items():
        path = ROOT / "docs" / page
        text = path.read_text(encoding="utf-8")
        start, end = f"<!-- {name} -->", f"<!-- {end} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        replacement = f"{start}\n\n{render()}\n\n{end}"
        new, count = pattern.subn(replacement.replace("\\", "\\\\"), text)
        if count != 1:
            raise SystemExit(f"{path} must have one pair of markers for the {name}, got {count}.")
        if new != text and check:
            print(f"{path} is out of date. Run python tools/make_tables.py.", file=sys.stderr)
            status = 1
        elif new != text:
            path.write_text(new, encoding="utf-8")
    return status


def main() -> int:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    return write_pages(check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
