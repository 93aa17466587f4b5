"""TarIndex: where each key of a tar begins, read once and kept in a file for other processes and later runs."""

import hashlib
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from energon_packed.sources.base import changed_at
from energon_packed.sources.convert import converted
from energon_packed.tarfiles import open_tar

Int64 = npt.NDArray[np.int64]
_VERSION = 2  # of kept indexes: which members begin a key


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
            TarError: the tar is compressed, truncated or damaged, or has members after its end.
        """
        starts, hashes = array("q"), array("q")
        previous: str | None = None
        with open_tar(path) as tar:
            for member in tar:
                if member.key != previous:
                    starts.append(member.header)
                    hashes.append(hash(member.key))
                    previous = member.key
        found = np.frombuffer(starts, dtype=np.int64).copy()
        counts = Counter(hashes) if len(set(hashes)) < len(hashes) else Counter()
        twice = np.array([counts[name] > 1 for name in hashes], dtype=bool)
        return cls(found, found[twice], tar.end)

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
        TarError: as `TarIndex.scan`.
    """
    return _tar_index(path, path.stat().st_size, changed_at(path), kept)


def keep_index(path: Path, folder: Path) -> Path:
    """A file with the index of a tar, so that other processes and later runs need not read its headers again.

    Raises:
        TarError: as `TarIndex.scan`.
    """
    version = f"{_VERSION} {path.resolve()} {path.stat().st_size} {changed_at(path)}"
    name = hashlib.sha256(version.encode()).hexdigest()[:24]
    return converted(path, folder, ".tarindex", lambda tar, out: tar_index(tar).save(out), name=name)


@lru_cache(maxsize=64)
def _tar_index(path: Path, size: int, changed: int, kept: Path | None) -> TarIndex:
    return TarIndex.scan(path) if kept is None or not kept.exists() else TarIndex.load(kept)
