"""Print untrusted strings safely: tables, lines or JSON values in, text without control characters out.

Strings of a dataset could otherwise move the cursor, set colors or reverse the direction of a line.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

import click
import orjson
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from energon_packed.files import visible

_NOT_WRAPPED = 1_000_000  # characters; rich would wrap at 80
_NOT_ASCII = re.compile("[^\\n\x20-\x7e]")


class SafeConsole(Console):
    """Console of rich that prints control and direction characters as escapes, in tables, lines and titles.

    Colors still work: rich stores the style of a segment separately from its text. Lines and tables are wrapped at the
    width of a terminal, or at COLUMNS; in pipes and files they are not wrapped.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _NOT_WRAPPED

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments without control characters; control segments of rich itself are unchanged."""
        for segment in super().render(renderable, options):
            # Control segments are created by rich, never from data. Most segments are printable and need no copy.
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def echo(line: str, *, err: bool = False) -> None:
    """Print one line of text, with control characters as escapes."""
    click.echo(visible(line), err=err)


def echo_json(value: Any, *, indented: bool = False) -> None:
    """Print a value as JSON, on one line or indented. Characters that are not printable become `\\u` escapes."""
    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 if indented else None, default=str).decode()
    click.echo(_NOT_ASCII.sub(_escaped, text))


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    # JSON escapes are UTF-16 code units: a character beyond U+FFFF becomes a surrogate pair.
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
