"""Files of strangers: YAML within bounds, names that stay inside a folder, texts that drive no terminal."""

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

_MOST_BYTES = 64 << 20  # of a YAML file
_MOST_NODES = 5_000_000  # of its content, aliases counted each time: a few lines of aliases can stand for billions
_MOST_NAMES = 1_000_000  # that one list of brace patterns stands for
_MOST_BRACES = 16  # in one of them
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_LAYOUT = "\n\t\xa0\u3000\u200c\u200d"  # white space, and the joiners of scripts and emoji


def read_yaml(file: Path) -> Any:
    """The content of a YAML file of plain types: no tag makes an object, and no file takes all memory.

    Raises:
        OSError: the file cannot be read.
        yaml.YAMLError: it is invalid, has a tag of Python, is nested too deeply, or is too large.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise yaml.YAMLError(f"it has {file.stat().st_size:,} bytes, and at most {_MOST_BYTES:,} are read")
    try:
        value = yaml.safe_load(file.read_bytes())
    except (RecursionError, ValueError) as error:  # nested too deeply; a date that is none
        raise yaml.YAMLError(f"it cannot be parsed: {type(error).__name__}") from error
    nodes, stack = 0, [value]
    while stack:
        one = stack.pop()
        nodes += 1
        if isinstance(one, dict):
            stack += one.values()
        elif isinstance(one, list):
            stack += one
        if nodes + len(stack) > _MOST_NODES:
            raise yaml.YAMLError(f"it stands for more than {_MOST_NODES:,} values")
    return value


def inner_names(patterns: Any) -> list[str]:
    """File names that a list of brace patterns stands for, such as `out-{000..127}.tar`.

    Raises:
        TypeError: not a list of texts.
        ValueError: a name leads out of the folder, or there are more than a million names.
    """
    from braceexpand import braceexpand

    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise TypeError("it is not a list of names")
    names: list[str] = []
    for pattern in patterns:
        ranges = (abs(int(last[:20]) - int(first[:20])) for first, last in _RANGE.findall(pattern))
        if pattern.count("{") > _MOST_BRACES or any(size > _MOST_NAMES for size in ranges):
            raise ValueError(f"{pattern[:80]!r} stands for more than {_MOST_NAMES:,} names")
        try:
            names += islice(braceexpand(pattern), _MOST_NAMES + 1 - len(names))
        except RecursionError as error:
            raise ValueError(f"{pattern[:80]!r} is nested too deeply") from error
        if len(names) > _MOST_NAMES:
            raise ValueError(f"{pattern[:80]!r} stands for more than {_MOST_NAMES:,} names")
    check_inner(names)
    return names


def check_inner(names: Iterable[str]) -> None:
    """Refuse names of files that are not in the folder that names them.

    Raises:
        ValueError: a name is empty, absolute, has `..` or a NUL.
    """
    for name in names:
        if not name or name.startswith("/") or "\0" in name or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name[:200]!r} leads out of the folder; a dataset may only name files inside it")


def visible(text: str, keep: str = _LAYOUT) -> str:
    """The text with control, direction and invisible characters as escapes, such as `\\x1b` and `\\u202e`.

    Args:
        text: from a file of somebody else.
        keep: characters that stay: new lines, tabs, wide spaces, and the joiners of scripts and emoji.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
