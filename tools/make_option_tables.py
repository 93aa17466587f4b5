"""Write the option tables of docs/command-line.md: `python tools/make_option_tables.py [--check]`.

The text between `<!-- options of NAME -->` and `<!-- end of options -->` is replaced. With --check, the page is not
written, and the exit status is 1 if it is out of date.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from energon_packed import PackOptions
from energon_packed.cli.subcommands import cli
from energon_packed.options import Declaration, declared
from energon_packed.pipeline.survey import LengthsOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-line.md"
_GROUPS = ("Input", "Tokens", "Images", "Videos", "Audio", "Packing", "Output", "Run")


def sections() -> dict[str, str]:
    """The text between each pair of markers."""
    commands = {name: text for name, text in _commands(cli) if name not in ("pack", "lengths")}
    others = "\n\n".join(f"### {name}\n\n{text}" for name, text in commands.items())
    return {"pack": table(PackOptions), "lengths": table(LengthsOptions), "the other commands": others}


def _commands(group: click.Group, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each command and its options, as its `--help` has them."""
    context = click.Context(group)
    of_pack = _help_rows(cli.get_command(click.Context(cli), "pack"))
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")
            continue
        rows = _help_rows(command)
        shared = [flags.split()[0].rstrip(",") for flags, text in rows.items() if of_pack.get(flags) == text]
        others = [f"| {_code(flags)} | {escape(text, quote=False)} |" for flags, text in rows.items()
                  if of_pack.get(flags) != text]  # fmt: skip
        usage = " ".join(command.collect_usage_pieces(click.Context(command)))
        parts = [f"`energon-packed {before}{name} {usage}`"]
        parts += [f"As in `pack`: {', '.join(map(_code, shared))}."] if shared else []
        parts += ["\n".join(["| option | meaning |", "|---|---|", *others])] if others else []
        yield f"{before}{name}", "\n\n".join(parts)


def _help_rows(command: click.Command | None) -> dict[str, str]:
    """Flags to meaning of each option."""
    assert command is not None
    options = [option for option in command.params if isinstance(option, click.Option)]
    records = filter(None, [option.get_help_record(click.Context(command)) for option in options])
    return {re.sub(r"INTEGER( RANGE)?$", "N", flags): " ".join(text.split()) for flags, text in records}


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
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check = parser.parse_args().check
    text = new = PAGE.read_text(encoding="utf-8")
    for name, section in sections().items():
        start, end = f"<!-- options of {name} -->", "<!-- end of options -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        new, count = pattern.subn(lambda _, text=f"{start}\n\n{section}\n\n{end}": text, new)
        if count != 1:
            raise SystemExit(f"{PAGE} must have one pair of markers for {name}, got {count}.")
    if new == text:
        return 0
    if check:
        print(f"{PAGE} is out of date. Run python tools/make_option_tables.py.", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
