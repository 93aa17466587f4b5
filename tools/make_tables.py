"""Write the tables of results in docs/ from their data files: `python tools/make_tables.py [--check]`.

- docs/trainers.md: tests/trainers/NAME/result.json, which `make test-trainers` writes.
- docs/isolation.md: energon_packed/integrations/isolation_table.json, which tools/isolation_table.py writes.
- docs/install.md: tools/install_sizes.json, which tools/install_sizes.py writes.
- docs/performance.md and docs/isolation.md: tools/gpu/PART.json, which tools/bench_gpu.py writes.
- docs/comparison.md and README.md: tools/compare/result.json, which tools/bench_compare.py writes.

The text between the markers of a table is replaced. With --check, pages are not written, and the exit status is 1 if
a page is out of date.
"""

import argparse
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COLUMNS = "trainer, versions, every sample, loss, gradient, SIGKILL and resume, uneven end, dropout after resume"
_ATTENTION = ("sdpa", "eager")
_RESULTS = {
    "clean": "No token of a sample changes the output of another sample.",
    "kernel": "Transformers raises an error without the kernel package in the table. Classes with `clean` were tested "
    "with it [on a GPU](#on-a-gpu).",
    "leaks": "`check_isolation` refuses the class.",
    "refuses": "The model does not accept packed rows.",
    "not tested": "No tiny model could be built or run on text alone; `check_isolation` tests your model.",
}

_EXTRAS = {
    "": "`lengths`, `pack`, `inspect`, `nv-meta`, `materialize`, `metadataset`; most checks of `verify`",
    "train": "loaders; `steps`, `order`, `state`, `inspect --tokens`, `verify` with all checks, the steps in `report`",
    "megatron": "Megatron-LM and Megatron-Bridge, with `train`",
    "transformers-train": "`Trainer` of Hugging Face, with `train`",
    "ray": "`pack --engine ray`, on [many nodes](many-nodes.md)",
    "report": "[`report`](inspect.md)",
    "video": "[video files](videos.md)",
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
    cells = [result["title"], versions or "torch " + result["versions"]["torch"], every, result["loss"]]
    return [*cells, result["gradient"], result["resume"], result["uneven"], result["dropout"]]


def families() -> str:
    """Render the results of all model classes on rows of text: a legend, and the table that the page can search."""
    table = _isolation()
    rows = sorted((row["model_type"], name, _result(row), row) for name, row in table["families"].items())
    counts = Counter(result for _, _, result, _ in rows)
    legend = _table(
        ["result", "meaning", "classes"], [[name, text, str(counts[name])] for name, text in _RESULTS.items()]
    )
    cells = [[f"`{kind}`", _detailed(result, row), f"`{name}`"] for kind, name, result, row in rows]
    listed = _table(["model type", "result", "class"], cells)
    head = f"Transformers {table['transformers']}: {len(rows)} classes."
    return f'{head}\n\n{legend}\n\n<div class="searchable" markdown>\n\n{listed}\n\n</div>'


def _result(row: dict[str, Any]) -> str:
    if "not_tested" in row:
        return "not tested"
    results = {row[name] for name in _ATTENTION if name in row}
    return next(name for name in ("leaks", "kernel", "refuses", "clean") if name in results)


def _detailed(result: str, row: dict[str, Any]) -> str:
    if result == "kernel":
        return f"kernel: `{row['needs']}`" + (", clean" if row.get("with_kernel") == "clean" else "")
    return result if "sdpa" in row or result == "not tested" else f"{result} (`eager` only)"


def images() -> str:
    """Render the results of the families with images."""
    rows = _isolation()["images"].values()
    cells = [
        [f"`{row['processor']}`", f"`{row['class']}`", *(row.get(a, "not tested") for a in _ATTENTION)] for row in rows
    ]
    return _table(["processor", "model", "attention `sdpa`", "`eager`"], cells)


def _gpu(part: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Return a line with the machine, and the tables of a part."""
    values = json.loads((ROOT / "tools" / "gpu" / f"{part}.json").read_text(encoding="utf-8"))
    machine = values["machine"]
    return f"{machine['device']}, torch {machine['torch']}, Transformers {machine['transformers']}", values["tables"]


def gpu_throughput() -> str:
    """Render training steps on a GPU; speeds are relative to padded batches with flash attention."""
    machine, tables = _gpu("throughput")
    rows = [row for row in tables["throughput"] if (row["batches"], row["attention"]) != ("padded", "sdpa")]
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


def gpu_isolation() -> str:
    """Render the families that were compared on a GPU: result, and difference of the gradients."""
    machine, tables = _gpu("isolation")
    rows = [row for row in tables["isolation"] if "attention" in row]
    columns = list(dict.fromkeys((row["attention"], row["dtype"]) for row in rows))
    found = {(row["family"], row["attention"], row["dtype"]): row for row in rows}
    cells = [
        [f"`{family}`", *(_gpu_cell(found.get((family, *column), {})) for column in columns)]
        for family in dict.fromkeys(row["family"] for row in rows)
    ]
    names = [f"`{attention}`, {dtype}" for attention, dtype in columns]
    return f"{machine}.\n\n{_table(['family', *names], cells)}"


def _gpu_cell(row: dict[str, Any]) -> str:
    detail = (
        f"{row['gradients']:.0e}" if "gradients" in row else row.get("reason") if row.get("result") == "leaks" else ""
    )
    return f"{row['result']}, {detail}" if detail else str(row.get("result", ""))


def gpu_families() -> str:
    """Render the results of all other families with flash attention on a GPU."""
    machine, tables = _gpu("families")
    rows = [row for row in tables["families"] if row.get("attention") == "flash_varlen"]
    names: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["family"]):
        names.setdefault(row["result"], []).append(f"`{row['family']}`")
    counts = {result: len(found) for result, found in names.items()}
    cells = [
        [result, str(counts[result]), ", ".join(found) if result in ("leaks", "clean") else ""]
        for result, found in sorted(names.items())
    ]
    return f"{machine}.\n\n{_table(['result with flash attention', 'classes', ''], cells)}"


def extras() -> str:
    """Render the use and the installed size of each extra."""
    file = ROOT / "tools" / "install_sizes.json"
    sizes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["extras"]
    cells = [
        [f"`{extra}`" if extra else "none", _EXTRAS[extra], f"{size['bytes'] / 1e6:,.0f} MB", str(size["packages"])]
        for extra, size in sizes.items()
    ]
    return _table(["extra", "needed for", "installed size", "packages"], cells)


def _lost(values: dict[str, Any], kind: str) -> str:
    bad = values["bad"][kind]
    others = f", {-bad['others']} others lost" if bad["others"] else ""
    return f"{bad['result']}{others}; {'a message' if bad['message'] else 'no message'}"


def _utilization(values: dict[str, Any]) -> str:
    return f"{values['utilization']:.1%}" if values["longest"] <= values["seq_len"] else "rows have no limit"


def _seconds(values: dict[str, Any], index: int, prefix: str = "") -> str:
    measured = values["preparation"][index]
    return f"{measured[prefix + 'wall']:.0f}, CPU {measured[prefix + 'cpu']:.0f}"


def _rate(values: dict[str, Any]) -> str:
    """Return the records of a second between the two measured numbers of records, without the time of a start."""
    less, more = values["preparation"]
    if values["streams"]:
        return "while training"
    return f"{(more['records'] - less['records']) / (more['wall'] - less['wall']):,.0f}"


_TIME, _RATE = "seconds until the first step", "conversations prepared per second"
_LOSS = "largest difference of a sample's loss"
_BAD = {"too long": "5 records that are too long", "no answer": "5 records without an answer"}
_BAD |= {"corrupt image": "5 corrupt images", "missing image": "5 missing images"}
# Rows of the comparison: name, and the cell of a tool.
_COMPARED: dict[str, Callable[[dict[str, Any]], str]] = {
    "versions": lambda values: ", ".join(f"{name} {number}" for name, number in values["versions"].items()),
    _TIME: functools.partial(_seconds, index=0),
    "the same with its caches": functools.partial(_seconds, index=0, prefix="warm_"),
    "the same with ten times the conversations": functools.partial(_seconds, index=1),
    _RATE: _rate,
    "peak memory, MiB": lambda values: f"{values['preparation'][1]['memory'] / 2**20:,.0f}",
    "tokens per second of training": lambda values: f"{values['tokens_per_second']:,.0f}",
    "rows, and steps of an epoch": lambda values: str(values["rows"]),
    "utilization": _utilization,
    "padding in the computed rows": lambda values: f"{values['padding']:.1%}",
    "longest row, tokens": lambda values: f"{values['longest']:,}",
    _LOSS: lambda values: f"{values['leakage']:.0e}",
    "records trained on completely": lambda values: f"{values['whole']} of {values['records']}",
    "resume from a checkpoint": lambda values: values["resume"],
    **{title: functools.partial(_lost, kind=kind) for kind, title in _BAD.items()},
}


def comparison(*, short: bool = False) -> str:
    """Render the comparison of packers, a table for each kind of data; `short`: some rows of the text."""
    file = ROOT / "tools" / "compare" / "result.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    parts = []
    for kind in ["text"] if short else ["text", "images"]:
        tools = {name: values for name, values in results[kind].items() if "rows" in values}
        if len({values["digest"] for values in tools.values()}) != 1:
            raise SystemExit(f"{file}: tools have trained on different records of {kind}. Run bench_compare.py again.")
        names = sorted(tools, key=lambda name: (not name.startswith("energon-packed"), name.lower()))
        if short:
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
        parts.append(_table(["" if short else kind, *names], cells))
        if not short:
            failed = {name: values["error"] for name, values in sorted(results[kind].items()) if "error" in values}
            parts += [f"{name}, {kind}: {error}" for name, error in failed.items()]
    return "\n\n".join(parts)


def _cell(cell: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> str:
    try:
        return cell(values)
    except KeyError:
        return "not measured"


def _isolation() -> dict[str, Any]:
    file = ROOT / "energon_packed" / "integrations" / "isolation_table.json"
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def _table(names: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


TABLES = {
    "results of trainers": ("trainers.md", trainers, "end of results"),
    "sizes of extras": ("install.md", extras, "end of sizes"),
    "images table": ("isolation.md", images, "end of images table"),
    "comparison": ("comparison.md", comparison, "end of comparison"),
    "short comparison": ("../README.md", functools.partial(comparison, short=True), "end of short comparison"),
    "training on a GPU": ("performance.md", gpu_throughput, "end of training on a GPU"),
    "isolation on a GPU": ("isolation.md", gpu_isolation, "end of isolation on a GPU"),
    "families on a GPU": ("isolation.md", gpu_families, "end of families on a GPU"),
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
