"""Tars in, read in place by byte offsets; the records of each key out, with images as references into the tar.

The address of a record is the offset of the first header of its key; the other samples of a pack get the next bytes,
which belong to no other key. `tar_records` converts the members of a key to records. The tars of an Energon dataset
are read according to its `dataset.yaml` (`energon_layout`).

A TarIndex contains the offset of each key. It is read once and stored in a file for other processes and later runs.
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
from energon_packed.records import Conversation, normalize
from energon_packed.sources.base import Source, SourceRecord, changed_at, indices_of
from energon_packed.sources.convert import converted
from energon_packed.sources.energon_layout import Layout, layout_of
from energon_packed.sources.tar_records import KeyMembers
from energon_packed.storage import MOST_TOGETHER, recent_status
from energon_packed.tarfiles import open_tar

Int64 = npt.NDArray[np.int64]
_VERSION = 1  # of kept indexes
_KEYS_IN_A_CHUNK = (64, 512)
_KEPT_PACKS = 8  # decoded packs that are kept, because their samples are read in sequence
_LARGEST_SIZE = 2**31 - 1  # `size` is stored as int32; a larger key is found by its address alone
_PACKS: OrderedDict[tuple[Path, int, int, Layout], Sequence[Any]] = OrderedDict()


class TarIndex:
    """Byte offsets of the keys of a tar.

    Attributes:
        starts: int64 (keys,), byte offset of the first header of each key.
        end: byte offset of the end of the last member.

    `is_repeated` reports the keys that occur elsewhere in the tar, too.
    """

    def __init__(self, starts: Int64, repeated: Int64, end: int) -> None:
        self.starts = starts
        self.end = end
        self._repeated = frozenset(repeated.tolist())

    @classmethod
    def scan(cls, path: Path) -> "TarIndex":
        """Read all headers of a tar.

        Raises:
            TarError: the tar is compressed, truncated or damaged, or has members after its end.
        """
        starts, hashes = array("q"), array("q")
        # As in webdataset, a key is a run of adjacent members; `repeated` finds keys with several runs.
        previous: str | None = None
        with open_tar(path) as tar:
            for member in tar:
                if member.key != previous:
                    starts.append(member.header)
                    hashes.append(hash(member.key))
                    previous = member.key
        offsets = np.frombuffer(starts, dtype=np.int64).copy()
        # Hashes of the keys need less memory than the keys; a collision would only reject two more records.
        counts = Counter(hashes) if len(set(hashes)) < len(hashes) else Counter()
        twice = np.array([counts[name] > 1 for name in hashes], dtype=bool)
        return cls(offsets, offsets[twice], tar.end)

    def save(self, out: BinaryIO) -> None:
        """Write the index as int64 values: end, number of keys, starts, repeated."""
        values = [self.end, len(self.starts), *self.starts.tolist(), *sorted(self._repeated)]
        out.write(np.array(values, dtype="<i8").tobytes())

    @classmethod
    def load(cls, file: Path) -> "TarIndex":
        """Read a file of `save`."""
        values = np.fromfile(file, dtype="<i8").astype(np.int64)
        end, keys = values[:2].tolist()
        return cls(values[2 : 2 + keys], values[2 + keys :], end)

    def __len__(self) -> int:
        return len(self.starts)

    def bounds(self, position: int) -> tuple[int, int]:
        """Byte range of a key, with headers and contents."""
        last = position + 1 == len(self.starts)
        return int(self.starts[position]), self.end if last else int(self.starts[position + 1])

    def find(self, address: int) -> int:
        """Position of the key whose byte range contains `address`."""
        return max(0, int(np.searchsorted(self.starts, address, side="right")) - 1)

    def is_repeated(self, start: int) -> bool:
        """Whether the key at this offset occurs elsewhere in the tar, too."""
        return start in self._repeated


def tar_index(path: Path, kept: Path | None = None) -> TarIndex:
    """Return the index of a tar, read once per process and version of the file.

    Args:
        path: the tar.
        kept: file of `keep_index`, or None.

    Raises:
        TarError: as `TarIndex.scan`.
    """
    status = recent_status(path)
    return _tar_index(path, status.st_size, status.st_mtime_ns, kept)


def keep_index(path: Path, folder: Path) -> Path:
    """Store the index of a tar in a file, so that other processes and later runs need not read its headers again.

    Raises:
        TarError: as `TarIndex.scan`.
    """
    version = f"{_VERSION} {path.resolve()} {path.stat().st_size} {changed_at(path)}"
    name = hashlib.sha256(version.encode()).hexdigest()[:24]
    return converted(path, folder, ".tarindex", lambda tar, out: tar_index(tar).save(out), name=name)


@lru_cache(maxsize=64)
def _tar_index(path: Path, size: int, changed: int, kept: Path | None) -> TarIndex:
    return TarIndex.scan(path) if kept is None or not kept.exists() else TarIndex.load(kept)


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
        """Read the headers of a tar, and the `dataset.yaml` if it belongs to an Energon dataset.

        Args:
            path: the tar.
            work_dir: folder of the index of its keys.
            image_root: folder of relative media paths.
            trust_sample_loader: run the sample_loader.py of the dataset.
            for_adapter: pass the members of each key to an adapter, unless a field_map or a flavor of energon-packed
                defines the records.

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
        """Divide `share` into byte ranges with about the same number of keys."""
        first, last, total = self.share
        low, high = (self.extent() * edge // total for edge in (first, last))
        starts = self._index().starts
        # Edges are offsets of keys, so that chunks have similar numbers of records however large images are.
        starts = starts[(starts > low) & (starts < high)]
        step = min(max(len(starts) // 64, _KEYS_IN_A_CHUNK[0]), _KEYS_IN_A_CHUNK[1])
        edges = [low, *starts[step - 1 :: step].tolist(), high]
        return [(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]

    def scan(self, start: int, stop: int) -> Iterator[SourceRecord]:
        """Read the records with addresses in [start, stop)."""
        index = self._index()
        begin = index.find(start)
        for position in range(begin, len(index)):
            first, last = index.bounds(position)
            if first >= stop:
                return
            if (position - begin) % MOST_TOGETHER == 0:
                starts = index.starts[position : position + MOST_TOGETHER]
                self.request([(start_of_key, 0) for start_of_key in starts[starts < stop].tolist()])
            if last > start:
                yield from (row for row in self._rows(first, last) if start <= row.address < stop)

    def read(self, address: int, size: int) -> SourceRecord:
        """Read the record at an address."""
        index = self._index()
        first, last = index.bounds(index.find(address))
        for row in self._rows(first, last):
            if row.address == address:
                return row
        raise SourceError(f"{self.path} has no record at byte {address}; it changed while it was read")

    def ranges(self, records: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the ranges of the keys of the records."""
        index = self._index()
        keys = sorted({index.bounds(index.find(address)) for address, _ in records})
        return [(first, last - first) for first, last in keys]

    def row_numbers(self, addresses: Sequence[int]) -> list[int]:
        """Count the records up to the last address."""
        start, stop = self.chunks()[0][0], max(addresses, default=0) + 1
        return indices_of(addresses, (row.address for row in self.scan(start, stop)))

    def fingerprint(self) -> str:
        """Digest of the tar and of the rules by which its keys are read."""
        return hashlib.sha256(f"{super().fingerprint()} {self.layout.digest()}".encode()).hexdigest()

    def _index(self) -> TarIndex:
        return tar_index(self.data, self._kept_index)

    def _rows(self, first: int, last: int) -> list[SourceRecord]:
        """Read the records of a key."""
        records = _decoded(self.data, first, last, self.layout, is_repeated=self._index().is_repeated(first))
        size = min(last - first, _LARGEST_SIZE)
        return [
            SourceRecord(first + offset, size, None, record)
            if isinstance(record, Reject)
            else SourceRecord(first + offset, size, record)
            for offset, record in enumerate(records)
        ]

    def _check_guess(self) -> None:
        """Refuse a dataset that needs its own code, if its first records cannot be read by names of parts."""
        reject: Reject | None = None
        for count, row in enumerate(self.scan(0, self.extent())):
            try:
                if row.reject is not None:
                    raise RecordError.of(row.reject)
                if not isinstance(row.record, Conversation):
                    normalize(row.record, image_root=self.media_folder)
                return
            except RecordError as error:
                reject = reject or error.reject
            # 16 records tolerate a few rejects, without reading the whole tar.
            if count >= 16:
                break
        if reject is not None:
            raise SourceError(
                f"{self.layout.file} {self.layout.guess_reason}, and the parts of {self.path.name} do not say what "
                f"they are ({reject}); pass `adapter` to read them, or convert the dataset"
            )


def _decoded(path: Path, first: int, last: int, layout: Layout, *, is_repeated: bool) -> Sequence[Any]:
    """Read a key: records, Conversations, or the reason why it has none."""
    key = (path, changed_at(path), first, layout)
    if (kept := _PACKS.get(key)) is not None:
        return kept
    with open_tar(path, first, last) as tar:
        group = KeyMembers(path, list(tar))
    # The members of such a key may belong to different samples.
    if is_repeated:
        detail = f"the key {group.key} is at byte {first} and elsewhere in {path.name}; keys must be unique, and their"
        return [Reject(Reason.MISSING_FIELD, f"{detail} parts adjacent")]
    try:
        records = layout.records(group)
    except RecordError as error:
        return [error.reject]
    except RecursionError:
        return [Reject(Reason.BAD_JSON, f"{group.key}: its objects and lists are nested too deeply to be read")]
    if records and isinstance(records[0], Conversation):  # a pack: `read` asks for its other samples next
        # The oldest pack is dropped first; readers move forward.
        _PACKS[key] = records
        if len(_PACKS) > _KEPT_PACKS:
            _PACKS.popitem(last=False)
    return records
