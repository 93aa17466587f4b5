"""ShardReader: random access to packs. Input: tars with `.tar.idx`, and a pack index. Output: the parts of a pack.

Tars are read, not mapped: if another process truncates a mapped file, or the disk fails, the process dies (SIGBUS).

Loaders open each tar by name when they need it, hours after they read the counts of the dataset. If a tar was packed
again in the meantime, it has other packs at the same offsets, and a run would read old and new data in one epoch.
`OpenedFiles` detects that.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from energon_packed.errors import DataChangedError, FormatError
from energon_packed.files import IrregularFile, Streams, open_regular, read_range, status
from energon_packed.formats.references import FOLDER, MEDIA_PART, MEDIA_ROOT, moved_folders
from energon_packed.shards.manifest import PackingManifest
from energon_packed.storage import RemotePath, locked, read_ranges, recent_status, stamp_of, statuses
from energon_packed.system import raise_resource_error
from energon_packed.tarfiles import Member, TarReader, in_blocks, key_faults

_KEPT = 1 << 21
"""Offsets that a reader keeps, 16 MiB: in each process, the packs of about 2,000,000 are found without a read."""
_OFFSET = 8  # bytes of an entry of .tar.idx
Int64 = npt.NDArray[np.int64]


class ShardReader:
    """Random access to the packs of a list of shards by pack index, counted over all shards.

    The number of packs of a shard follows from the size of its `.tar.idx`, which is read when a pack of the shard is
    read first. Each process opens a shard on first access, so a reader can be pickled and used after a fork.
    """

    def __init__(
        self,
        tars: Sequence[Path],
        digests: Mapping[Path, str] | None = None,
        media_root: Mapping[str, str] | None = None,
        opened: "OpenedFiles | None" = None,
        found: Mapping[Path, os.stat_result] | None = None,
    ) -> None:
        """Count the packs of each shard.

        Args:
            tars: shards.
            digests: as in `OpenedFiles`.
            media_root: folders of referenced media that moved, new folder by old folder.
            opened: the state of the shards that later reads compare with, instead of the state in `found`.
            found: `statuses` of the files of `files_of`; by default they are requested here.

        Raises:
            FormatError: a shard or its index is missing, or an index ends inside an entry.
            ConfigError: `media_root` is invalid.
        """
        found = statuses(files_of(tars)) if found is None else found
        counts = [_count_packs(tar, found) for tar in tars]
        self.tars = list(tars)
        self._media_root = moved_folders(media_root)
        self._opened = opened or OpenedFiles(tars, digests, found)
        # Index of the first pack of each shard, for the binary search of `locate`. A list: bisect is slower on arrays.
        self._first = np.cumsum([0, *counts]).tolist()
        self._indexes: dict[int, Int64] = {}  # offsets by shard, the shard used last at the end
        self._streams = Streams()

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, pack: int) -> dict[str, Any]:
        """Return `__key__` and the bytes of each member by part name (the name after the first dot).

        It also has what `complete_parts` needs to find referenced media.

        Raises:
            IndexError: `pack` is out of range.
            FormatError: the tar does not match its index, or cannot be read.
            DataChangedError: the tar was replaced or changed since this reader was made.
        """
        return self.parts(pack)

    def packs(self, packs: Sequence[int]) -> list[dict[str, Any]]:
        """Return what `[pack]` returns of several packs, whose bytes in object stores are requested together."""
        requested = self._requested(packs)
        return [self.parts(pack, data=requested.get(pack)) for pack in packs]

    def parts(self, pack: int, only: Container[str] | None = None, data: bytes | None = None) -> dict[str, Any]:
        """Return what `[pack]` returns.

        Args:
            pack: index of the pack.
            only: names of parts; the contents of other parts are not read, and empty.
            data: the bytes of the pack, if they were read before.

        Raises:
            IndexError, FormatError, DataChangedError: as `[pack]`.
        """
        raw: dict[str, Any] = {}
        for member, content in self.members(pack, only=only, data=data):
            raw.setdefault("__key__", member.key)
            raw[member.part] = content
        if MEDIA_PART in raw:
            raw |= {FOLDER: self.tars[self.locate(pack)[0]].parent, MEDIA_ROOT: self._media_root}
        return raw

    def part(self, pack: int, part: str) -> dict[str, Any]:
        """Return `__key__` and one part of a pack, without reading the contents of other parts."""
        raw: dict[str, Any] = {}
        for member, content in self.members(pack, only=(part,)):
            raw.setdefault("__key__", member.key)
            if member.part == part:
                raw[part] = content
        return raw

    def members(
        self, pack: int, only: Container[str] | None = None, data: bytes | None = None
    ) -> Iterator[tuple[Member, bytes]]:
        """Yield each member of a pack with its content. The arguments have the same meaning as for `parts`.

        Raises:
            IndexError, FormatError: as `[i]`; also for a member that is not a regular file, or occurs twice.
        """
        shard, start, end = self.locate(pack)
        read = self._window(shard, start, end, data) if only is None else self._reads(shard, end)
        members = list(TarReader(self.tars[shard], read, start, end))
        # The index of another tar with equal sizes has offsets in the middle of packs.
        if len(keys := sorted({member.key for member in members})) > 1:
            tar = self.tars[shard]
            raise FormatError(
                f"{tar.with_suffix('.tar.idx')} does not match {tar.name}: pack {pack} has members of "
                f"{' and '.join(keys[:2])}; run energon-packed nv-meta, or pack again"
            )
        for _, fault in key_faults(members):
            raise FormatError(f"{self.tars[shard]}: {fault}")
        for member in members:
            yield member, read(member.offset, member.size) if only is None or member.part in only else b""

    def check_unchanged(self, pack: int) -> None:
        """Refuse the pack if its tar was replaced, changed or removed. Raises DataChangedError."""
        self._opened.check(self.tars[self.locate(pack)[0]])

    def locate(self, pack: int) -> tuple[int, int, int]:
        """Return (shard index, start byte, end byte) of a pack.

        Raises:
            IndexError: `pack` is out of range.
            FormatError: as `offsets`.
        """
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} is out of range for {len(self)} packs")
        shard = bisect_right(self._first, pack) - 1
        offsets, at = self.offsets(shard), pack - self._first[shard]
        return shard, int(offsets[at]), int(offsets[at + 1])

    def offsets(self, shard: int) -> Int64:
        """Return the offset of each pack of a shard, then the end of the last pack: int64 (packs + 1,).

        Raises:
            FormatError: the index of the shard cannot be read, or does not match the shard.
            DataChangedError: and the tar was replaced or changed since this reader was made.
        """
        # Popped and put back: another thread may drop it at the same time.
        offsets = self._indexes.pop(shard, None)
        if offsets is None:
            with locked(self.tars[shard]):  # threads that read ahead wait for the same index
                offsets = self._indexes.get(shard)
                if offsets is None:
                    offsets = self._indexes[shard] = self._read_offsets(shard)
        self._indexes[shard] = offsets
        return offsets

    def _read_offsets(self, shard: int) -> Int64:
        """Read the index of a shard, and drop others if all are too many."""
        try:
            offsets = _read_offsets(self.tars[shard], self._first[shard + 1] - self._first[shard])
        except FormatError:
            self._opened.check(self.tars[shard])  # an index of another tar is a DataChangedError
            raise
        # Only with a new index: the sum over thousands of shards would take longer than to read a pack.
        while self._indexes and sum(map(len, list(self._indexes.values()))) + len(offsets) > _KEPT:
            self._indexes.pop(next(iter(list(self._indexes)), shard), None)
        return offsets

    def first(self, shard: int) -> int:
        """Return the index of the first pack of a shard."""
        return int(self._first[shard])

    def _window(self, shard: int, start: int, end: int, data: bytes | None) -> Callable[[int, int], bytes]:
        """Return a function (start, size) for bytes of a pack, from one read of the whole pack.

        The parts of a pack are adjacent, so one read is faster than a read per header and content.
        """
        content = self._read(shard, start, end - start) if data is None else data
        return lambda at, size: content[at - start : at - start + size]

    def _reads(self, shard: int, end: int) -> Callable[[int, int], bytes]:
        """Return a function (start, size) for bytes of a pack, from a read per call."""
        read = partial(self._read, shard)
        return in_blocks(read, end) if isinstance(self.tars[shard], RemotePath) else read

    def _requested(self, packs: Sequence[int]) -> dict[int, bytes]:
        """Request packs in object stores together, and leave out those that are not complete.

        Raises:
            DataChangedError, OSError: of any of them; reading a pack alone names its cause.
        """
        ranges: dict[int, tuple[str, int, int]] = {}
        for pack in dict.fromkeys(packs):
            shard, start, end = self.locate(pack)
            if isinstance(tar := self.tars[shard], RemotePath):
                self._opened.check(tar, is_recent=True)
                ranges[pack] = str(tar), start, end - start
        if len(ranges) < 2:
            return {}
        contents = zip(ranges, read_ranges(list(ranges.values())), strict=True)
        return {pack: content for pack, content in contents if len(content) == ranges[pack][2]}

    def _read(self, shard: int, start: int, size: int) -> bytes:
        tar = self.tars[shard]
        try:
            if isinstance(tar, RemotePath):
                self._opened.check(tar, recent_status(tar))
                data = tar.read_range(start, size)
            else:
                stream = self._stream(tar)
                # Before every read: the open file itself can be overwritten in place. Its status needs no path lookup.
                self._opened.check(tar, status(stream))
                data = read_range(stream, start, size)
        except (OSError, MemoryError) as error:
            raise_resource_error(error, tar)
            self._opened.check(tar)  # an object that was removed is a DataChangedError
            raise FormatError(
                f"{tar} cannot be read at byte {start}: {error}; check the file system, or copy the shard again"
            ) from error
        if len(data) < size:
            self._opened.check(tar)
            raise FormatError(f"{tar} ends inside bytes {start}..{start + size}; copy or pack it again")
        return data

    def _stream(self, tar: Path) -> BinaryIO:
        try:
            return self._streams.get(tar)
        except IrregularFile as error:
            raise DataChangedError(f"{tar} {error}, and was one when the dataset was opened; copy it again") from error
        except OSError as error:
            raise_resource_error(error, tar)
            self._opened.check(tar)  # a removed tar is a DataChangedError, as a replaced tar is
            raise FormatError(
                f"{tar} cannot be opened: {error.strerror}; copy the complete folder, or pack it again"
            ) from error


def files_of(tars: Sequence[Path]) -> list[Path]:
    """Return shards and their indexes."""
    return [*tars, *[tar.with_suffix(".tar.idx") for tar in tars]]


class OpenedFiles:
    """Detects changes of files: records size and modification time of every file when it is created.

    A tar with another time, such as a copy, counts as unchanged if packing.json still lists the same hash.

    Args:
        files: tars of a dataset, or input files.
        digests: SHA-256 of the tars, as packing.json lists them.
        found: `statuses` of the files; by default they are requested here.
        remedy: end of the messages about changed files.

    Raises:
        FormatError: a file is missing.
    """

    def __init__(
        self,
        files: Iterable[Path],
        digests: Mapping[Path, str] | None = None,
        found: Mapping[Path, os.stat_result] | None = None,
        remedy: str = "open the dataset again; states that were saved before belong to the old content",
    ) -> None:
        self._digests = dict(digests or {})
        self._remedy = remedy
        files = list(files)
        found = statuses(files) if found is None else found
        self._stamps = {file: _first_stamp(file, found) for file in files}

    def __contains__(self, file: Path) -> bool:
        return file in self._stamps

    def check(self, file: Path, status: os.stat_result | None = None, *, is_recent: bool = False) -> None:
        """Refuse a file that changed since this object was created.

        Args:
            file: an element of `files`.
            status: status of the open file; by default the status of the file that has this name now.
            is_recent: accept the status of `recent_status` as that status.

        Raises:
            DataChangedError: it was replaced, changed or removed.
        """
        try:
            stamp = stamp_of(status or (recent_status(file) if is_recent else file.stat()))
        except OSError as error:
            raise_resource_error(error, file)
            raise DataChangedError(
                f"{file} cannot be read any more ({error.strerror}): it was removed or replaced while it was in use; "
                f"{self._remedy}"
            ) from error
        before = self._stamps[file]
        if stamp == before:
            return
        # A copied or restored tar has a new time. packing.json decides, as hashing the tar would stop the training.
        if stamp[0] != before[0] or not self._is_listed(file):
            sizes = f"{before[0]} bytes before, {stamp[0]} now" if stamp[0] != before[0] else "by its time"
            raise DataChangedError(f"{file} was replaced or changed while it was in use ({sizes}); {self._remedy}")
        self._stamps[file] = stamp  # packing.json is read once for each change, not for each pack

    def check_all(self) -> None:
        """Run `check` for every file.

        Raises:
            DataChangedError: as `check`.
        """
        found = statuses(self._stamps)
        for file in self._stamps:
            self.check(file, found.get(file))

    def _is_listed(self, tar: Path) -> bool:
        """Return whether packing.json still lists the hash that this tar had."""
        if tar not in self._digests:
            return False
        try:
            manifest = PackingManifest.load_if_there(tar.parent)
        except FormatError:
            return False
        shards = manifest.shards if manifest is not None else ()
        return any(shard.name == tar.name and shard.sha256 == self._digests[tar] for shard in shards)


def _first_stamp(file: Path, found: Mapping[Path, os.stat_result]) -> tuple[int, int]:
    try:
        return stamp_of(found.get(file) or file.stat())
    except OSError as error:
        raise_resource_error(error, file)
        raise FormatError(f"{file}: {error.strerror}; restore the file, or correct its permissions") from error


def _count_packs(tar: Path, found: Mapping[Path, os.stat_result]) -> int:
    """Return the number of packs by the size of the index, which has the offset of each pack and the end of the last.

    Args:
        tar: the shard.
        found: `statuses` of the indexes.

    Raises:
        FormatError: the index is missing, or ends inside an entry.
    """
    index = tar.with_suffix(".tar.idx")
    with _errors_of(index):
        entry = found.get(index) or index.stat()
        if not S_ISREG(entry.st_mode):
            open_regular(index).close()  # raises the reason
    if entry.st_size % _OFFSET or not entry.st_size:
        raise FormatError(
            f"{index} has {entry.st_size} bytes, and must have 8 for each pack of {tar.name} and 8 for its end; pack "
            "again or run energon-packed nv-meta"
        )
    return entry.st_size // _OFFSET - 1


def _read_offsets(tar: Path, packs: int) -> Int64:
    """Read the offset of each pack, then the end of the last pack: int64 (packs + 1,).

    Raises:
        FormatError: the index cannot be read, or does not match the tar.
    """
    index = tar.with_suffix(".tar.idx")
    with _errors_of(index):
        if isinstance(index, RemotePath):
            content = index.read_bytes()  # one request; a stream would request the status first
        else:
            with open_regular(index) as stream:
                content = stream.read()
        size = recent_status(tar).st_size
    offsets = np.frombuffer(content[: len(content) // _OFFSET * _OFFSET], dtype="<u8").astype(np.int64)
    # Every pack has at least a header, so offsets increase.
    if len(offsets) != packs + 1 or (np.diff(offsets) <= 0).any() or offsets[-1] > size:
        raise FormatError(
            f"{index} does not match {tar.name} ({size} bytes); pack again or run energon-packed nv-meta"
        )
    return offsets


@contextmanager
def _errors_of(index: Path) -> Iterator[None]:
    """Convert errors of reading an index to FormatError."""
    try:
        yield
    except IrregularFile as error:
        raise FormatError(f"{index} {error}; remove it, and run energon-packed nv-meta to index the folder") from error
    except OSError as error:
        raise_resource_error(error, index)
        raise FormatError(
            f"{error.filename}: {error.strerror}; copy the complete folder, or run energon-packed nv-meta to index it"
        ) from error
