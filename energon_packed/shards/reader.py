"""ShardReader: random access to packs in tars through their `.tar.idx`.

Tars are read, not mapped: a mapped file that another process cuts, or a disk that fails, ends the process (SIGBUS).
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from energon_packed.errors import DataChangedError, FormatError
from energon_packed.files import Streams
from energon_packed.foreign import IrregularFile, open_regular
from energon_packed.shards.opened import OpenedFiles
from energon_packed.tarfiles import Member, TarReader, key_faults, read_range


class ShardReader:
    """Random access to the packs of a list of shards.

    Offsets take 16 bytes of memory per pack. Each process opens a shard on first access, so a reader can be pickled
    and used after a fork.
    """

    def __init__(self, tars: Sequence[Path], digests: Mapping[Path, str] | None = None) -> None:
        """Read the `.tar.idx` of each shard.

        Args:
            tars: shards.
            digests: as for `OpenedFiles`.

        Raises:
            FormatError: a shard or its index is missing, or the two do not match.
        """
        offsets = [_read_offsets(tar) for tar in tars]
        self.tars = list(tars)
        self._opened = OpenedFiles(tars, digests)
        self._starts = np.concatenate([[0], *(index[:-1] for index in offsets)])[1:]
        self._ends = np.concatenate([[0], *(index[1:] for index in offsets)])[1:]
        self._first = np.cumsum([0, *(len(index) - 1 for index in offsets)]).tolist()
        self._streams = Streams()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, pack: int) -> dict[str, Any]:
        """All parts of a pack: `__key__`, and the bytes of each member by part name (text after the first dot).

        Raises:
            IndexError: `pack` is out of range.
            FormatError: the tar does not match its index, or cannot be read.
            DataChangedError: the tar is not the one that was opened.
        """
        raw: dict[str, Any] = {}
        for member, content in self.members(pack):
            if raw.setdefault("__key__", member.key) != member.key:
                tar = self.tars[self.locate(pack)[0]]
                raise FormatError(
                    f"{tar.with_suffix('.tar.idx')} does not match {tar.name}: pack {pack} has members of "
                    f"{member.key} and {raw['__key__']}; run energon-packed nv-meta, or pack again"
                )
            raw[member.part] = content
        return raw

    def part(self, pack: int, part: str) -> dict[str, Any]:
        """As `[i]`, but read only this part."""
        raw: dict[str, Any] = {}
        for member, content in self.members(pack, only=part):
            raw.setdefault("__key__", member.key)
            if member.part == part:
                raw[part] = content
        return raw

    def members(self, pack: int, only: str | None = None) -> Iterator[tuple[Member, bytes]]:
        """Yield each member of a pack with its content; with `only`, the contents of other parts are empty.

        Raises:
            IndexError, FormatError: as `[i]`; also for a member that is not a regular file, or occurs twice.
        """
        shard, start, end = self.locate(pack)
        read = self._window(shard, start, end, whole=only is None)
        found = list(TarReader(self.tars[shard], read, start, end))
        for _, fault in key_faults(found):
            raise FormatError(f"{self.tars[shard]}: {fault}")
        for member in found:
            yield member, read(member.offset, member.size) if only is None or member.part == only else b""

    def locate(self, pack: int) -> tuple[int, int, int]:
        """(shard number, start byte, end byte) of a pack."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} is out of range for {len(self)} packs")
        shard = bisect_right(self._first, pack) - 1
        return shard, int(self._starts[pack]), int(self._ends[pack])

    def _window(self, shard: int, start: int, end: int, *, whole: bool) -> Callable[[int, int], bytes]:
        """A function of (start, size) that gives bytes of a pack, from one read of all of it, or read by read."""
        if not whole:
            return lambda at, size: self._read(shard, at, size)
        data = self._read(shard, start, end - start)
        return lambda at, size: data[at - start : at - start + size]

    def _read(self, shard: int, start: int, size: int) -> bytes:
        tar = self.tars[shard]
        stream = self._stream(tar)
        try:
            self._opened.check(tar, os.fstat(stream.fileno()))
            data = read_range(stream.fileno(), start, size)
        except OSError as error:
            raise FormatError(
                f"{tar} cannot be read at byte {start}: {error.strerror}; check the file system, or copy the shard "
                "again"
            ) from error
        if len(data) < size:
            raise FormatError(f"{tar} ends inside bytes {start}..{start + size}; copy or pack it again")
        return data

    def _stream(self, tar: Path) -> BinaryIO:
        try:
            return self._streams.get(tar)
        except IrregularFile as error:
            raise DataChangedError(f"{tar} {error}, and was one when the dataset was opened; copy it again") from error
        except OSError as error:
            self._opened.check(tar)
            raise FormatError(
                f"{tar} cannot be opened: {error.strerror}; copy the complete folder, or pack it again"
            ) from error


def _read_offsets(tar: Path) -> npt.NDArray[np.int64]:
    """Offset of each sample, then the end of the last sample: int64 (packs + 1,)."""
    index = tar.with_suffix(".tar.idx")
    try:
        with open_regular(index) as stream:
            content = stream.read()
        offsets = np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8").astype(np.int64)
        size = tar.stat().st_size
    except IrregularFile as error:
        raise FormatError(f"{index} {error}; remove it, and run energon-packed nv-meta to index the folder") from error
    except OSError as error:
        raise FormatError(
            f"{error.filename}: {error.strerror}; copy the complete folder, or run energon-packed nv-meta to index it"
        ) from error
    if len(offsets) == 0 or (np.diff(offsets) <= 0).any() or offsets[-1] > size:
        raise FormatError(
            f"{index} does not match {tar.name} ({size} bytes); pack again or run energon-packed nv-meta"
        )
    return offsets
