"""Write the table of docs/trainers.md from the results of the tests: `python tools/make_tables.py [--check]`.

`make test-trainers` writes the results to tests/trainers/NAME/result.json. The text between the markers of
the page is replaced. With --check, the page is not written, and the exit status is 1 if it is out of date.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "trainers.md"
START, END = "<!-- results of trainers -->", "<!-- end of results -->"
_COLUMNS = "trainer, versions, every sample, loss, gradient, SIGKILL and resume, uneven end, dropout after resume"


def row(result: dict[str, Any]) -> str:
    """Render the result of one trainer as a row of the table."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if name != "torch")
    every = "once, but for one pack" if result["uneven"] == "one pack twice" else "once"
    cells = [result["title"], versions or "torch " + result["versions"]["torch"], every, result["loss"]]
    cells += [result["gradient"], result["resume"], result["uneven"], result["dropout"]]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Render the results of all trainers, in the order of their titles."""
    files = sorted((ROOT / "tests" / "trainers").glob("*/result.json"))
    results = [result for file in files for result in json.loads(file.read_text(encoding="utf-8")).values()]
    names = _COLUMNS.split(", ")
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*head, *sorted(map(row, results), key=str.lower)])


def main() -> int:
    """Rewrite or check the page."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    new, count = pattern.subn(lambda _: f"{START}\n\n{table()}\n\n{END}", text)
    if count != 1:
        raise SystemExit(f"{PAGE} must have one pair of markers for the results, got {count}.")
    if new != text and "--check" in sys.argv:
        print(f"{PAGE} is out of date. Run python tools/make_tables.py.", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
