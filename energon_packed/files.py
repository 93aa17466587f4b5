"""File access that is safe with untrusted files, crashes and power failures. Input: paths. Output: content or files.

open_regular, check_regular_files   open regular files only: a FIFO would block, and a device may act on `open`
read_range, status                  bytes and status of an open file, local or in an object store
read_if_there                       the content of a small file, if there is one
read_yaml                           YAML of plain types, within limits, optionally as Energon's parser reads it
of_type                             a parsed value of a known type
inner_names, check_inner            file names that cannot leave their folder
visible                             strings that cannot control the terminal
atomic_path, atomic_write, move     a file has its old content or all of its new content, at every moment
remove_tree                         deletes a folder
disk_array, DiskList                arrays that may be larger than the memory
Streams                             open files of a reader, limited in number
"""

import contextlib
import errno
import itertools
import mmap
import os
import re
import shutil
import socket
import stat
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from energon_packed.arrays import blocks
from energon_packed.errors import ConfigError, FormatError
from energon_packed.libraries import calls
from energon_packed.storage import RemotePath, RemoteReader
from energon_packed.system import most_open

_MOST_BYTES = 64 << 20  # of a YAML file
_MOST_NODES = 5_000_000  # of its content, aliases counted each time: a few lines of aliases can expand to billions
_MOST_FLAT = 1000  # columns and brackets of a YAML file that libyaml reads
_MOST_NAMES = 1_000_000  # in the expansion of a list of brace patterns
_MOST_BRACES = 16  # in one pattern
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # to open untrusted files
_IN_MEMORY = 1 << 20  # bytes of an array that needs no file
_WAITING = 1 << 13  # integers of a `DiskList` that are not yet in its array
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_LAYOUT = "\n\t\xa0\u3000\u200c\u200d"  # white space, and the joiners of scripts and emoji
_MOST_OPEN = 128  # files of all readers; the usual limit of descriptors is 1024
# Errors of `fsync` on a folder from file systems that cannot sync folders, such as CIFS and some FUSE drivers.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


T = TypeVar("T")


class IrregularFile(ValueError):
    """A path is not a regular file; the message names its kind, and has no path."""


class LinkRefused(ValueError):
    """A path has a symbolic link where links are refused; the message names it, and the remedy."""


def irregular_kind(mode: int) -> str | None:
    """Return the kind of an irregular file, such as `a FIFO`; None for a regular file.

    Args:
        mode: `st_mode` of the file.
    """
    if stat.S_ISREG(mode):
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "not a file")


def open_regular(path: str | Path, without_links: str | None = None) -> BinaryIO:
    """Open a regular file for reading; opening a FIFO would block indefinitely.

    Args:
        path: the file.
        without_links: a folder that contains it: links in the path below the folder are refused.

    Raises:
        OSError: it cannot be opened.
        IrregularFile: it is a folder, device, socket or FIFO.
        LinkRefused: there is a link.
    """
    if isinstance(path, RemotePath):
        try:
            return RemoteReader(path)
        except IsADirectoryError:
            raise IrregularFile("is a folder, not a regular file") from None
    if without_links is None:
        descriptor = _opened(path)
    else:
        descriptor = _open_without_links(os.path.abspath(without_links), os.path.abspath(path))
    try:
        _refuse(os.fstat(descriptor).st_mode)  # the opened file, if the path was replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_start(path: str | Path, size: int) -> tuple[os.stat_result, bytes]:
    """Return the status of a local file, and its first `size` bytes; b"" if it has fewer.

    A stream would need 4 us more for each file: nearly half of the time to open and close one.

    Raises:
        OSError, IrregularFile: as `open_regular`.
    """
    descriptor = _opened(path)
    try:
        now = os.fstat(descriptor)
        _refuse(now.st_mode)
        # The status first, so that a size in a damaged file allocates no memory.
        return now, _pread(descriptor, 0, size) if size <= now.st_size else b""
    finally:
        os.close(descriptor)


def _opened(path: str | Path) -> int:
    _refuse(os.stat(path).st_mode)  # before opening: opening some devices acts on them
    return os.open(path, _FLAGS)


def _open_without_links(folder: str, path: str) -> int:
    """Open one folder after the other: a name that becomes a link in the meantime is not followed."""
    if not path.startswith(folder.rstrip("/") + "/"):  # by the other name of the folder
        folder = os.path.realpath(folder)
    *folders, file = os.path.relpath(path, folder).split("/")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in folders:
            _refuse_link(at, name, folder)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at, folder = inner, os.path.join(folder, name)
        _refuse(_refuse_link(at, file, folder))
        return os.open(file, _FLAGS | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)


def _refuse_link(at: int, name: str, folder: str) -> int:
    """Return the mode of a name in an open folder, if it is not a link."""
    mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise link_refused(os.path.join(folder, name))
    return mode


def link_refused(path: str | Path) -> LinkRefused:
    """Return the error for a link, where links are refused."""
    return LinkRefused(
        f"{visible(str(path), keep='')} is a symbolic link, which `no_links` refuses; replace it with its target, or "
        "omit `no_links`"
    )


def read_range(stream: BinaryIO, at: int, size: int) -> bytes:
    """Read bytes [at, at + size) of a stream of `open_regular`; fewer at its end. Its position stays.

    Raises:
        OSError: the disk or the object store fails.
    """
    if isinstance(stream, RemoteReader):
        return stream.read_range(at, size)
    return _pread(stream.fileno(), at, size)


def _pread(descriptor: int, at: int, size: int) -> bytes:
    data = os.pread(descriptor, size, at)
    if len(data) == size or not data:
        return data
    parts, missing = [data], size - len(data)
    while missing and (data := os.pread(descriptor, missing, at + size - missing)):
        parts.append(data)  # `pread` may return fewer bytes than requested
        missing -= len(data)
    return b"".join(parts)


def read_if_there(file: Path) -> bytes | None:
    """Return the content of a regular file; None if it does not exist. An object needs one request.

    Raises:
        OSError: the disk or the object store fails.
    """
    if not isinstance(file, RemotePath):
        return file.read_bytes() if file.is_file() else None
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def status(stream: BinaryIO) -> os.stat_result:
    """Return the status of a stream of `open_regular`.

    Raises:
        OSError: the disk or the object store fails.
    """
    return stream.status() if isinstance(stream, RemoteReader) else os.fstat(stream.fileno())


def _refuse(mode: int) -> None:
    if kind := irregular_kind(mode):
        raise IrregularFile(f"is {kind}, not a regular file")


def check_regular_files(folder: Path) -> None:
    """Refuse a folder with entries that are neither files nor folders, as reading them may block.

    Links count as their targets; broken links are ignored here.

    Raises:
        FormatError: there is a FIFO, device or socket; the message names it.
    """
    if isinstance(folder, RemotePath):  # an object store has regular files only
        return
    try:
        entries = list(os.scandir(folder))
    except PermissionError:  # files of a folder that cannot be listed may still be read
        return
    for entry in entries:
        if not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path):
            raise FormatError(
                f"{entry.path} is {irregular_kind(entry.stat().st_mode)}, not a regular file; remove it, or copy the "
                "folder again"
            )


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a repeated key in a mapping; YAML loaders keep the last value without a message."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping whose keys are unique."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise _repeated(key)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _AsEnergon(_UniqueKeys):
    """Reads scalars and keys as Energon's parser (rapidyaml) does; refuses input that the parsers read differently.

    That parser ignores tags, reads an alias as a string and a document after `---` as a list, and fails on a key
    without a value. Source: megatron/energon/eyaml.py.
    """

    def compose_document(self) -> Any:
        """Refuse an explicit document start."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if event.explicit:
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1} is ---, which Energon cannot read; remove the line"
            )
        return super().compose_document()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases and tags."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            syntax = "an alias" if isinstance(event, yaml.AliasEvent) else "a tag"
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1} has {syntax}, which Energon ignores; write the value"
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct scalars by Energon's rules."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep=True)
        if node.style is None and not node.value:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} has no value; write null, or remove it")
        return node.value if node.style is not None else _plain_scalar(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping whose keys are unique strings: Energon does not convert keys."""
        content: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} has a key that is not a string")
            if key.value in content:
                raise _repeated(key)
            content[key.value] = self.construct_object(value, deep=True)
        return content


def _repeated(key: yaml.ScalarNode) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {key.start_mark.line + 1} repeats the key {key.value!r}")


def _plain_scalar(text: str) -> Any:
    """Convert an unquoted scalar as Energon does."""
    known = {"null": None, "~": None, "true": True, "yes": True, "false": False, "no": False}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return text


def read_yaml(file: Path, *, unique_keys: bool = False, as_energon: bool = False) -> Any:
    """Read a YAML file of plain types: tags never construct objects, and memory is limited.

    Args:
        file: the file.
        unique_keys: refuse a repeated key in a mapping.
        as_energon: read scalars as Energon does, and refuse files that it reads otherwise; implies `unique_keys`.

    Raises:
        OSError: the file cannot be read.
        yaml.YAMLError: it is invalid, has a tag of Python, is nested too deeply, or is too large.
    """
    loader: Any = _AsEnergon if as_energon else _UniqueKeys if unique_keys else yaml.SafeLoader
    try:
        if isinstance(file, RemotePath):  # one request; a stream would request the status first
            content = file.read_range(0, _MOST_BYTES + 1)
            size = file.stat().st_size if len(content) > _MOST_BYTES else len(content)
        else:
            with open_regular(file) as stream:
                size = status(stream).st_size
                content = stream.read() if size <= _MOST_BYTES else b""
        if size > _MOST_BYTES:
            raise yaml.YAMLError(f"it has {size:,} bytes, and at most {_MOST_BYTES:,} are read")
        if loader is yaml.SafeLoader and _is_flat(content):
            loader = getattr(yaml, "CSafeLoader", loader)  # reads the names of 10,000 shards in a tenth of the time
        text: bytes | str = content
        if as_energon:
            text = content.decode("utf-8-sig")  # not UTF-16, which YAML allows
            if _LINE_ENDS.search(text):
                raise yaml.YAMLError("it has U+0085, U+2028 or U+2029, line ends in YAML but not in Energon")
        with calls("pyyaml", is_parser=True):
            value = yaml.load(text, loader)
    except IrregularFile as error:
        raise yaml.YAMLError(f"it {error}") from error
    except (ConfigError, OSError):  # an error of an object store is a ValueError, too
        raise
    # Nested too deeply; an impossible date, of which PyYAML itself raises the last two.
    except (RecursionError, ValueError, TypeError, AttributeError) as error:
        raise yaml.YAMLError(f"it cannot be parsed: {type(error).__name__}") from error
    # Aliases share one object, so parsing is cheap; whoever walks the tree visits it once for each alias.
    nodes, stack = 0, [value]
    while stack:
        node = stack.pop()
        nodes += 1
        if isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, list):
            stack += node
        if nodes + len(stack) > _MOST_NODES:
            raise yaml.YAMLError(f"it expands to more than {_MOST_NODES:,} values")
    return value


def _is_flat(content: bytes) -> bool:
    """Return whether a YAML file has few levels: a deeper level needs a column or a bracket.

    libyaml overflows the stack of the process with many levels, for which PyYAML itself raises an error.
    """
    columns = max(map(len, content.splitlines()), default=0)
    return columns + content.count(b"[") + content.count(b"{") < _MOST_FLAT


def of_type(value: Any, kind: type[T], name: str = "the content") -> T:
    """Return a value of an untrusted file if it has this type.

    Raises:
        ValueError: it has another type.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def inner_names(patterns: Any) -> list[str]:
    """Expand a list of brace patterns, such as `out-{000..127}.tar`, to file names.

    Raises:
        ValueError: not a list of strings, a name leads out of the folder, or there are more than a million names.
    """
    from braceexpand import braceexpand

    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError("it is not a list of names")
    names: list[str] = []
    for pattern in patterns:
        # Checked before the expansion: braceexpand builds a whole range in memory. Ranges nest, hence the brace limit.
        ranges = (abs(int(last[:20]) - int(first[:20])) for first, last in _RANGE.findall(pattern))
        if pattern.count("{") > _MOST_BRACES or any(size > _MOST_NAMES for size in ranges):
            raise _too_many_names(pattern)
        try:
            names += islice(braceexpand(pattern), _MOST_NAMES + 1 - len(names))
        except RecursionError as error:
            raise ValueError(f"{pattern[:80]!r} is nested too deeply") from error
        if len(names) > _MOST_NAMES:
            raise _too_many_names(pattern)
    check_inner(names)
    return names


def _too_many_names(pattern: str) -> ValueError:
    return ValueError(f"{pattern[:80]!r} expands to more than {_MOST_NAMES:,} names")


def check_inner(names: Iterable[str]) -> None:
    """Refuse file names that lead out of the folder that lists them.

    Raises:
        ValueError: a name is empty, absolute, has `..` or a NUL, or is not UTF-8.
    """
    for name in names:
        name.encode()
        if not name or name.startswith("/") or "\0" in name or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name[:200]!r} leads out of the folder; a dataset may only name files inside it")


def visible(text: str, keep: str = _LAYOUT) -> str:
    """Escape control, direction and invisible characters of an untrusted string, such as `\\x1b` and `\\u202e`.

    Args:
        text: the untrusted string.
        keep: characters that stay: new lines, tabs, wide spaces, and the joiners of scripts and emoji.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@contextmanager
def atomic_path(path: Path, staging: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; rename it to `path` if the block succeeds.

    Creates the folder. The file is synced before the rename, and the folder after it: after a crash or a power failure
    `path` has its old content or all of the new content. If the block raises, `path` stays as it is.

    Args:
        path: a file, or an object: its temporary file is in a local folder, and is uploaded.
        staging: local folder for the temporary file of an object; by default a temporary folder.

    Raises:
        OSError: the disk is full, or fails; the error names `path`, not the temporary file.
        StorageError: the object cannot be stored.
    """
    with contextlib.ExitStack() as stack:
        target = path
        if isinstance(path, RemotePath):
            folder = staging or stack.enter_context(tempfile.TemporaryDirectory(prefix="energon-packed-"))
            target = Path(folder) / path.name
        temporary = _temporary_name(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if isinstance(path, RemotePath):
                path.upload(temporary)
            else:
                with temporary.open("rb") as stream:
                    os.fsync(stream.fileno())
                _rename_and_sync(temporary, path)
        except OSError as error:
            if (named := error_of_path(error, target)) is error:  # it must not become its own cause
                raise
            raise named from error
        finally:
            remove_if_possible(temporary)


def atomic_write(path: Path, content: bytes) -> None:
    """Write `content` to `path` by `atomic_path`: a reader sees the old or the new content, never a part."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def move(file: Path, target: Path) -> None:
    """Move a local file, also to an object store; `target` has its old content or all of the new content."""
    if isinstance(target, RemotePath):
        target.upload(file)
        file.unlink()
    else:
        file.replace(target)


def remove_tree(folder: Path) -> None:
    """Delete a folder; errors of a local disk are ignored.

    Raises:
        StorageError: an object cannot be deleted.
    """
    if isinstance(folder, RemotePath):
        for path in folder.objects():
            path.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def disk_array(folder: Path | None, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Make an array of zeros, shape (count,), in a file: its pages leave the memory if other data needs it.

    The file has no name, so that it is gone with the last process that uses it, and no other run can read it. A small
    array has no file.

    Args:
        folder: folder on a local disk with enough space; None for the folder of temporary files, which TMPDIR sets.
        count, dtype: entries of the array.

    Raises:
        OSError: the file cannot be made, or the disk is full; the message has its size, and TMPDIR if that is used.
    """
    size = count * np.dtype(dtype).itemsize
    if size < _IN_MEMORY:
        return np.zeros(count, dtype=dtype)
    try:
        with tempfile.TemporaryFile(prefix=".", suffix=".tmp", dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # a page that has no space on the disk would kill the process
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype)
    except OSError as error:
        need = f"{error.strerror} for {format_bytes(size)}"
        if folder is None:
            need += " of temporary files, whose folder TMPDIR sets"
        raise OSError(error.errno, need, str(folder or tempfile.tempdir or "TMPDIR")) from error


class DiskList:
    """Values that are appended to an array in a file: memory does not grow with their number.

    Args:
        dtype: of the array.
        folder: as for `disk_array`.
    """

    def __init__(self, dtype: npt.DTypeLike, folder: Path | None = None) -> None:
        self._array = np.zeros(0, dtype=dtype)
        self._folder = folder
        self._count = self._sorted = 0
        self._waiting: list[Any] = []

    def __len__(self) -> int:
        return self._count + len(self._waiting)

    def extend(self, values: Sequence[Any] | npt.NDArray[Any]) -> None:
        """Append values: an array, or integers, or tuples of a structured dtype.

        Raises:
            OSError: as `disk_array`.
        """
        if isinstance(values, np.ndarray):
            self._store(self._waiting)
            self._store(values)
        else:
            self._waiting.extend(values)
            if len(self._waiting) >= _WAITING:
                self._store(self._waiting)

    @property
    def values(self) -> npt.NDArray[Any]:
        """The array, shape (n,), until values are appended."""
        self._store(self._waiting)
        return self._array[: self._count]

    def sorted(self) -> npt.NDArray[Any]:
        """Sort the array in place, and return it."""
        values = self.values
        if self._sorted < len(values):
            values.sort()
            self._sorted = len(values)
        return values

    def repeated(self) -> npt.NDArray[Any]:
        """Sort the array in place, and return the values that occur several times, each once, sorted."""
        values, found = self.sorted(), DiskList(self._array.dtype, self._folder)
        for block in blocks(len(values)):
            own = values[max(0, block.start - 2) : block.stop]
            is_second = own[1:] == own[:-1]
            is_second[1:] &= own[2:] != own[:-2]
            is_second[:1] &= block.start == 0  # otherwise the last entry of the block before
            found.extend(own[1:][is_second])
        return found.values

    def _store(self, values: list[Any] | npt.NDArray[Any]) -> None:
        stop = self._count + len(values)
        if stop > len(self._array):
            grown = disk_array(self._folder, max(stop, 2 * len(self._array)), self._array.dtype)
            grown[: self._count] = self._array[: self._count]
            self._array = grown
        if len(values):
            self._array[self._count : stop] = values
        self._count = stop
        if values is self._waiting:
            self._waiting = []


def error_of_path(error: OSError, path: Path) -> OSError:
    """Return an error of the temporary file of `path` as an error of `path`, with the text of the operating system.

    Errors of a full disk name no file, and pyarrow's errors have another text.
    """
    if error.filename is not None and os.fspath(error.filename) != str(_temporary_name(path)):
        return error
    text = str(error) if error.errno is None else os.strerror(error.errno)
    return OSError(error.errno or errno.EIO, text, str(path))


def remove_if_possible(temporary: Path) -> None:
    """Remove a temporary file; an error here must not hide the error that left it there."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    """Return a name next to `path` that no other process uses: hosts that share a disk may have equal PIDs."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def _rename_and_sync(temporary: Path, path: Path) -> None:
    """Rename a synced file and sync the folder, so that the rename survives a power failure."""
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(folder)


# Open files of all `Streams` of this process, by (reader, path), the least recently used first.
_open: OrderedDict[tuple[int, Path], BinaryIO] = OrderedDict()
_process = os.getpid()
_reader_ids = itertools.count()


class Streams:
    """The open files of a reader, each opened on first use; the least recently used files are closed."""

    def __init__(self) -> None:
        self._reader = next(_reader_ids)
        weakref.finalize(self, _forget, self._reader)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, path: Path, *, current: bool = False) -> BinaryIO:
        """Return the open file; with `current`, the file that has this name now, at the cost of a look-up of the name.

        Raises:
            OSError, IrregularFile: as `open_regular`.
        """
        global _process
        if _process != os.getpid():  # after a fork: the same open files would share positions with the parent
            _open.clear()
            _process = os.getpid()
        key = (self._reader, path)
        # Popped and put back: another thread may evict it at the same time; the local name keeps it open.
        stream = _open.pop(key, None)
        # The stream of an object is opened by its name at each request.
        if current and stream is not None and not isinstance(stream, RemoteReader):
            stream = stream if os.path.samestat(os.stat(path), os.fstat(stream.fileno())) else None
        stream = stream or open_regular(path)
        _open[key] = stream
        while len(_open) > most_open(_MOST_OPEN):
            _open.popitem(last=False)  # closed when the last thread that reads it drops it
        return stream


def _forget(reader: int) -> None:
    for key in [key for key in list(_open) if key[0] == reader]:  # threads may open files at the same time
        _open.pop(key, None)


_shared = Streams()


def open_shared(path: Path, *, current: bool = False) -> BinaryIO:
    """Return an open stream that all readers of this process share, for `read_range` only.

    Opening an object sends a request. The caller does not close the stream, and knows the version that it reads, or
    passes `current` as for `Streams.get`.

    Raises:
        OSError, IrregularFile: as `open_regular`.
    """
    return _shared.get(path, current=current)
