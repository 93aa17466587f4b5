"""What a tar holds, read from its headers alone, and what is wrong with it.

Members are grouped as Energon and WebDataset group them: the key ends at the first dot of the file name, and the parts
of a sample follow each other.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from energon_packed.errors import FormatError
from energon_packed.shards.tar import ShardRows

_SPLIT = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")  # WebDataset's own members
_KNOWN_PART = re.compile(r"json|(img\d+_\d+|input_ids|labels|cu_seqlens|loss_spans)\.\w+")
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file of a tar.

    Attributes:
        name: whole name.
        key, part: before and after the first dot of the file name; both empty where there is no dot.
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
    """A tar's members and faults.

    Attributes:
        path: of the tar.
        members: regular files in order, without WebDataset's own.
        end: byte offset of the end of the last member.
        problems: faults that make readers lose or mix samples, the first twenty; empty for a sound tar.
        is_cut: the tar ends early, inside its last pack.
    """

    path: Path
    members: list[Member]
    end: int
    problems: list[str]
    is_cut: bool = False

    def rows(self) -> ShardRows:
        """Index rows, without a hash of the content.

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
        FormatError: it is no uncompressed tar, or not readable.
    """
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
                    problems.append(f"it is cut inside {info.name}, at byte {size}; copy or pack it again")
                    break
                if info.isreg() and not _META.match(info.name):
                    found = _SPLIT.fullmatch(info.name)
                    key, part = found.groups() if found else ("", "")
                    members.append(Member(info.name, key, part, info.offset, info.offset_data, info.size))
            else:
                end = tar.offset
    except tarfile.TarError as error:
        raise FormatError(f"{path} is no tar file, or a compressed one: {error}") from error
    if not problems and (rest := _first_byte_after(path, end)) is not None:
        if size - end < tarfile.BLOCKSIZE:
            is_cut = True
            problems.append(f"it is cut inside a header, at byte {size}; copy or pack it again")
        else:
            what = "a damaged header, or tars that were joined"
            problems.append(f"there is data after its end, at byte {rest}: {what}; pack it again")
    if not problems and size < end + 2 * tarfile.BLOCKSIZE:
        problems.append("it has no end mark, so its last members may be missing; copy or pack it again")
    problems += _faults(members)
    return TarScan(path, members, end, problems[:_MOST_PROBLEMS], is_cut)


def _members(tar: tarfile.TarFile, problems: list[str]) -> Iterator[tarfile.TarInfo]:
    """Members until the first header that cannot be read."""
    while True:
        try:
            info = tar.next()
        except (tarfile.TarError, OSError) as error:
            problems.append(f"the header at byte {tar.offset} cannot be read: {error}; copy or pack it again")
            return
        if info is None:
            return
        tar.members = []  # type: ignore[attr-defined]  # the library would keep them all
        yield info


def _first_byte_after(path: Path, end: int) -> int | None:
    """Place of the first byte from `end` on that is not zero; the library takes a damaged header for the end."""
    with path.open("rb") as stream:
        stream.seek(end)
        while block := stream.read(1 << 20):
            if left := block.lstrip(b"\0"):
                return stream.tell() - len(left)
    return None


def _faults(members: list[Member]) -> Iterator[str]:
    """Names that readers would take apart wrongly."""
    if not members:
        yield "it has no member"
    finished: set[str] = set()
    current: str | None = None
    parts: set[str] = set()
    for member in members:
        if not member.key:
            yield f"{member.name} has no key before a dot; name members KEY.PART"
            continue
        if "." in member.part and not _KNOWN_PART.fullmatch(member.part):
            yield (
                f"{member.name}: its key ends at the first dot, as {member.key!r}, and no flavor has a part "
                f"{member.part!r}; keys must have no dots, images are named KEY.img{{sample}}_{{image}}.EXT"
            )
        if member.key != current:
            if member.key in finished:
                yield f"{member.name} does not follow the other parts of {member.key}; parts of a key must be adjacent"
            if current is not None:
                finished.add(current)
            current, parts = member.key, set()
        if member.part in parts:
            yield f"{member.name} is there twice"
        parts.add(member.part)
