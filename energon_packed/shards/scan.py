"""Check of a tar of a dataset. Input: a tar. Output: `TarScan`, its members and the faults that Energon ignores.

Energon and WebDataset group members by key, which ends at the first dot of the file name, and expect the parts of a
sample to be adjacent. They lose or mix samples of other tars without a message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from energon_packed.errors import FormatError
from energon_packed.files import open_regular
from energon_packed.formats import CODECS, READ_ONLY
from energon_packed.formats.references import FOLDER
from energon_packed.shards.tar import ShardRows
from energon_packed.tarfiles import Member, NotATarError, TarError, key_faults, open_tar, reading

_MOST_PROBLEMS = 20  # per tar; a wrong name usually repeats in every member


@dataclass(frozen=True, slots=True)
class TarScan:
    """Members and faults of a tar.

    Attributes:
        path: path of the tar.
        members: members in order, up to the first damage.
        end: byte offset of the end of the last member.
        problems: the first 20 faults; empty for a valid tar.
        is_cut: the tar is truncated or damaged, so that its last pack may lack members.
    """

    path: Path
    members: list[Member]
    end: int
    problems: list[str]
    is_cut: bool = False

    def keys(self) -> list[str]:
        """Return the key of each pack, in order."""
        return [key for key, _ in groupby(self.members, key=_key)]

    def packs(self, first: int = 0, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield `__key__` and bytes by part name of `limit` packs, starting at pack `first`.

        Members that are not files are omitted, and also the last pack of a cut tar.
        """
        count = len(self.keys()) - self.is_cut  # the last pack of a cut tar may lack members
        last = count if limit is None else min(count, first + limit)
        with open_regular(self.path) as stream:
            read = reading(self.path, stream, self.end)
            for key, members in islice(groupby(self.members, key=_key), first, max(first, last)):
                parts = {m.part: read(m.offset, m.size) for m in members if m.fault is None}
                yield {"__key__": key, FOLDER: self.path.parent, **parts}

    def rows(self) -> ShardRows:
        """Return the index rows, without a content hash.

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


def _key(member: Member) -> str:
    return member.key


def scan_tar(path: Path) -> TarScan:
    """Read all headers of a tar.

    Raises:
        TarError: `path` is not an uncompressed tar, or cannot be read.
    """
    members: list[Member] = []
    # Damage ends the scan, but not the report: faults of the members before it are listed as well.
    damage: str | None = None
    with open_tar(path) as tar:
        try:
            members.extend(tar)
        except NotATarError:
            raise
        except TarError as error:
            damage = error.problem
        problems = [] if damage is None else [damage]
        if tar.misread:
            problems.append(f"{tar.misread}; write the tar again with COPYFILE_DISABLE=1 tar -c")
        problems += islice(_faults(members), _MOST_PROBLEMS)
    return TarScan(path, members, tar.end, problems[:_MOST_PROBLEMS], is_cut=damage is not None)


def _faults(members: list[Member]) -> Iterator[str]:
    """Yield the faults of members."""
    if not members:
        yield "no members"
    finished: set[str] = set()  # keys seen before; Energon starts a new sample each time that the key changes
    for key, group in groupby(members, key=_key):
        parts = list(group)
        for member in parts:
            if member.name == key:
                yield f"{member.name} has no key; name members KEY.PART"
            # A part with a dot is usually a key with a dot: `a.b.json` has the key `a`.
            elif "." in member.part and not _is_known(member.part):
                yield (
                    f"{member.name}: the key ends at the first dot, so it is {key!r} with the unknown part "
                    f"{member.part!r}; remove dots from keys and name images KEY.img{{sample}}_{{image}}.EXT"
                )
        if key in finished:
            yield f"{parts[0].name} is not adjacent to the other parts of {key}; store a key's parts together"
        finished.add(key)
        for _, fault in key_faults(parts):
            yield fault


def _is_known(part: str) -> bool:
    """Return whether any flavor has a part of this name."""
    return any(codec.part_filter(part) for codec in (*CODECS.values(), *READ_ONLY.values()))
