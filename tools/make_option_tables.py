"""Write the option tables of docs/ from the declared options: `python tools/make_option_tables.py [--check]`.

The text between `<!-- options of NAME -->` and `<!-- end of options -->` is replaced. With --check, pages are not
written, and the exit status is 1 if a page is out of date.
"""

import argparse
import re
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed import PackOptions
from energon_packed.options import Declaration, declared
from energon_packed.pipeline.survey import LengthsOptions

ROOT = Path(__file__).resolve().parents[1]
TABLES: dict[str, tuple[str, type[Any]]] = {
    "pack": ("command-line.md", PackOptions),
    "lengths": ("command-line.md", LengthsOptions),
}
_GROUPS = ("Input", "Tokens", "Images", "Videos", "Audio", "Packing", "Output", "Run")


def table(cls: type[Any]) -> str:
    """Render the options of a class as Markdown tables, one per group; options that `pack` has too are only listed."""
    known = {} if cls is PackOptions else {option.name: _row(option) for option in declared(PackOptions)}
    options = [option for option in declared(cls) if option.flags]
    shared = [option for option in options if known.get(option.name) == _row(option)]
    others = [option for option in options if option not in shared]
    others.sort(key=lambda option: _GROUPS.index(option.group))
    parts = [f"As in `pack`: {', '.join(_code(option.flags[0]) for option in shared)}."] if shared else []
    for group, members in groupby(others, key=lambda option: option.group):
        head = f"**{group}**\n\n| option | name in Python and `--config` | default | meaning |\n|---|---|---|---|"
        parts.append("\n".join([head, *map(_row, members)]))
    return "\n\n".join(parts)


def _row(option: Declaration) -> str:
    return f"| {_flags(option)} | `{option.name}` | {_default(option)} | {_meaning(option)} |"


def _flags(option: Declaration) -> str:
    flags = [flag for pair in option.flags for flag in pair.split("/")]
    value = "" if option.is_flag else f" {option.metavar or {int: 'N', float: 'X'}.get(option.kind, 'NAME')}"
    text = ", ".join(_code(f"{flag}{value}") for flag in flags)
    return f"`INPUT...`, {text}" if option.name == "inputs" else text


def _code(text: str) -> str:
    # GitHub needs \| in a table and shows |, Python-Markdown shows both characters.
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _default(option: Declaration) -> str:
    if option.is_required:
        return "required"
    if option.is_flag:
        return "on" if option.default and option.name in option.flags[0] else "off"
    if option.shown_default is not None:
        return option.shown_default
    return "" if option.default is None else f"`{option.default}`"


def _meaning(option: Declaration) -> str:
    valid = f" One of {', '.join(f'`{value}`' for value in option.valid)}." if option.valid else ""
    return escape(option.help, quote=False) + valid


def main() -> int:
    """Rewrite or check every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = 0
    for name, (page, cls) in TABLES.items():
        path = ROOT / "docs" / page
        text = path.read_text(encoding="utf-8")
        start, end = f"<!-- options of {name} -->", "<!-- end of options -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        new, count = pattern.subn(lambda _, cls=cls, start=start, end=end: f"{start}\n\n{table(cls)}\n\n{end}", text)
        if count != 1:
            raise SystemExit(f"{path} must have one pair of markers for {name}, got {count}.")
        if new == text:
            continue
        stale += 1
        if check:
            print(f"{path} is out of date. Run python tools/make_option_tables.py.", file=sys.stderr)
        else:
            path.write_text(new, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
