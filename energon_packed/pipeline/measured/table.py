"""RecordTable, which has the numeric columns of all records, in files that the driver maps.

Input: the files of all chunks. Output: a RecordTable (arrays by record, 24 bytes on disk per record of text) for the
planner, and RecordRefs (arrays of selected records) for the tasks that read them again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks
from energon_packed.encoding.fragments import FRAGMENT, Fragments
from energon_packed.files import disk_array
from energon_packed.packing.planner import first_of_group
from energon_packed.pipeline.measured.arrow_columns import as_numpy
from energon_packed.pipeline.measured.chunk_reader import Read
from energon_packed.pipeline.measured.chunks import (
    COUNTED,
    NUMERIC,
    PACKED,
    STATUSES,
    Chunk,
    Members,
    StringCounts,
    measured_records,
    read_counts,
    read_members,
    read_rows,
)

Int64 = npt.NDArray[np.int64]
IN_REFS = ("address", "size", "length", "media_bytes", "media_stamp")  # columns of `RecordRefs` as they are
_MAX_COUNTED = 200  # strings with a separate count; unique keys in every record would make the manifest large


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordRefs:
    """Addresses and measurements of k records.

    Attributes:
        source: int64 (k,), index of the source.
        row: int64 (k,), index of the record in its source.
        address, size: int64 (k,), int32 (k,), address in the source.
        length: int32 (k,), measured tokens.
        media_bytes: int64 (k,), measured bytes of the media.
        media_stamp: int64 (k,), digest of path, size and time of change of the media files; 0 without files.
        fragments: structured (k,) of dtype `FRAGMENT`, with number -1 for complete records; None if all are complete.
    """

    source: Int64
    row: Int64
    address: Int64
    size: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    media_bytes: Int64
    media_stamp: Int64
    fragments: Fragments | None = None

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordTable:
    """Columns of all n records, in input order. Records of text need 24 bytes each, others up to 90.

    Arrays are files that are mapped, as `disk_array` makes them. A column is a single value if all records have it,
    and then read-only.

    Attributes:
        address: int64 (n,), address of the record in its source.
        size: int32 (n,), bytes of the record, 0 if unknown.
        length: int32 (n,), tokens, -1 for a rejected record.
        supervised: int32 (n,), targets, -1 for a rejected record or if the encoder does not count them.
        weight_checksum: int64 (n,), of its loss weights and columns, as `EncodedSample.weight_checksum`.
        text_bytes: int32 (n,), estimated bytes of the text in JSON.
        media_bytes: int64 (n,), bytes of images, videos and .npy files.
        media_stamp: int64 (n,), digest of path, size and time of change of these files; 0 without files.
        num_images: int32 (n,).
        num_videos: int32 (n,).
        num_frames: int32 (n,), selected frames of its videos.
        num_audios: int32 (n,).
        audio_ms: int64 (n,), duration of its audio files and used tracks in milliseconds.
        extracted_bytes: int64 (n,), estimate of `media_bytes` with these frames as images in place of the video files;
            0 if they are stored as files.
        frames_bytes: int32 (n,), bytes of the selected frames and clips in JSON.
        columns_bytes: int64 (n,), bytes of its per-token columns.
        num_decoded: int32 (n,), images whose pixels were decoded; the headers of the other images were checked.
        kind: int8 (n,), index into KINDS.
        status: int8 (n,), index into STATUSES; 0 means packed.
        narrow: int8 (n,), 1 if PackedCaptioningSample can store the record.
        divisible: int8 (n,), 1 for documents and token records without videos and audio, which can be split.
        group: int64 (n,), hash of the key of its group in its source; 0 without a group.
        members: int32 (n,), samples of a record that is a group; 0 for others.
        labeled: int8 (n,), 1 for a sample with a role or a label.
        source_starts: int64 (sources + 1,), index of the first record of each source, and n.
        folder: folder for more arrays of the records.
        files: chunk files, in input order.
        file_starts: int64 (chunks,), index of the first record of each file.
        counts: by the names in `COUNTED`, the number of records with each unused field or note.
        samples: structured (m,) of dtype `FRAGMENT`, the samples of all records that are groups, in order.
        fragments: structured (f,) of dtype `FRAGMENT`, fragments that follow the records as separate entries; None
            if no record is split or is a group.
    """

    address: Int64
    size: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.int32]
    weight_checksum: Int64
    text_bytes: npt.NDArray[np.int32]
    media_bytes: Int64
    media_stamp: Int64
    num_images: npt.NDArray[np.int32]
    num_videos: npt.NDArray[np.int32]
    num_frames: npt.NDArray[np.int32]
    num_audios: npt.NDArray[np.int32]
    audio_ms: Int64
    extracted_bytes: Int64
    frames_bytes: npt.NDArray[np.int32]
    columns_bytes: Int64
    num_decoded: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    status: npt.NDArray[np.int8]
    narrow: npt.NDArray[np.int8]
    divisible: npt.NDArray[np.int8]
    group: Int64
    members: npt.NDArray[np.int32]
    labeled: npt.NDArray[np.int8]
    source_starts: Int64
    folder: Path
    files: list[Path]
    file_starts: Int64
    counts: StringCounts
    samples: Fragments = field(default_factory=lambda: np.zeros(0, dtype=FRAGMENT))
    fragments: Fragments | None = None

    def __len__(self) -> int:
        return len(self.status)

    def empty(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        """Make an array of zeros, shape (count,), in a file."""
        return disk_array(self.folder, count, dtype)

    def copy(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Copy a column, shape (n,)."""
        new = self.empty(len(column), column.dtype)
        new[:] = column
        return new

    def packable(self, column: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """Yield the values of a column, (n,), of all records that are not rejected, in blocks."""
        for block in blocks(len(self)):
            yield column[block][self.status[block] == 0]

    def total(self, column: npt.NDArray[np.integer[Any]]) -> int:
        """Sum of a column, (n,), over all records that are not rejected."""
        return sum(int(values.sum(dtype=np.int64)) for values in self.packable(column))

    @property
    def has_groups(self) -> bool:
        """Whether a record is a group, or in a group."""
        return len(self.samples) > 0 or bool(self.group.any())

    @property
    def needs_tokens(self) -> bool:
        """Whether only a flavor of tokens can store the records: with groups, roles, labels or per-token values."""
        return self.has_groups or bool(self.labeled.any())

    def units(self) -> Int64 | None:
        """Key of the group of each entry: int64 (n,), the index of the first entry of the group; None without groups.

        An entry without a group has a key that no other entry has.
        """
        if not self.has_groups:
            return None
        units = first_of_group(self.group, self.empty)
        for block in blocks(len(self)):
            alone = np.flatnonzero(self.group[block] == 0)
            units[block][alone] = alone + block.start
        if self.fragments is not None:
            first = start = len(self) - len(self.fragments)
            for block in blocks(len(self.fragments)):
                own = self.fragments[block]
                place = np.where(own["member"] * own["number"] == 0, np.arange(block.start, block.stop) + start, first)
                units[start:][block] = np.maximum.accumulate(place)
                first = units[start:][block][-1]
        return units

    def with_fragments(self, fragments: Fragments) -> "RecordTable":
        """Append fragments; the records that they are of are not packed themselves."""
        count, total = len(self), len(self) + len(fragments)
        columns: dict[str, Any] = {}
        for name in NUMERIC:
            column = getattr(self, name)
            is_single = not column.flags.writeable and name != "status"
            if is_single and all((v == column[:1]).all() for _, v in _of_fragments(name, column, fragments)):
                columns[name] = np.broadcast_to(column[0], total)
                continue
            columns[name] = self.empty(total, column.dtype)
            columns[name][:count] = column
            for block, values in _of_fragments(name, column, fragments):
                columns[name][count:][block] = values
        for block in blocks(len(fragments)):
            columns["status"][fragments["record"][block]] = -1
        return replace(self, **columns, fragments=fragments)

    def group_numbers(self) -> Int64 | None:
        """Number of the group of each entry: int64 (n,), -1 for an entry in no group; None without groups."""
        if (units := self.units()) is None:
            return None
        records = len(self) if self.fragments is None else len(self) - len(self.fragments)
        for block in blocks(records):
            units[block][self.group[block] == 0] = -1
        for block in blocks(len(self) - records):
            units[records:][block][self.fragments["member"][block] == 0] = -1  # type: ignore[index]
        return units

    def records(self, rows: Int64) -> Int64:
        """Index of the record of each entry, which is a record or a fragment: int64 (k,)."""
        if self.fragments is None:
            return rows
        count = len(self) - len(self.fragments)
        is_fragment = rows >= count
        records = rows.copy()
        records[is_fragment] = self.fragments["record"][rows[is_fragment] - count]
        return records

    def locate(self, rows: Int64) -> tuple[Int64, Int64]:
        """Source and index in that source of the record of each entry: int64 (k,), int64 (k,)."""
        rows = self.records(rows)
        source = np.searchsorted(self.source_starts, rows, side="right") - 1
        return source, rows - self.source_starts[source]

    def refs(self, rows: Int64, read: Read | None = None) -> RecordRefs:
        """Addresses and measurements of these records or fragments.

        Args:
            rows: int64 (k,), their indices.
            read: returns their values in a column of `IN_REFS`; None reads them by their indices.
        """
        read, (source, local) = read or itemgetter(rows), self.locate(rows)
        fragments = None
        if self.fragments is not None and (is_fragment := rows >= len(self) - len(self.fragments)).any():
            fragments = np.zeros(len(rows), dtype=FRAGMENT)
            fragments["number"] = -1
            fragments[is_fragment] = self.fragments[rows[is_fragment] - len(self) + len(self.fragments)]
        return RecordRefs(
            fragments=fragments,
            source=source,
            row=local,
            **{name: read(getattr(self, name)) for name in IN_REFS},
        )


def load_table(chunks: Sequence[Chunk], sources: int, folder: Path) -> RecordTable:
    """Join the files of chunks that are all measured.

    Args:
        chunks: chunks in input order.
        sources: number of sources.
        folder: folder for the columns.
    """
    counts = [measured_records(chunk) for chunk in chunks]
    total = sum(counts)
    # A column of equal values, such as the images of a text dataset, is a single value, which is repeated.
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.broadcast_to(np.zeros((), dtype=dtype), total) for name, dtype in NUMERIC.items()
    }
    per_source = np.zeros(sources + 1, dtype=np.int64)
    start = 0
    listed: StringCounts = {name: Counter() for name in COUNTED}
    for chunk, count in zip(chunks, counts, strict=True):
        table = read_rows(chunk.file)
        for name, column in columns.items() if count else ():
            # A chunk without videos or audio has no such columns.
            values = np.zeros(1, dtype=column.dtype)
            if name in table.schema.names:
                values = as_numpy(table[name], column.dtype)
            if column.flags.writeable:
                column[start : start + count] = values
            elif start == 0 and (values == values[0]).all():
                columns[name] = np.broadcast_to(values[0], total)
            elif start == 0 or (values != column[0]).any():
                columns[name] = disk_array(folder, total, column.dtype)
                columns[name][:start] = column[:start]
                columns[name][start : start + count] = values
        for name, counter in read_counts(table).items():
            listed[name].update(counter)
        per_source[chunk.source + 1] += count
        start += count
    return RecordTable(
        **columns,
        source_starts=np.cumsum(per_source),
        folder=folder,
        files=[chunk.file for chunk in chunks],
        file_starts=np.cumsum([0, *counts], dtype=np.int64)[:-1],
        counts=listed,
        samples=_samples(columns["members"], chunks, folder),
    )


def _samples(counts: npt.NDArray[np.int32], chunks: Sequence[Chunk], folder: Path) -> Fragments:
    """Return the samples of the records that are groups, as fragments of these records.

    Args:
        counts: int32 (n,), samples of each record; 0 for a record that is not a group.
        chunks, folder: as for `load_table`.
    """
    samples = disk_array(folder, int(counts.sum(dtype=np.int64)), FRAGMENT)
    start = stop = 0
    for chunk in chunks if len(samples) else ():
        own = counts[start : start + measured_records(chunk)]
        found = _samples_of_chunk(own, read_members(read_rows(chunk.file)))
        found["record"] += start
        samples[stop : stop + len(found)] = found
        start, stop = start + len(own), stop + len(found)
    return samples


def _samples_of_chunk(counts: npt.NDArray[np.int32], members: Members) -> Fragments:
    samples = np.zeros(len(members), dtype=FRAGMENT)
    groups = np.flatnonzero(counts)
    sizes = counts[groups]
    samples["record"], samples["member"] = np.repeat(groups, sizes), 1
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)  # of the record of each sample
    samples["number"] = np.arange(len(members)) - first
    for name, start, stop in (("length", "start", "stop"), ("images", "first_image", "last_image")):
        ends = np.cumsum(np.append(0, members[name]), dtype=np.int64)
        samples[start], samples[stop] = ends[:-1] - ends[first], ends[1:] - ends[first]
    if len(members):
        ends = np.cumsum(np.append(0, members["length"]), dtype=np.int64)
        samples["total"] = np.repeat(ends[np.cumsum(sizes)] - ends[np.cumsum(sizes) - sizes], sizes)
    samples["supervised"] = members["supervised"]
    return samples


def _of_fragments(
    name: str, column: npt.NDArray[Any], fragments: Fragments
) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Yield the values that fragments have in a column, in blocks of the fragments.

    Args:
        name: name of the column.
        column: values of the records.
        fragments: fragments of these records.
    """
    for block in blocks(len(fragments)):
        own = fragments[block]
        values = column[own["record"]]
        if name == "status":
            values[:] = 0
        elif name == "length":
            values[:] = own["stop"] - own["start"]
        elif name == "supervised":
            values[:] = own["supervised"]
        elif name == "num_images":
            values[:] = own["last_image"] - own["first_image"]
        elif name in ("num_decoded", "weight_checksum"):
            values[own["number"] > 0] = 0  # counted with the first fragment
        yield block, values


def most_common(counts: Counter[str]) -> dict[str, int]:
    """Sort counts, the largest first; strings after the first 200 are joined in one entry, `(others)`."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ranked[_MAX_COUNTED:])
    return dict(ranked[:_MAX_COUNTED]) | ({"(others)": others} if others else {})


def reject_counts(status: npt.NDArray[np.int8]) -> dict[str, int]:
    """Rejected records by reason; only reasons that occur."""
    counts = np.zeros(len(STATUSES), dtype=np.int64)
    for block in blocks(len(status)):
        counts += np.bincount(status[block], minlength=len(STATUSES))
    return {name: int(count) for name, count in zip(STATUSES, counts, strict=True) if count and name != PACKED}
