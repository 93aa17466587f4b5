"""Write the tables of measured results into the pages: `python tools/make_tables.py [--check]`.

| page | results | written by |
|---|---|---|
| docs/trainers.md | tests/trainers/NAME/result.json | `make test-trainers` |
| docs/install.md | tools/install_sizes.json | `python tools/install_sizes.py` |

The text between the markers of a page is replaced. With --check, no page is written, and the exit status is 1 if one
is out of date.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of results -->"
_COLUMNS = "trainer, versions, every sample, loss, gradient, SIGKILL and resume, uneven end, dropout after resume"


def row(result: dict[str, Any]) -> str:
    """Render the result of one trainer as a row of the table."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if name != "torch")
    every = "once, but for one pack" if result["uneven"] == "one pack twice" else "once"
    cells = [result["title"], versions or "torch " + result["versions"]["torch"], every, result["loss"]]
    cells += [result["gradient"], result["resume"], result["uneven"], result["dropout"]]
    return f"| {' | '.join(cells)} |"


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
"""Uses of the extras, in the order of the table."""


def sizes() -> str:
    """Render the installed size of each extra."""
    measured = json.loads((ROOT / "tools" / "install_sizes.json").read_text(encoding="utf-8"))["extras"]
    if measured.keys() != _EXTRAS.keys():
        raise SystemExit(f"_EXTRAS must have {sorted(measured)}, got {sorted(_EXTRAS)}. Describe every extra.")
    lines = ["| extra | needed for | installed size | packages |", "|---|---|---|---|"]
    for extra, use in _EXTRAS.items():
        size = f"{measured[extra]['bytes'] / 1e6:,.0f} MB"
        lines.append(f"| {f'`{extra}`' if extra else 'none'} | {use} | {size} | {measured[extra]['packages']} |")
    return "\n".join(lines)


def trainers() -> str:
    """Render the results of all trainers, in the order of their titles."""
    files = sorted((ROOT / "tests" / "trainers").glob("*/result.json"))
    results = [result for file in files for result in json.loads(file.read_text(encoding="utf-8")).values()]
    names = _COLUMNS.split(", ")
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*head, *sorted(map(row, results), key=str.lower)])


def main() -> int:
    """Rewrite or check the pages."""
    outdated = 0
    for name, start, table in (
        ("trainers.md", "<!-- results of trainers -->", trainers()),
        ("install.md", "<!-- sizes of extras -->", sizes()),
    ):
        page = ROOT / "docs" / name
        text = page.read_text(encoding="utf-8")
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(END)}", re.DOTALL)
        new, count = pattern.subn(lambda _, block=f"{start}\n\n{table}\n\n{END}": block, text)
        if count != 1:
            raise SystemExit(f"{page} must have one pair of markers for the results, got {count}.")
        if new != text and "--check" in sys.argv:
            print(f"{page} is out of date. Run python tools/make_tables.py.", file=sys.stderr)
            outdated = 1
        elif new != text:
            page.write_text(new, encoding="utf-8")
    return outdated


if __name__ == "__main__":
    sys.exit(main())
