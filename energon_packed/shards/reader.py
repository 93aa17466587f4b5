"""ShardReader: random access to packs in memory-mapped tars through their `.tar.idx`."""

import io
import mmap
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import FormatError
from energon_packed.system import most_open

_BLOCK = tarfile.BLOCKSIZE
_MOST_OPEN = 128  # maximum number of mapped shards; each uses a file descriptor


class ShardReader:
    """Random access to the packs of a list of shards.

    Offsets take 16 bytes of memory per pack. Each process maps a shard on first access, so a reader can be pickled and
    used after a fork.
    """

    def __init__(self, tars: Sequence[Path]) -> None:
        """Read the `.tar.idx` of each shard.

        Raises:
            FormatError: a shard or its index is missing, or the two do not match.
        """
        self._open(list(tars), [_read_offsets(tar) for tar in tars])

    @classmethod
    def from_offsets(cls, offsets: Mapping[Path, Sequence[int]]) -> "ShardReader":
        """Create a reader for tars without `.tar.idx` from the offsets that those files would hold."""
        reader = cls.__new__(cls)
        reader._open(list(offsets), [np.asarray(index, dtype=np.int64) for index in offsets.values()])
        return reader

    def _open(self, tars: list[Path], offsets: list[npt.NDArray[np.int64]]) -> None:
        self.tars = tars
        self._starts = np.concatenate([[0], *(index[:-1] for index in offsets)])[1:]
        self._ends = np.concatenate([[0], *(index[1:] for index in offsets)])[1:]
        self._first = np.cumsum([0, *(len(index) - 1 for index in offsets)])
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._starts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    def __getitem__(self, pack: int) -> dict[str, Any]:
        """All parts of a pack: `__key__`, and the bytes of each member by part name (text after the first dot).

        Raises:
            IndexError: `pack` is out of range.
            FormatError: the tar does not match its index.
        """
        raw: dict[str, Any] = {}
        for name, content in self.members(pack):
            key, part = split_name(name)
            raw.setdefault("__key__", key)
            raw[part] = content
        return raw

    def part(self, pack: int, part: str) -> dict[str, Any]:
        """As `[i]`, but read only this part."""
        raw: dict[str, Any] = {}
        for name, content in self.members(pack, only=part):
            key, found = split_name(name)
            raw.setdefault("__key__", key)
            if found == part:
                raw[part] = content
        return raw

    def members(self, pack: int, only: str | None = None) -> Iterator[tuple[str, bytes]]:
        """Yield (member name, content) for each member of a pack; with `only`, other contents may be empty.

        Raises:
            IndexError, FormatError: as `[i]`.
        """
        shard, start, end = self.locate(pack)
        data = self._map(shard)
        at = start
        while at < end:
            header = data[at : at + _BLOCK]
            if header[156:157] not in (b"0", b"\0") or (header[257:263] == b"ustar\0" and header[345:346] != b"\0"):
                yield from self._others(shard, at, end)
                return
            try:
                size = int(header[124:136].rstrip(b" \0"), 8)
                name = header[:100].rstrip(b"\0").decode()
            except ValueError as error:
                raise FormatError(
                    f"{self.tars[shard]} has an invalid tar header at byte {at}: {error}; pack it again"
                ) from error
            content = data[at + _BLOCK : at + _BLOCK + size] if only is None or name.endswith(f".{only}") else b""
            if at + _BLOCK + size > len(data) or not name:
                raise FormatError(f"{self.tars[shard]} is truncated or damaged at byte {at}; pack it again")
            yield name, content
            at += _BLOCK + size + (-size % _BLOCK)

    def locate(self, pack: int) -> tuple[int, int, int]:
        """(shard number, start byte, end byte) of a pack."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} is out of range for {len(self)} packs")
        shard = int(np.searchsorted(self._first, pack, side="right")) - 1
        return shard, int(self._starts[pack]), int(self._ends[pack])

    def _others(self, shard: int, start: int, end: int) -> Iterator[tuple[str, bytes]]:
        """Yield members with long names or other tar extensions, as written by other tools."""
        data = io.BytesIO(self._map(shard)[start:end] + bytes(2 * _BLOCK))
        try:
            with tarfile.open(fileobj=data) as tar:
                for member in tar:
                    stream = tar.extractfile(member)
                    if stream is not None:
                        yield member.name, stream.read()
        except tarfile.TarError as error:
            raise FormatError(f"{self.tars[shard]} is damaged after byte {start}: {error}") from error

    def _map(self, shard: int) -> mmap.mmap:
        if self._process != os.getpid():  # after a fork: open new maps instead of using the parent's
            self._maps, self._process = OrderedDict(), os.getpid()
        if shard in self._maps:
            self._maps.move_to_end(shard)
            return self._maps[shard]
        with self.tars[shard].open("rb") as stream:
            self._maps[shard] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._maps) > most_open(_MOST_OPEN):
            self._maps.popitem(last=False)
        return self._maps[shard]


def split_name(name: str) -> tuple[str, str]:
    """(key, part) of a member: the key ends at the first dot of the file name."""
    folder, _, base = name.rpartition("/")
    stem, _, part = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, part


def _read_offsets(tar: Path) -> npt.NDArray[np.int64]:
    """Offset of each sample, then the end of the last sample: int64 (packs + 1,)."""
    index = tar.with_suffix(".tar.idx")
    try:
        offsets = np.fromfile(index, dtype="<u8").astype(np.int64)
        size = tar.stat().st_size
    except OSError as error:
        raise FormatError(
            f"{error.filename}: {error.strerror}; copy the complete folder, or run energon-packed nv-meta to index it"
        ) from error
    if len(offsets) == 0 or (np.diff(offsets) <= 0).any() or offsets[-1] > size:
        raise FormatError(
            f"{index} does not match {tar.name} ({size} bytes); pack again or run energon-packed nv-meta"
        )
    return offsets
