"""TarShardWriter. Input: the parts of packs. Output: a tar file and its index rows; equal parts produce equal bytes.

Members are POSIX ustar without timestamps, users or hosts. A shard appears under its final name only when complete.
"""

import hashlib
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.errors import FormatError
from energon_packed.files import atomic_path, of_type
from energon_packed.formats import Part

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)  # POSIX.1-1988: an archive ends with two zero blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """Index rows of a finished shard.

    Attributes:
        name: file name.
        size: bytes of the file.
        sha256: hex digest of the file.
        keys: key of each sample, in order.
        offsets: byte offset of the first header of each sample, then the end of the last sample: len(keys) + 1.
        parts: (sample index, part name, offset of the content, bytes of the content) of every member.
    """

    name: str
    size: int
    sha256: str
    keys: list[str]
    offsets: list[int]
    parts: list[tuple[int, str, int, int]]

    @property
    def summary(self) -> "ShardSummary":
        """Summary of the shard, which stays in memory after the rows are written to disk."""
        return ShardSummary(self.name, self.size, self.sha256, len(self.keys))

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {name: getattr(self, name) for name in self.__slots__} | {"parts": list(map(list, self.parts))}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "ShardRows":
        """Make rows from the result of `as_dict`.

        Raises:
            KeyError, ValueError: a field is missing or has another type.
        """
        parts: Any = [tuple(of_type(part, list)) for part in of_type(value["parts"], list)]
        return cls(**{name: value[name] for name in cls.__slots__ if name != "parts"}, parts=parts)


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """Summary of a finished shard.

    Attributes:
        name: file name.
        size: bytes of the file.
        sha256: hex digest of the file.
        packs: number of packs.
        digest_seconds: time for reading and hashing referenced images; 0 for a shard of an earlier run.
    """

    name: str
    size: int
    sha256: str
    packs: int
    digest_seconds: float = 0.0


class TarShardWriter:
    """Writes one shard; after the block, `rows` has its index rows. `staging` as in `atomic_path`.

    with TarShardWriter(folder / "demo-000000.tar") as shard:
        shard.add("demo_00000000", [("json", b"{}")])
    shard.rows
    """

    rows: ShardRows

    def __init__(self, path: Path, staging: Path | None = None) -> None:
        self.path, self._staging = path, staging
        self._digest = hashlib.sha256()
        self._offset = 0
        self._keys: list[str] = []
        self._offsets: list[int] = []
        self._parts: list[tuple[int, str, int, int]] = []

    def __enter__(self) -> "TarShardWriter":
        self._file = self._opened()
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with (
            atomic_path(self.path, self._staging) as temporary,
            temporary.open("wb", buffering=1 << 20) as self._stream,
        ):
            yield
            self._finish()

    def add(self, key: str, parts: Iterable[Part]) -> None:
        """Append one sample; its parts are stored adjacent, as WebDataset readers require.

        Raises:
            FormatError: the key is empty or contains a dot or slash, or a member name exceeds 100 bytes.
        """
        if not key or "." in key or "/" in key:
            raise FormatError(f"key must be a nonempty name without dots or slashes, got {key!r}")
        self._offsets.append(self._offset)
        for name, content in parts:
            # A ustar header has 100 bytes for a name without folders.
            header = tarfile.TarInfo(f"{key}.{name}")
            if len(header.name.encode()) > tarfile.LENGTH_NAME:
                raise FormatError(
                    f"member name {header.name!r} exceeds {tarfile.LENGTH_NAME} bytes; use a shorter `shard_prefix`"
                )
            header.size = len(content)
            # No time, user or host: TarInfo has zeros and empty names by default.
            self._write(header.tobuf(format=tarfile.USTAR_FORMAT))
            self._parts.append((len(self._keys), name, self._offset, len(content)))
            self._write(content)
            self._write(bytes(-len(content) % _BLOCK))
        self._keys.append(key)

    # Hashed while writing: packing.json needs the digest, and reading a shard again would double the time.
    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._offset += len(data)

    def _finish(self) -> None:
        end = self._offset  # the index has the end of the last member, not of the file
        self._write(_END)
        self._write(bytes(-self._offset % tarfile.RECORDSIZE))  # as tar programs do; readers ignore it
        self.rows = ShardRows(
            name=self.path.name,
            size=self._offset,
            sha256=self._digest.hexdigest(),
            keys=self._keys,
            offsets=[*self._offsets, end],
            parts=self._parts,
        )
