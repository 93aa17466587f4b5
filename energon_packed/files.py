"""Files that are written atomically (a temporary file, fsync, rename), and files that a process keeps open.

Files of strangers: regular files alone, YAML within bounds, names that stay inside a folder, texts that drive no
terminal.
"""

import contextlib
import errno
import itertools
import os
import re
import socket
import stat
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from energon_packed.errors import FormatError
from energon_packed.system import most_open

_MOST_BYTES = 64 << 20  # of a YAML file
_MOST_NODES = 5_000_000  # of its content, aliases counted each time: a few lines of aliases can stand for billions
_MOST_NAMES = 1_000_000  # that one list of brace patterns stands for
_MOST_BRACES = 16  # in one of them
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_LAYOUT = "\n\t\xa0\u3000\u200c\u200d"  # white space, and the joiners of scripts and emoji


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class IrregularFile(ValueError):
    """What is to be read is no regular file; the message is what it is."""


def irregular(mode: int) -> str | None:
    """What is no regular file, such as `a FIFO`; None for a regular file.

    Args:
        mode: `st_mode` of it.
    """
    if stat.S_ISREG(mode):
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "not a file")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; a FIFO would be waited for indefinitely.

    Raises:
        OSError: it cannot be opened.
        IrregularFile: it is a folder, device, socket or FIFO.
    """
    _refuse(os.stat(path).st_mode)  # before opening: opening some devices acts on them
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse(os.fstat(descriptor).st_mode)  # what was opened, if the path was replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse(mode: int) -> None:
    if kind := irregular(mode):
        raise IrregularFile(f"is {kind}, not a regular file")


def check_regular_files(folder: Path) -> None:
    """Refuse a folder with entries that are neither files nor folders, as reading them may block.

    Links count as what they lead to; those that lead nowhere are left to who needs them.

    Raises:
        FormatError: there is a FIFO, device or socket; the message names it.
    """
    try:
        entries = list(os.scandir(folder))
    except PermissionError:  # files of a folder that cannot be listed may still be read
        return
    for entry in entries:
        if not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path):
            raise FormatError(
                f"{entry.path} is {irregular(entry.stat().st_mode)}, not a regular file; remove it, or copy the "
                "folder again"
            )


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, where YAML loaders take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As of the base class."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1} gives {key.value!r} a second time")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _AsEnergon(_UniqueKeys):
    """Reads scalars and keys as Energon's parser (rapidyaml) does, and refuses what that parser reads otherwise.

    It ignores tags, takes an alias as text, a document after `---` as a list, and fails on a key without a value.
    Source: megatron/energon/eyaml.py.
    """

    def compose_document(self) -> Any:
        """As of the base class."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if event.explicit:
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1} is ---, which Energon cannot read; remove the line"
            )
        return super().compose_document()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As of the base class."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            what = "an alias" if isinstance(event, yaml.AliasEvent) else "a tag"
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1} has {what}, which Energon ignores; write the value"
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """As of the base class."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep=True)
        if node.style is None and not node.value:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} has no value; write null, or remove it")
        return node.value if node.style is not None else _plain_scalar(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As of the base class."""
        found: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in found:
                given = f"gives {key.value!r} a second time" if isinstance(key, yaml.ScalarNode) else "has no text key"
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} {given}")
            found[key.value] = self.construct_object(value, deep=True)
        return found


def _plain_scalar(text: str) -> Any:
    """A scalar without quotes, as Energon takes it."""
    known = {"null": None, "~": None, "true": True, "yes": True, "false": False, "no": False}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return text


def read_yaml(file: Path, *, unique_keys: bool = False, as_energon: bool = False) -> Any:
    """The content of a YAML file of plain types: no tag makes an object, and no file takes all memory.

    Args:
        file: the file.
        unique_keys: refuse a key that a mapping has twice.
        as_energon: read scalars as Energon does, and refuse files that it reads otherwise; implies `unique_keys`.

    Raises:
        OSError: the file cannot be read.
        yaml.YAMLError: it is invalid, has a tag of Python, is nested too deeply, or is too large.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise yaml.YAMLError(f"it has {file.stat().st_size:,} bytes, and at most {_MOST_BYTES:,} are read")
    loader = _AsEnergon if as_energon else _UniqueKeys if unique_keys else yaml.SafeLoader
    try:
        with open_regular(file) as stream:
            content = stream.read()
        text: bytes | str = content
        if as_energon:
            text = content.decode("utf-8-sig")  # not UTF-16, which YAML allows
            if _LINE_ENDS.search(text):
                raise yaml.YAMLError("it has U+0085, U+2028 or U+2029, line ends that Energon takes as text")
        value = yaml.load(text, loader)
    except IrregularFile as error:
        raise yaml.YAMLError(f"it {error}") from error
    except (RecursionError, ValueError, TypeError, AttributeError) as error:  # nested too deeply; a date that is none
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
        ValueError: a name is empty, absolute, has `..` or a NUL, or is not UTF-8.
    """
    for name in names:
        name.encode()
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


_MOST_OPEN = 128  # files of all readers; the usual limit of descriptors is 1024
_numbers = itertools.count()
_open: OrderedDict[tuple[int, Path], BinaryIO] = OrderedDict()
_process = os.getpid()
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)


def aside_name(path: Path) -> Path:
    """Unique temporary name next to `path`; with the host name, since hosts that share a disk may share PIDs."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds."""
    temporary = aside_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        rename_whole(temporary, path)
    except OSError as error:
        raise named(error, path) from error
    finally:
        remove(temporary)


def named(error: OSError, path: Path) -> OSError:
    """An error of the temporary file as one of `path`, with the text of the operating system.

    Errors of a full disk name no file, and those of pyarrow have another text.
    """
    if error.filename is not None and os.fspath(error.filename) != str(aside_name(path)):
        return error
    text = str(error) if error.errno is None else os.strerror(error.errno)
    return OSError(error.errno or errno.EIO, text, str(path))


def remove(temporary: Path) -> None:
    """Remove a temporary file, where the disk still obeys: what failed before is what the user must read."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def rename_whole(temporary: Path, path: Path) -> None:
    """Rename a finished, synced file and sync the folder, so that the rename survives a power failure.

    File systems that cannot sync a folder (CIFS and some of FUSE) say so by an error, which is no failure.
    """
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(folder)


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


class Streams:
    """The open files of one reader, each opened on first use; those used longest ago are closed."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        weakref.finalize(self, _forget, self._number)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, path: Path) -> BinaryIO:
        """The open file.

        Raises:
            OSError, IrregularFile: as `open_regular`.
        """
        global _process
        if _process != os.getpid():  # after a fork: the same open files would share positions with the parent
            _open.clear()
            _process = os.getpid()
        key = (self._number, path)
        # Taken out and put back, since another thread may put it out of use meanwhile; this name keeps it open.
        stream = _open.pop(key, None) or open_regular(path)
        _open[key] = stream
        while len(_open) > most_open(_MOST_OPEN):
            _open.popitem(last=False)  # closed when no thread reads it any more
        return stream


def _forget(number: int) -> None:
    for key in [key for key in _open if key[0] == number]:
        _open.pop(key, None)
