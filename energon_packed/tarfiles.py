"""The only tar reader. Input: a tar, or a range of its bytes. Output: its members, their byte ranges and its faults.

Inputs (`sources`), datasets (`shards`), `inspect`, `verify` and `nv-meta` read tars through this module, so that a tar
has the same samples and the same faults in all of them. Only headers are read, 512 bytes each; contents are read by
their byte ranges. Formats: V7, POSIX ustar and PAX, and GNU; uncompressed, because members are read by byte offsets.

The rules, and how GNU tar and Python's `tarfile` (which WebDataset 1 and Megatron-Energon 7 use) differ:

    names       The name of a PAX or GNU long-name header wins over the 100 bytes of the header. The prefix field is
                used only if the magic is `ustar\\0`, as in GNU tar: GNU headers have times in its bytes, which
                `tarfile` reads as a folder. Bytes that are not UTF-8 appear as escapes: `caf\\xe9.txt`.
    keys        A member is KEY.PART, split at the first dot of the base name. A name without a part is a separate key,
                which readers reject by name; WebDataset and Energon skip such members without a message.
    ignored     `__NAME__` and everything below it, as in WebDataset; `._NAME` and `__MACOSX/`, which macOS adds.
                WebDataset and Energon skip `._a.jpg`, but read `dir/._a.jpg` as a part of a sample `dir/`:
                `TarReader.misread` names the first such member, and a dataset for Energon must not have any.
    kinds       Regular files (types 0, NUL and 7) have content. Directories and volume labels (5, D, V) are skipped.
                Symbolic and hard links, FIFOs, devices, sparse files and unknown types are members that cannot be
                read, and `Member.fault` has the reason: WebDataset and Energon skip them, so that their sample would
                lose a part without a message. Directories, links, FIFOs and devices have no content, whatever size
                their header has, as in `tarfile`.
    PAX         `path`, `size` and `GNU.sparse.*` are used. A global header that sets them is refused, because a reader
                that starts inside the tar cannot know it. Other global headers (git archive) are skipped; between
                samples, Energon fails at them (`TarReader.misread`).
    duplicates  The parts of a key must differ (`key_faults`). `tarfile` extracts the last member of a name, Energon
                keeps the last, and WebDataset raises.
    end         Two blocks of zeros, and nothing but zeros after them. `tarfile` also stops at a damaged header, at one
                block of zeros and at the end of the file, all without a message. Here each of these is an error.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from energon_packed.errors import FormatError, SourceError
from energon_packed.files import IrregularFile, open_regular, open_shared, read_range, status
from energon_packed.storage import READ_AHEAD, RemotePath, is_remote
from energon_packed.system import raise_resource_error

BLOCK = 512
FILE = "regular file"
Read = Callable[[int, int], bytes]
"""Bytes of a tar by (offset, size); fewer at the end of the file."""

_END = 2 * BLOCK  # zero bytes at the end of an archive
_DIRECTORY, _LABEL, _SPARSE = "directory", "volume label", "sparse file"
_KINDS = {
    b"0": FILE, b"\0": FILE, b"7": FILE, b"1": "hard link", b"2": "symbolic link", b"3": "device", b"4": "device",
    b"5": _DIRECTORY, b"6": "FIFO", b"D": _DIRECTORY, b"V": _LABEL, b"S": _SPARSE,
}  # fmt: skip
_WITHOUT_CONTENT = b"123456"  # types whose size field `tarfile` ignores
# Headers that describe the next member. Type K has the target of a link, and type X is the PAX header of old Solaris.
_EXTENDED, _LONG_NAME, _GLOBAL, _PAX = b"LKgxX", b"L", b"g", b"xX"
_MOST_EXTENDED = 64 << 20  # bytes of a PAX header, which may have attributes of a file system
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_IGNORED = re.compile(r"__[^/]*__(?:$|/)|(?:.*/)?\._|(?:.*/)?__MACOSX/", re.DOTALL)
_OF_MACOS = re.compile(r"(?:.*/)?(?:\._|__MACOSX/)", re.DOTALL)
_ENERGON_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # megatron/energon/flavors/webdataset/config.py
_PAX_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")
MAGICS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK": "zip"}
"""Compressed formats by their first bytes."""
_REMEDY = "copy or write it again"
_LARGEST_BLOCK, _SMALLEST_BLOCK = 8 << 20, 1 << 16  # bytes of a remote tar that are requested at once


class TarError(FormatError, SourceError):
    """A tar is damaged: a file of a dataset (FormatError) and an input (SourceError) alike.

    Attributes:
        problem: the message without the path.
    """

    def __init__(self, message: str, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem or message


class NotATarError(TarError):
    """A file is compressed, empty, or something else than a tar."""


class Member(NamedTuple):
    """One member of a tar that is not a directory.

    Attributes:
        name: full member name.
        key, part: the name before and after the first dot of the base name; without a dot, `name` and "".
        header: byte offset of its first header.
        offset, size: byte range of its content.
        kind: `FILE`, or the kind of a member that cannot be read, such as `FIFO`.
    """

    name: str
    key: str
    part: str
    header: int
    offset: int
    size: int
    kind: str = FILE

    @property
    def extension(self) -> str:
        """The name after the last dot, in lower case."""
        return self.part.rpartition(".")[2].lower()

    @property
    def fault(self) -> str | None:
        """The reason why the content cannot be read; None for a regular file."""
        if self.kind == FILE:
            return None
        return f"{self.name} is a {self.kind}, which is never read; store the file itself"


class TarReader:
    """Iterates over the members of a tar, or of a range of its bytes.

    Attributes:
        path: the tar, for messages.
        end: byte offset of the end of the last member that was read.
        misread: the first member or header that is ignored here, but misread by Energon; "" if there is none.
    """

    def __init__(self, path: Path, read: Read, start: int, stop: int, *, is_whole: bool = False) -> None:
        """Select the members whose first header is in bytes [start, stop).

        Args:
            path: the tar, for messages.
            read: function that returns bytes of the tar.
            start: byte offset of a first header.
            stop: byte offset of a first header, or the end of the last member; with `is_whole`, the size of the file.
            is_whole: the range is the whole file, and its end is checked.
        """
        self.path = path
        self.end = start
        self.misread = ""
        self._read = read
        self._stop = stop
        self._is_whole = is_whole

    def __iter__(self) -> Iterator[Member]:
        """Yield members in order.

        Raises:
            NotATarError: the whole file is not a tar.
            TarError: it is truncated or damaged, or a whole file lacks the end of an archive.
        """
        # One loop rather than a method for each kind of header: tars have millions of members.
        read, stop = self._read, self._stop
        at = self.end
        first: int | None = None  # the first header of a member with several
        long_name: str | None = None
        pax: dict[str, bytes] = {}
        while at < stop:
            header = read(at, BLOCK)
            if not _is_sound(header):
                if self._is_whole and first is None and not header.strip(b"\0"):
                    break
                raise self._unreadable(at, header)
            kind = header[156:157]
            size = _number(header[124:136])
            if size is None:
                raise self._error(f"damaged header at byte {at}: its size is {header[124:136]!r}; {_REMEDY}")
            label = _KINDS.get(kind)
            if label is None and kind in _EXTENDED:
                content = self._extended(at, size)
                if kind == _GLOBAL:
                    self._check_global(self._pax(content, at), at)
                    if self.end > 0 and not self.misread:
                        self.misread = f"the global header at byte {at} makes Energon read past the end of a sample"
                elif first is None:
                    first = at
                if kind == _LONG_NAME and long_name is None:
                    long_name = _text(content)
                elif kind in _PAX:
                    pax = self._pax(content, at) | pax  # of several headers the first is used, as in `tarfile`
                at += BLOCK + size + -size % BLOCK
                continue
            name = _text(header[:100])
            if label is None:
                label = f"member of the unknown type {_text(kind)!r}"
            elif label != FILE:
                size = 0 if kind in _WITHOUT_CONTENT else size
            elif kind == b"\0" and name.endswith("/") and long_name is None and "path" not in pax:
                # V7 marks a directory by the slash alone. The 100 bytes of a longer name, which has an extended
                # header, may be cut at a slash.
                label, size = _DIRECTORY, 0
            if header[345] and header[257:263] == b"ustar\0":
                name = f"{_text(header[345:500])}/{name}"
            if first is not None:
                name = name if long_name is None else long_name
                name, size, label = self._with_pax(pax, name, size, label, at)
                size = 0 if kind in _WITHOUT_CONTENT else size
            offset = at + BLOCK if kind != b"S" else self._after_sparse(at, header)
            if offset + size > stop:
                raise self._error(f"truncated inside {name} at byte {stop}; {_REMEDY}")
            start, at = at if first is None else first, offset + size + -size % BLOCK
            if first is not None:
                first, long_name, pax = None, None, {}
            self.end = at
            if label in (_DIRECTORY, _LABEL):
                continue
            # The substring test saves the pattern for almost all names.
            if ("__" in name or "._" in name) and _IGNORED.match(name):
                if not self.misread and _OF_MACOS.match(name) and _ENERGON_NAME.match(name):
                    self.misread = f"{name} was added by macOS, and Energon reads it as a part of a sample"
                continue
            match = _NAME.fullmatch(name)
            key, part = match.groups() if match else (name, "")
            yield Member(name, key, part, start, offset, size, label)
        if first is not None:
            raise self._error(f"truncated after the header at byte {first}; {_REMEDY}")
        if self._is_whole:
            self._check_end(at)

    def _error(self, problem: str) -> TarError:
        return TarError(f"{self.path}: {problem}", problem)

    def _unreadable(self, at: int, header: bytes) -> TarError:
        """Return the error for a block that is not a header."""
        if self._is_whole and self.end == 0 and at == 0:
            for magic, name in MAGICS.items():
                if header.startswith(magic):
                    return NotATarError(
                        f"{self.path} is compressed ({name}); decompress it to a plain .tar, which is read in place"
                    )
            reason = "its header is cut" if len(header) < BLOCK else "its first block is not a header"
            return NotATarError(f"{self.path} is not an uncompressed tar file: {reason}; {_REMEDY}")
        if len(header) < BLOCK:
            return self._error(f"truncated inside a header at byte {at + len(header)}; {_REMEDY}")
        return self._error(f"damaged header at byte {at}: its check sum is wrong; {_REMEDY}")

    def _extended(self, at: int, size: int) -> bytes:
        """Read the content of an extended header."""
        if size > _MOST_EXTENDED:
            raise self._error(
                f"extended header of {size:,} bytes at byte {at}, and at most {_MOST_EXTENDED:,} are read; {_REMEDY}"
            )
        content = self._read(at + BLOCK, size)
        if len(content) < size or at + BLOCK + size > self._stop:
            raise self._error(f"truncated inside a header at byte {at + BLOCK + len(content)}; {_REMEDY}")
        return content

    def _pax(self, content: bytes, at: int) -> dict[str, bytes]:
        """Parse the values of a PAX header: records of `LENGTH KEYWORD=VALUE\\n`, LENGTH of the whole record."""
        values: dict[str, bytes] = {}
        start, end = 0, len(content)
        while start < end:
            record = _PAX_RECORD.match(content, start)
            stop = start + int(record[1]) if record else 0
            if record is None or not record.end() < stop <= end or content[stop - 1 : stop] != b"\n":
                raise self._error(f"damaged PAX header at byte {at}; {_REMEDY}")
            values[record[2].decode("utf-8", "backslashreplace")] = content[record.end() : stop - 1]
            start = stop
        return values

    def _check_global(self, pax: dict[str, bytes], at: int) -> None:
        for name in pax:
            if name in ("path", "size") or name.startswith("GNU.sparse"):
                raise self._error(f"global header at byte {at} sets {name} of all members; write it again without")

    def _with_pax(self, pax: dict[str, bytes], name: str, size: int, label: str, at: int) -> tuple[str, int, str]:
        """Return name, size and kind of a member with a PAX header."""
        if (path := pax.get("path")) is not None:
            name = _text(path).rstrip("/")
        if (digits := pax.get("size")) is not None:
            if not digits.isdigit():
                raise self._error(f"damaged PAX header at byte {at}: its size is {digits!r}; {_REMEDY}")
            size = int(digits)
        if any(keyword.startswith("GNU.sparse") for keyword in pax):
            name, label = _text(pax["GNU.sparse.name"]) if "GNU.sparse.name" in pax else name, _SPARSE
        return name, size, label

    def _after_sparse(self, at: int, header: bytes) -> int:
        """Return the byte offset of the content of a sparse GNU file, after the blocks of its map."""
        at += BLOCK
        more = header[482]  # `isextended` of the GNU header; in the blocks of the map it is byte 504
        while more:
            block = self._extended(at - BLOCK, BLOCK)
            more, at = block[504], at + BLOCK
        return at

    def _check_end(self, end: int) -> None:
        """Check that at least two blocks of zeros, and nothing else, follow the last member."""
        if self._stop == 0:
            raise NotATarError(f"{self.path} is empty (0 bytes); copy it again")
        at = end
        while block := self._read(at, 1 << 16):
            if rest := block.lstrip(b"\0"):
                raise self._error(
                    f"data after the end of the archive at byte {at + len(block) - len(rest)}: a damaged header, or "
                    "concatenated tars; write it again"
                )
            at += len(block)
        if at < end + _END:
            raise self._error(
                f"no end-of-archive marker after byte {end}, so members may be missing; copy it again, or, if it is "
                f"complete, append one: truncate -s {end + _END} {self.path}"
            )


@contextmanager
def open_tar(path: Path, start: int = 0, stop: int | None = None) -> Iterator[TarReader]:
    """Open a whole tar, whose end is checked, or a range of its bytes.

    Args:
        path: the tar.
        start, stop: as in `TarReader`; None reads to the end of the file.

    Raises:
        TarError: it is not a regular file, or cannot be read; also as `TarReader` when iterated.
    """
    with _opened(path, is_range=stop is not None) as stream:
        size = status(stream).st_size if stop is None else stop
        yield TarReader(path, reading(path, stream, size), start, size, is_whole=stop is None)


def read_content(path: Path, member: Member) -> bytes:
    """Read the bytes of a member.

    Raises:
        TarError: it is not a regular file, or the tar was truncated since its headers were read.
    """
    if member.fault is not None:
        raise TarError(f"{path}: {member.fault}", member.fault)
    with _opened(path, is_range=True) as stream:
        content = reading(path, stream, member.offset + member.size)(member.offset, member.size)
    if len(content) < member.size:
        problem = f"truncated inside {member.name} at byte {member.offset + len(content)}; {_REMEDY}"
        raise TarError(f"{path}: {problem}", problem)
    return content


def key_faults(members: Iterable[Member]) -> list[tuple[Member, str]]:
    """Return the members of a key that cannot be read, or have the same part name, each with the reason."""
    seen: set[str] = set()
    faults: list[tuple[Member, str]] = []
    for member in members:
        if member.part in seen:
            faults.append((member, f"{member.name} occurs twice in the tar; write it again"))
        elif member.kind != FILE and member.fault is not None:
            faults.append((member, member.fault))
        seen.add(member.part)
    return faults


def _opened(path: Path, *, is_range: bool) -> AbstractContextManager[BinaryIO]:
    try:
        return nullcontext(open_shared(path)) if is_range and isinstance(path, RemotePath) else open_regular(path)
    except IrregularFile as error:
        raise TarError(f"{path} {error}; remove it, or copy the folder again") from error
    except OSError as error:
        raise_resource_error(error, path)
        raise TarError(f"{path} cannot be opened: {error.strerror}; check its name and permissions") from error


def reading(path: Path, stream: BinaryIO, stop: int) -> Read:
    """Return the function that reads a tar up to byte `stop`; it raises the errors of `TarReader`."""
    # Local files without a buffer, which would also read the first bytes of each content.
    source: Read = partial(read_range, stream)
    source = in_blocks(source, stop) if is_remote(path) else source

    def read(at: int, size: int) -> bytes:
        try:
            return source(at, size)
        except (OSError, MemoryError) as error:
            raise_resource_error(error, path)
            raise TarError(
                f"{path} cannot be read at byte {at}: {error}; check the file system, or copy it again"
            ) from error

    return read


def in_blocks(source: Read, stop: int) -> Read:
    """Return a function that reads a remote tar in blocks: a request for each header would be slower.

    A tar of small members is read completely, in growing blocks. Long contents are skipped, and blocks shrink.

    Args:
        source: requests bytes.
        stop: byte offset of the end of the range that is read.
    """
    start, length, data = 0, READ_AHEAD, b""

    def read(at: int, size: int) -> bytes:
        nonlocal start, length, data
        end = start + len(data)
        if not start <= at <= at + size <= end:
            if data:
                is_near = start <= at <= end + READ_AHEAD
                length = min(2 * length, _LARGEST_BLOCK) if is_near else max(length // 4, _SMALLEST_BLOCK)
            start, data = at, source(at, max(size, min(length, stop - at)))
        return data[at - start : at - start + size]

    return read


def _is_sound(header: bytes) -> bool:
    """Return whether a block is a header: its check sum is the sum of its bytes, with spaces for the sum itself."""
    if len(header) < BLOCK:
        return False
    # The lower half of Adler-32 is 1 + the sum of the bytes modulo 65521, in a tenth of the time of `sum`.
    # 256 is the sum of the eight spaces.
    field = header[148:156]
    recorded = _number(field)
    total = (zlib.adler32(header) & 0xFFFF) - (zlib.adler32(field) & 0xFFFF) + 256
    if recorded == total:
        return True
    if recorded == sum(header) - sum(field) + 256:  # sums above 65520
        return True
    # Some old programs sum signed bytes.
    return recorded == sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:]) + 256


def _number(field: bytes) -> int | None:
    """Parse an octal or base-256 number (GNU, star); None if it is neither, or negative. An empty field is 0."""
    try:
        number = int(field.rstrip(b"\0 "), 8)
    except ValueError:
        if field[0] == 0o200:  # base 256, positive; 0o377 marks a negative number
            return int.from_bytes(field[1:], "big")
        text = field.partition(b"\0")[0].strip()
        try:
            number = int(text, 8) if text else 0
        except ValueError:
            return None
    return number if number >= 0 else None


def _text(field: bytes) -> str:
    """Decode a field, which ends at a NUL."""
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")
