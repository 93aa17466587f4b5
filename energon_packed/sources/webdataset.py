"""WebDataset: tars whose members are grouped by key, read in place by byte offsets.

The address of a record is the offset of the first header of its key; the samples of a pack follow at the next bytes,
which no other key has. Images are references into the tar. `tar_records` says what a key becomes; the tars of an
Energon dataset are read as its `dataset.yaml` says (`energon`).

TarIndex: where each key of a tar begins, read once and kept in a file for other processes and later runs.
"""

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason, RecordError, Reject, SourceError
from energon_packed.records import Conversation
from energon_packed.sources.base import Source, SourceRecord, changed_at, numbers_of
from energon_packed.sources.convert import converted
from energon_packed.sources.energon_layout import Layout, layout_of
from energon_packed.sources.tar_records import KeyMembers
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


_KEYS_IN_A_CHUNK = (64, 512)
_KEPT_PACKS = 8  # their samples are read one by one
_LARGEST_SIZE = 2**31 - 1  # of a row; a larger key is found by its address alone

_PACKS: OrderedDict[tuple[Path, int, int, Layout], Sequence[Any]] = OrderedDict()


class WebDatasetSource(Source):
    """A .tar file."""

    suffixes: ClassVar[tuple[str, ...]] = (".tar",)
    has_sample_loader: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        *,
        data: Path | None = None,
        image_root: Path | None = None,
        layout: Layout | None = None,
        kept_index: Path | None = None,
    ) -> None:
        super().__init__(path, data=data, image_root=image_root)
        self.layout = layout or Layout()
        self._kept_index = kept_index

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        work_dir: Path,
        image_root: Path | None = None,
        trust_sample_loader: bool = False,
        for_adapter: bool = False,
    ) -> Source:
        """Read its headers, and the `dataset.yaml` of its Energon dataset, if it is in one.

        Args:
            path: the tar.
            work_dir: folder of the index of its keys.
            image_root: folder of relative media paths.
            trust_sample_loader: run the sample_loader.py of the dataset.
            for_adapter: an adapter gets the parts of each key, where neither a field_map nor our own flavor says
                what they are.

        Raises:
            SourceError: the tar is compressed, truncated or damaged, or its samples need code that is not trusted.
        """
        kept = keep_index(path, work_dir)
        layout = layout_of(path).opened(trust_sample_loader=trust_sample_loader, for_adapter=for_adapter)
        source = cls(path, image_root=image_root, layout=layout, kept_index=kept)
        if layout.is_guess:
            source._check_guess()
        return source

    def extent(self) -> int:
        """Bytes up to the end of the last member."""
        return self._index().end

    def chunks(self) -> list[tuple[int, int]]:
        """Our share in byte ranges of about as many keys each."""
        first, last, total = self.share
        begin, end = (self.extent() * edge // total for edge in (first, last))
        starts = self._index().starts
        starts = starts[(starts > begin) & (starts < end)]
        step = min(max(len(starts) // 64, _KEYS_IN_A_CHUNK[0]), _KEYS_IN_A_CHUNK[1])
        edges = [begin, *starts[step - 1 :: step].tolist(), end]
        return [(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Records whose address is in bytes [start, stop)."""
        index = self._index()
        for number in range(index.number(start), len(index)):
            begin, end = index.bounds(number)
            if begin >= stop:
                return
            if end > start:
                yield from (row for row in self._rows(begin, end) if start <= row.address < stop)

    def read(self, address: int, size: int) -> SourceRecord:
        """The record at an address."""
        index = self._index()
        begin, end = index.bounds(index.number(address))
        for row in self._rows(begin, end):
            if row.address == address:
                return row
        raise SourceError(f"{self.path} has no record at byte {address}; it changed while it was read")

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Counts the records up to the last address."""
        start, stop = self.chunks()[0][0], max(addresses, default=0) + 1
        return numbers_of(addresses, (row.address for row in self.scan(start, stop)))

    def fingerprint(self) -> str:
        """Digest of the tar, and of what says how its keys are read."""
        return hashlib.sha256(f"{super().fingerprint()} {self.layout.digest()}".encode()).hexdigest()

    def _index(self) -> TarIndex:
        return tar_index(self.data, self._kept_index)

    def _rows(self, begin: int, end: int) -> list[SourceRecord]:
        """The records of one key."""
        found = _decoded(self.data, begin, end, self.layout, is_repeated=self._index().is_repeated(begin))
        size = min(end - begin, _LARGEST_SIZE)
        return [
            SourceRecord(begin + place, size, None, one)
            if isinstance(one, Reject)
            else SourceRecord(begin + place, size, one)
            for place, one in enumerate(found)
        ]

    def _check_guess(self) -> None:
        """Refuse a dataset that only its own code can read, when its first records cannot be read by their parts."""
        from energon_packed.records import normalize

        reject: Reject | None = None
        for place, row in enumerate(self.scan(0, self.extent())):
            try:
                if row.reject is not None:
                    raise RecordError.of(row.reject)
                if not isinstance(row.record, Conversation):
                    normalize(row.record, image_root=self.image_root)
                return
            except RecordError as error:
                reject = reject or error.reject
            if place >= 16:
                break
        if reject is not None:
            raise SourceError(
                f"{self.layout.file} {self.layout.guess_reason}, and the parts of {self.path.name} do not say what "
                f"they are ({reject}); pass `adapter` to read them, or convert the dataset"
            )


def _decoded(path: Path, begin: int, end: int, layout: Layout, *, is_repeated: bool) -> Sequence[Any]:
    """What a key holds: records, Conversations, or the reason why it has none."""
    key = (path, changed_at(path), begin, layout)
    if (kept := _PACKS.get(key)) is not None:
        return kept
    with open_tar(path, begin, end) as tar:
        group = KeyMembers(path, list(tar))
    if is_repeated:
        detail = f"the key {group.key} is at byte {begin} and elsewhere in {path.name}; keys must be unique, and their"
        return [Reject(Reason.MISSING_FIELD, f"{detail} parts adjacent")]
    try:
        found = layout.records(group)
    except RecordError as error:
        return [error.reject]
    except RecursionError:
        return [Reject(Reason.BAD_JSON, f"{group.key}: its objects and lists are nested too deeply to be read")]
    if found and isinstance(found[0], Conversation):
        _PACKS[key] = found
        if len(_PACKS) > _KEPT_PACKS:
            _PACKS.popitem(last=False)
    return found
