"""Members of an uncompressed tar, by its headers: `TarIndex` for the whole file, `members_between` for one key.

Keys are those of WebDataset: a member is `KEY.PART`, split at the first dot of the base name, and the parts of a key
are adjacent. Only headers are read, 512 bytes each; contents are read by their byte ranges.
"""

import hashlib
import io
import os
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from energon_packed.errors import SourceError
from energon_packed.sources.base import changed_at
from energon_packed.sources.convert import converted

Int64 = npt.NDArray[np.int64]
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # WebDataset's own members
_HIDDEN = re.compile(r"(.*/)?\._|(.*/)?__MACOSX/")  # what macOS writes beside each file
_MAGICS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK": "zip"}


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a tar.

    Attributes:
        name: full member name.
        key, part: text before and after the first dot of the base name; `part` is "" without a dot.
        header: byte offset of its first header.
        offset, size: byte range of its content.
        is_link: a link to another member, with no content of its own.
    """

    name: str
    key: str
    part: str
    header: int
    offset: int
    size: int
    is_link: bool = False

    @property
    def extension(self) -> str:
        """What follows the last dot, in lower case."""
        return self.part.rpartition(".")[2].lower()


class TarIndex:
    """Where each key of a tar begins.

    Attributes:
        starts: int64 (keys,), byte offset of the first header of each key.
        repeated: int64 (k,), those of keys that occur elsewhere in the tar too.
        end: byte offset of the end of the last member.
    """

    def __init__(self, starts: Int64, repeated: Int64, end: int) -> None:
        self.starts = starts
        self.end = end
        self._repeated = frozenset(repeated.tolist())

    @classmethod
    def scan(cls, path: Path) -> "TarIndex":
        """Read all headers.

        Raises:
            SourceError: the tar is compressed, truncated or damaged, or has members after its end.
        """
        starts, hashes = array("q"), array("q")
        previous: str | None = None
        end = 0
        size = path.stat().st_size
        with _open(path) as stream:
            _check_kind(path, stream.read(6), size)
            stream.seek(0)
            for member in _members(path, stream, size):
                if member.key != previous:
                    starts.append(member.header)
                    hashes.append(hash(member.key))
                    previous = member.key
                end = member.offset + _padded(member.size)
        found = np.frombuffer(starts, dtype=np.int64).copy()
        counts = Counter(hashes) if len(set(hashes)) < len(hashes) else Counter()
        twice = np.array([counts[name] > 1 for name in hashes], dtype=bool)
        return cls(found, found[twice], end)

    def save(self, out: BinaryIO) -> None:
        """Write it as int64 numbers: end, number of keys, starts, repeated."""
        numbers = [self.end, len(self.starts), *self.starts.tolist(), *sorted(self._repeated)]
        out.write(np.array(numbers, dtype="<i8").tobytes())

    @classmethod
    def load(cls, file: Path) -> "TarIndex":
        """What `save` wrote."""
        numbers = np.fromfile(file, dtype="<i8").astype(np.int64)
        end, keys = numbers[:2].tolist()
        return cls(numbers[2 : 2 + keys], numbers[2 + keys :], end)

    def __len__(self) -> int:
        return len(self.starts)

    def bounds(self, number: int) -> tuple[int, int]:
        """Byte range of a key, headers and contents."""
        last = number + 1 == len(self.starts)
        return int(self.starts[number]), self.end if last else int(self.starts[number + 1])

    def number(self, address: int) -> int:
        """Number of the key whose byte range holds `address`."""
        return max(0, int(np.searchsorted(self.starts, address, side="right")) - 1)

    def is_repeated(self, start: int) -> bool:
        """Whether the key that begins there occurs elsewhere in the tar too."""
        return start in self._repeated


def tar_index(path: Path, kept: Path | None = None) -> TarIndex:
    """The index of a tar, read once per process and version of the file.

    Args:
        path: the tar.
        kept: file of `keep_index`, if there is one.

    Raises:
        SourceError: as `TarIndex.scan`.
    """
    return _tar_index(path, path.stat().st_size, changed_at(path), kept)


def keep_index(path: Path, folder: Path) -> Path:
    """A file with the index of a tar, so that other processes and later runs need not read its headers again.

    Raises:
        SourceError: as `TarIndex.scan`.
    """
    version = f"{path.resolve()} {path.stat().st_size} {changed_at(path)}"
    name = hashlib.sha256(version.encode()).hexdigest()[:24]
    return converted(path, folder, ".tarindex", lambda tar, out: tar_index(tar).save(out), name=name)


def members_between(path: Path, start: int, stop: int) -> list[Member]:
    """Members whose headers are in bytes [start, stop) of a tar, in order.

    Raises:
        SourceError: the file changed since it was indexed.
    """
    with _open(path) as stream:
        stream.seek(start)
        return list(_members(path, stream, stop, is_whole=False))


def read_content(path: Path, member: Member) -> bytes:
    """The bytes of a member."""
    with _open(path) as stream:
        return os.pread(stream.fileno(), member.size, member.offset)


@lru_cache(maxsize=64)
def _tar_index(path: Path, size: int, changed: int, kept: Path | None) -> TarIndex:
    return TarIndex.scan(path) if kept is None or not kept.exists() else TarIndex.load(kept)


def _open(path: Path) -> io.FileIO:
    try:
        return io.FileIO(path)  # without a buffer: it would read the first bytes of each content too
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error


def _check_kind(path: Path, magic: bytes, size: int) -> None:
    for start, name in _MAGICS.items():
        if magic.startswith(start):
            raise SourceError(f"{path} is compressed ({name}); decompress it to a plain .tar, which is read in place")
    if size == 0:
        raise SourceError(f"{path} is empty (0 bytes); copy it again")


def _members(path: Path, stream: io.FileIO, stop: int, *, is_whole: bool = True) -> Iterator[Member]:
    """Members from the position of `stream` up to byte `stop`; `is_whole` checks how the tar ends."""
    end = stream.tell()
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while end < stop and (info := tar.next()) is not None:
                if info.offset >= stop:  # behind a header of the whole tar that follows our last member
                    break
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
                if info.issparse():
                    raise SourceError(f"{path} holds the sparse file {info.name}; write it again without --sparse")
                end = info.offset_data + (_padded(info.size) if info.isreg() else 0)
                if info.offset_data + info.size > stop:
                    raise SourceError(f"{path} is truncated inside {info.name} at byte {stop}; copy or write it again")
                if (info.isreg() or info.islnk() or info.issym()) and not _is_ignored(info.name):
                    key, part = _split(info.name)
                    yield Member(
                        info.name, key, part, info.offset, info.offset_data, info.size if info.isreg() else 0,
                        not info.isreg(),
                    )  # fmt: skip
    except (tarfile.TarError, OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        what = "is not an uncompressed tar file" if end == 0 else f"has an unreadable header after byte {end}"
        raise SourceError(f"{path} {what}: {error}; copy or write it again") from error
    if is_whole:
        _check_end(path, stream.fileno(), end, stop)


def _check_end(path: Path, file: int, end: int, size: int) -> None:
    """A tar ends with two blocks of zeros, and nothing but zeros after them; tarfile stops anywhere."""
    if size < end + tarfile.BLOCKSIZE and os.pread(file, tarfile.BLOCKSIZE, end).strip(b"\0"):
        raise SourceError(f"{path} is truncated inside a header at byte {size}; copy or write it again")
    if size < end + 2 * tarfile.BLOCKSIZE:
        raise SourceError(
            f"{path} has no end-of-archive marker after byte {end}, so members may be missing; copy it again, or, if "
            f"it is complete, append one: truncate -s {end + 2 * tarfile.BLOCKSIZE} {path}"
        )
    at = end
    while block := os.pread(file, 1 << 16, at):
        if rest := block.lstrip(b"\0"):
            raise SourceError(
                f"{path} has data after its end, at byte {at + len(block) - len(rest)}: a damaged header, or "
                "concatenated tars; write it again"
            )
        at += len(block)


def _is_ignored(name: str) -> bool:
    return _META.match(name) is not None or _HIDDEN.match(name) is not None


def _split(name: str) -> tuple[str, str]:
    if not name.isascii():  # bytes that are not UTF-8, as of old archives, stay visible: caf\\xe9
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def _padded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE
