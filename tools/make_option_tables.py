"""Write the option tables of docs/ from the declared options: `python tools/make_option_tables.py [--check]`.

The text between `<!-- options of NAME -->` and `<!-- end of options -->` is replaced. With --check nothing is written,
and the exit status is 1 when a page is out of date.
"""

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed import PackOptions
from energon_packed.encoding import EncoderSettings
from energon_packed.options import Declaration, declared
from energon_packed.pipeline.survey import LengthsOptions

ROOT = Path(__file__).resolve().parents[1]
TABLES: dict[str, tuple[str, type[Any]]] = {
    "pack": ("packing.md", PackOptions),
    "lengths": ("inspect.md", LengthsOptions),
    "verify": ("inspect.md", EncoderSettings),
}
_WITHOUT_DEFAULTS = (EncoderSettings,)  # packing.json has the values of options that are not given
_GROUPS = ("Input", "Tokens", "Images", "Packing", "Output", "Run")


def table(cls: type[Any]) -> str:
    """Markdown tables of the options of a class, one per group."""
    options = sorted((one for one in declared(cls) if one.flags), key=lambda one: _GROUPS.index(one.group))
    parts = []
    for group, members in groupby(options, key=lambda one: one.group):
        if cls in _WITHOUT_DEFAULTS:
            rows = [f"| {_flags(one)} | `{one.name}` | {_meaning(one)} |" for one in members]
            head = f"**{group}**\n\n| option | name in Python | meaning |\n|---|---|---|"
        else:
            rows = [f"| {_flags(one)} | `{one.name}` | {_default(one)} | {_meaning(one)} |" for one in members]
            head = f"**{group}**\n\n| option | name in Python and `--config` | default | meaning |\n|---|---|---|---|"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def _flags(one: Declaration) -> str:
    flags = [flag for given in one.flags for flag in given.split("/")]
    value = "" if one.is_flag else f" {one.metavar or {int: 'N', float: 'X'}.get(one.kind, 'NAME')}"
    text = ", ".join(f"`{flag}{value}`" for flag in flags)
    return f"`INPUT...`, {text}" if one.name == "inputs" else text.replace("|", "\\|")


def _default(one: Declaration) -> str:
    if one.is_required:
        return "required"
    if one.is_flag:
        return "on" if one.default and one.name in one.flags[0] else "off"
    if one.shown_default is not None:
        return one.shown_default
    return "" if one.default is None else f"`{one.default}`"


def _meaning(one: Declaration) -> str:
    return one.help + (f" One of {', '.join(f'`{value}`' for value in one.valid)}." if one.valid else "")


def main() -> int:
    """Rewrite or check every page."""
    stale = 0
    for name, (page, cls) in TABLES.items():
        path = ROOT / "docs" / page
        text = path.read_text(encoding="utf-8")
        begin, end = f"<!-- options of {name} -->", "<!-- end of options -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        new, count = pattern.subn(lambda _, cls=cls, b=begin, e=end: f"{b}\n\n{table(cls)}\n\n{e}", text)
        if count != 1:
            raise SystemExit(f"{path} must have one pair of markers for {name}")
        if new == text:
            continue
        stale += 1
        if "--check" in sys.argv:
            print(f"{path} is out of date; run python tools/make_option_tables.py", file=sys.stderr)
        else:
            path.write_text(new, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
