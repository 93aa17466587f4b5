"""Finding packs: in one tar, or in a dataset folder by key."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest
from energon_packed.shards.index import open_sqlite_index
from energon_packed.shards.manifest import NewerFormatError
from energon_packed.shards.nv_meta import NV_META
from energon_packed.shards.scan import TarScan, scan_tar
from energon_packed.shards.split import dataset_folder


@dataclass(frozen=True)
class PackFinder:
    """Packs of a tar or of a dataset folder, without Energon.

    Attributes:
        tars: where packs are looked for, in order.
        folder: the dataset folder, or None for a lone tar.
    """

    tars: list[Path]
    folder: Path | None

    @classmethod
    def open(cls, path: Path) -> "PackFinder":
        """A tar, or a folder of tars with or without `.nv-meta`.

        Raises:
            FormatError: neither.
        """
        if path.is_file():
            return cls([path], path.parent if (path.parent / NV_META).is_dir() else None)
        if any(path.glob("*.tar")):
            return cls(sorted(path.glob("*.tar")), path if (path / NV_META).is_dir() else None)
        folder = dataset_folder(path)
        return cls(sorted(folder.glob("*.tar")), folder)

    @cached_property
    def manifest(self) -> PackingManifest | None:
        """packing.json, where there is one."""
        try:
            return PackingManifest.load(self.folder) if self.folder else None
        except NewerFormatError:
            raise
        except FormatError:
            return None

    def check_extractable(self) -> None:
        """Refuse to extract from a tar with members that are not files.

        Raises:
            FormatError: a member is a link, a FIFO, a device or a sparse file.
        """
        for tar in self.tars:
            for member in scan_tar(tar).members:
                if member.fault is not None:
                    raise FormatError(f"{tar}: {member.fault}")

    def first(self, limit: int) -> Iterator[dict[str, Any]]:
        """Raw parts of the first packs; a tar with faults gives those before the first fault that hides them."""
        for tar in self.tars:
            scan = scan_tar(tar)
            for raw in _packs(scan, min(limit, len(scan.members))):
                yield raw
                limit -= 1
            if limit <= 0:
                return

    def pack(self, key: str) -> dict[str, Any]:
        """Raw parts of the pack with this key.

        Raises:
            ConfigError: there is none.
        """
        for tar in self._tars_with(key):
            scan = scan_tar(tar)
            for place, found in enumerate(_keys(scan)):
                if found == key:
                    return next(_packs(scan, 1, place))
        raise ConfigError(f"no pack has the key {key!r}; inspect without --pack lists the first keys")

    def _tars_with(self, key: str) -> list[Path]:
        """The tar that index.sqlite names, or all."""
        database = self.folder / NV_META / "index.sqlite" if self.folder else None
        if self.manifest is None or database is None or not database.is_file() or len(self.tars) == 1:
            return self.tars
        try:
            with closing(open_sqlite_index(database)) as connection:
                row = connection.execute("SELECT tar_file_id FROM samples WHERE sample_key = ?", (key,)).fetchone()
        except (sqlite3.Error, UnicodeError):
            return self.tars
        if row is None:
            return []
        if not isinstance(row[0], int) or not 0 <= row[0] < len(self.manifest.shards):
            return self.tars  # it names a shard that there is not
        return [database.parent.parent / self.manifest.shards[row[0]].name]


def _keys(scan: TarScan) -> list[str]:
    keys: list[str] = []
    for member in scan.members:
        if not keys or keys[-1] != member.key:
            keys.append(member.key)
    return keys


def _packs(scan: TarScan, limit: int, first: int = 0) -> Iterator[dict[str, Any]]:
    """Raw parts of packs `first` and on; a pack that is cut off at the end of the tar is left out."""
    size = scan.path.stat().st_size
    place = -1
    raw: dict[str, Any] = {}
    with scan.path.open("rb") as stream:
        for member in scan.members:
            if not raw or raw["__key__"] != member.key:
                if raw and place >= first:
                    yield raw
                place += 1
                if place >= first + limit:
                    return
                raw = {"__key__": member.key}
            if place >= first and member.fault is None and member.offset + member.size <= size:
                stream.seek(member.offset)
                raw[member.part] = stream.read(member.size)
        if raw and place >= first and not scan.is_cut:
            yield raw
