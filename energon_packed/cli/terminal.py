"""What goes to a terminal: texts of the data cannot move its cursor, set colors or reverse its lines."""

import re
from collections.abc import Iterable
from typing import Any

import click
import orjson
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from energon_packed.files import visible

_INVISIBLE = re.compile("[^\\n\x20-\x7e]")


class SafeConsole(Console):
    """A console of rich that prints control and direction characters as escapes: in tables, lines and titles.

    Colors are those that this program chooses, as rich keeps them apart from the text.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text without control characters; those that rich itself makes to control the terminal stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def echo(line: str, *, err: bool = False) -> None:
    """Print one line of text."""
    click.echo(visible(line), err=err)


def echo_json(value: Any, *, indented: bool = False) -> None:
    """Print a value as JSON: on one line, or indented. Characters that a terminal would obey are `\\u` escapes."""
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 if indented else None, default=str).decode()
    click.echo(_INVISIBLE.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
