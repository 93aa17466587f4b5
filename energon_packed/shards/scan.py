"""Scan the headers of a tar: list its members and detect faults.

Members are grouped as in Energon and WebDataset: the key ends at the first dot of the file name, and the parts of a
sample are adjacent.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from energon_packed.errors import FormatError
from energon_packed.foreign import IrregularFile, open_regular
from energon_packed.formats import CODECS, READ_ONLY
from energon_packed.shards.reader import META
from energon_packed.shards.tar import ShardRows

_SPLIT = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
_MOST_PROBLEMS = 20
NOT_FOLLOWED = ", which is never followed; store files only"
"""End of the problem of a member that is a link or a device."""


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file of a tar.

    Attributes:
        name: full member name.
        key, part: text before and after the first dot of the file name; both empty without a dot.
        header: byte offset of its first header.
        offset, size: byte offset and size of its content.
    """

    name: str
    key: str
    part: str
    header: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TarScan:
    """Members and faults of a tar.

    Attributes:
        path: path of the tar.
        members: regular files in order, without WebDataset's metadata members.
        end: byte offset of the end of the last member.
        problems: first twenty faults that cause readers to lose or mix samples; empty for a valid tar.
        is_cut: the tar is truncated inside its last pack.
    """

    path: Path
    members: list[Member]
    end: int
    problems: list[str]
    is_cut: bool = False

    def rows(self) -> ShardRows:
        """Index rows, without a content hash.

        Raises:
            FormatError: the tar has problems.
        """
        if self.problems:
            raise FormatError(f"{self.path}: {self.problems[0]}")
        keys: list[str] = []
        offsets: list[int] = []
        parts: list[tuple[int, str, int, int]] = []
        for member in self.members:
            if not keys or keys[-1] != member.key:
                keys.append(member.key)
                offsets.append(member.header)
            parts.append((len(keys) - 1, member.part, member.offset, member.size))
        size = self.path.stat().st_size
        return ShardRows(
            name=self.path.name, size=size, sha256="", keys=keys, offsets=[*offsets, self.end], parts=parts
        )


def scan_tar(path: Path) -> TarScan:
    """Read all headers of a tar.

    Raises:
        FormatError: `path` is not an uncompressed tar, or not a regular file.
        OSError: it cannot be read.
    """
    try:
        open_regular(path).close()
    except IrregularFile as error:
        raise FormatError(f"{path} {error}; remove it, or copy the folder again") from error
    members: list[Member] = []
    problems: list[str] = []
    size = path.stat().st_size
    end = 0
    is_cut = False
    try:
        with tarfile.open(path, "r:") as tar:
            for info in _members(tar, problems):
                end = info.offset_data + info.size + (-info.size % tarfile.BLOCKSIZE)
                if end > size:
                    is_cut = True
                    problems.append(f"truncated inside {info.name} at byte {size}; copy or pack it again")
                    break
                if not (info.isreg() or info.isdir()):
                    what = "link" if info.issym() or info.islnk() else "device"
                    problems.append(f"{info.name} is a {what}{NOT_FOLLOWED}")
                if info.isreg() and not META.match(info.name):
                    found = _SPLIT.fullmatch(info.name)
                    key, part = found.groups() if found else ("", "")
                    members.append(Member(info.name, key, part, info.offset, info.offset_data, info.size))
            else:
                end = tar.offset
    except tarfile.TarError as error:
        raise FormatError(f"{path} is not an uncompressed tar file: {error}") from error
    if not problems and (rest := _first_byte_after(path, end)) is not None:
        if size - end < tarfile.BLOCKSIZE:
            is_cut = True
            problems.append(f"truncated inside a header at byte {size}; copy or pack it again")
        else:
            what = "a damaged header or concatenated tars"
            problems.append(f"data after the end of the archive at byte {rest}: {what}; pack it again")
    if not problems and size < end + 2 * tarfile.BLOCKSIZE:
        problems.append("no end-of-archive marker, so the last members may be missing; copy or pack it again")
    problems += _faults(members)
    return TarScan(path, members, end, problems[:_MOST_PROBLEMS], is_cut)


def _members(tar: tarfile.TarFile, problems: list[str]) -> Iterator[tarfile.TarInfo]:
    """Yield members up to the first unreadable header."""
    while True:
        try:
            info = tar.next()
        except (tarfile.TarError, OSError) as error:
            problems.append(f"unreadable header at byte {tar.offset}: {error}; copy or pack it again")
            return
        if info is None:
            return
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
        yield info


def _first_byte_after(path: Path, end: int) -> int | None:
    """Offset of the first nonzero byte at or after `end`; tarfile treats a damaged header as the end."""
    with path.open("rb") as stream:
        stream.seek(end)
        while block := stream.read(1 << 20):
            if left := block.lstrip(b"\0"):
                return stream.tell() - len(left)
    return None


def _faults(members: list[Member]) -> Iterator[str]:
    """Yield faults in member names that readers would misinterpret."""
    if not members:
        yield "no members"
    finished: set[str] = set()
    current: str | None = None
    parts: set[str] = set()
    for member in members:
        if not member.key:
            yield f"{member.name} has no key; name members KEY.PART"
            continue
        if "." in member.part and not _is_known(member.part):
            yield (
                f"{member.name}: the key ends at the first dot, so it is {member.key!r} with the unknown part "
                f"{member.part!r}; remove dots from keys and name images KEY.img{{sample}}_{{image}}.EXT"
            )
        if member.key != current:
            if member.key in finished:
                yield f"{member.name} is not adjacent to the other parts of {member.key}; store a key's parts together"
            if current is not None:
                finished.add(current)
            current, parts = member.key, set()
        if member.part in parts:
            yield f"{member.name} occurs twice"
        parts.add(member.part)


def _is_known(part: str) -> bool:
    """Whether a flavor has a part of this name."""
    return any(codec.part_filter(part) for codec in (*CODECS.values(), *READ_ONLY.values()))
