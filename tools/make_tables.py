"""Write the tables of results in docs/ from their data files: `python tools/make_tables.py [--check]`.

- docs/trainers.md: tests/trainers/NAME/result.json, which `make test-trainers` writes.
- docs/isolation.md: energon_packed/integrations/isolation_table.json, which tools/isolation_table.py writes.
- docs/install.md: tools/install_sizes.json, which tools/install_sizes.py writes.

The text between the markers of a table is replaced. With --check, pages are not written, and the exit status is 1 if
a page is out of date.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COLUMNS = "trainer, versions, every sample, loss, gradient, SIGKILL and resume, uneven end, dropout after resume"
_ATTENTION = ("sdpa", "eager")
_RESULTS = {
    "clean": "No token of a sample changes the output of another sample.",
    "kernel": "Transformers raises an error without the kernel package in the table; not tested with it.",
    "leaks": "`check_isolation` refuses the class.",
    "refuses": "The model does not accept packed rows.",
    "not tested": "No tiny model could be built or run on text alone; `check_isolation` tests your model.",
}

_EXTRAS = {
    "": "`lengths`, `pack`, `inspect`, `nv-meta`, `materialize`, `metadataset`; most checks of `verify`",
    "train": "loaders; `steps`, `order`, `inspect --tokens`, `verify` with all checks",
    "megatron": "Megatron-LM and Megatron-Bridge, with `train`",
    "transformers-train": "`Trainer` of Hugging Face, with `train`",
    "ray": "`pack --engine ray`, on [many nodes](many-nodes.md)",
    "report": "[`report`](inspect.md)",
    "video": "[video files](videos.md)",
    "s3": "[object stores](object-storage.md)",
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
        return f"kernel: `{row['needs']}`"
    return result if "sdpa" in row or result == "not tested" else f"{result} (`eager` only)"


def images() -> str:
    """Render the results of the families with images."""
    rows = _isolation()["images"].values()
    cells = [
        [f"`{row['processor']}`", f"`{row['class']}`", *(row.get(a, "not tested") for a in _ATTENTION)] for row in rows
    ]
    return _table(["processor", "model", "attention `sdpa`", "`eager`"], cells)


def extras() -> str:
    """Render the use and the installed size of each extra."""
    file = ROOT / "tools" / "install_sizes.json"
    sizes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["extras"]
    cells = [
        [f"`{extra}`" if extra else "none", _EXTRAS[extra], f"{size['bytes'] / 1e6:,.0f} MB", str(size["packages"])]
        for extra, size in sizes.items()
    ]
    return _table(["extra", "needed for", "installed size", "packages"], cells)


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
    "isolation table": ("isolation.md", families, "end of isolation table"),
}


def main(arguments: list[str]) -> int:
    """Rewrite or check the pages."""
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
        if new != text and "--check" in arguments:
            print(f"{path} is out of date. Run python tools/make_tables.py.", file=sys.stderr)
            status = 1
        elif new != text:
            path.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
