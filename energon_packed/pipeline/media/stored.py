"""Stage media, with `media='reference'`: images and videos in no file of the input are stored once, in `out/media`.

Input: the files in memory that the measure stage found, by digest. Output: an Energon dataset with a member
`DIGEST.EXT` for each different image, and its index, in which the write stage finds the images.

    NAME.media ──► MediaPlan ──MediaTask──► write_media_tar (worker) ──► tar of out/media, state file
                       └──► index of the digests ──► StoredMedia ──► write stage

The first occurrence of an image in the input decides which tar has it, so that workers do not matter. The name of a
tar has a digest of its content: a tar that an existing dataset needs is never replaced, and a run with another
`seq_len` finds its tars there. `remove_unused` deletes the other tars when the new dataset is complete.
"""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.vision.images import sniff_extension
from energon_packed.errors import ConfigError, EnergonPackedError, RecordError
from energon_packed.files import atomic_path, remove_tree
from energon_packed.metadatasets import NV_META
from energon_packed.pipeline.measured.chunks import MEDIA, MEDIA_ENTRY, MediaEntries, read_media
from energon_packed.pipeline.measured.table import RecordTable
from energon_packed.pipeline.media.locator import PLACE_BITS, StoredMedia
from energon_packed.pipeline.output.folder import Folder
from energon_packed.pipeline.output.run_state import RunState
from energon_packed.pipeline.output.shard_states import TarTask, finish_shard, finished_shard, shard_rows, state_file
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.stages.plan import Plan, cut_evenly
from energon_packed.pipeline.stages.samples import changed_record
from energon_packed.records.media.file_types import stored_extension
from energon_packed.records.media.reference import media_digest
from energon_packed.shards.nv_meta import index_uuid, write_nv_meta
from energon_packed.shards.tar import ShardSummary, TarShardWriter
from energon_packed.storage import is_remote
from energon_packed.system import raise_resource_error
from energon_packed.tarfiles import BLOCK

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
_BUCKET = 1 << 23  # images that are sorted at a time
_MOST_IMAGES = 100_000  # in a tar
_OWN_NAME = re.compile(r"(media-\d{6}-[0-9a-f]{16}\.tar)(\.idx)?")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaTask(TarTask):
    """Tar of images to write.

    Attributes:
        entries: the images, in order.
    """

    entries: MediaEntries

    def digest(self) -> str:
        """Hex digest of the content."""
        return _content_digest(self.entries)


def _content_digest(entries: MediaEntries) -> str:
    return hashlib.sha256(b"".join([entries[half].tobytes() for half in ("high", "low")])).hexdigest()


def write_media_tar(reader: RecordReader, task: MediaTask) -> ShardSummary:
    """Write a tar of images, its index and its state file.

    Args:
        reader: reads records as the measure stage did.
        task: the tar.

    Raises:
        SourceError: a record changed since it was measured.
    """
    read: tuple[int, int, int] | None = None
    images: list[tuple[bytes, bool]] = []
    with TarShardWriter(task.tar, task.state.parent) as shard:
        for entry in task.entries:
            record = int(entry["source"]), int(entry["address"]), int(entry["bytes"])
            if record != read:
                read, images = record, _images(reader, *record)
            image = int(entry["image"])
            data, is_audio = images[image] if image < len(images) else (b"", False)
            digest = media_digest(data)
            if digest != f"{entry['high']:016x}{entry['low']:016x}":
                raise _changed(reader, *record[:2], f"its image {image} has other bytes")
            shard.add(digest, [(stored_extension(data) if is_audio else sniff_extension(data), data)])
    return finish_shard(task, shard.rows)


def _images(reader: RecordReader, source: int, address: int, size: int) -> list[tuple[bytes, bool]]:
    """Bytes of each media file of a record, and whether it is an audio file, which are the last."""
    try:
        conversation = reader.read(source, address, size)
        files = conversation.media_files
        first = len(files) - len(conversation.audios)
        return [(file.data or b"", place >= first) for place, file in enumerate(files)]
    except (RecordError, OSError) as error:
        raise_resource_error(error, reader.sources[source].path)
        raise _changed(reader, source, address, str(error)) from error


def _changed(reader: RecordReader, source: int, address: int, change: str) -> EnergonPackedError:
    row = reader.sources[source].row_numbers([address])[0]
    return changed_record(reader, source, row, change, has_files=False)


class MediaPlan:
    """The images of `out/media`, and the tars that they are in.

    Args:
        files: chunk files of all records, in input order.
        index: path of the index of `StoredMedia`, which is written.
        max_bytes: size of a tar, without its end.

    Attributes:
        images, bytes: different images, and the sum of their bytes.
        sizes: int64 (tars,), bytes of each tar, without its end.
    """

    def __init__(self, files: Sequence[Path], index: Path, max_bytes: int) -> None:
        self._files = [file for file in files if file.with_suffix(MEDIA).exists()]
        counts = [file.with_suffix(MEDIA).stat().st_size // MEDIA_ENTRY.itemsize for file in self._files]
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        total = int(self._starts[-1])
        self.images = self.bytes = 0
        self.sizes = np.zeros(0, dtype=np.int64)
        self._firsts = np.zeros(0, dtype=np.int64)
        self._ranges: list[tuple[int, int]] = []
        if total:
            # Written without a memory map, in which a full disk is a signal and not an error.
            with atomic_path(index) as temporary, temporary.open("w+b") as out:
                self._write(out, total, max_bytes)

    def _write(self, out: BinaryIO, total: int, max_bytes: int) -> None:
        """Write the index: first the positions of the first occurrences, then the places that follow from them."""

        def put(row: int, start: int, values: UInt64 | Int64) -> None:
            out.seek(8 * (row * total + start))
            out.write(values.astype("<u8").data)

        is_first = np.zeros(total, dtype=bool)
        for high, low, position in self._sorted():
            is_new = np.append(True, (high[1:] != high[:-1]) | (low[1:] != low[:-1]))[: len(high)]
            stop = self.images + int(is_new.sum())
            for row, values in enumerate((high, low, position)):
                put(row, self.images, values[is_new])
            is_first[position[is_new]] = True
            self.images = stop
        self._firsts = np.flatnonzero(is_first)
        places = self._places(is_first, max_bytes)
        number = np.cumsum(is_first)  # of the image that is first at a position, from 1
        for start in range(0, self.images, _BUCKET):
            out.seek(8 * (2 * total + start))
            positions = np.frombuffer(out.read(8 * min(_BUCKET, self.images - start)), dtype="<u8").astype(np.int64)
            put(2, start, places[number[positions] - 1])
        out.truncate(8 * 3 * total)

    def _sorted(self) -> Iterator[tuple[UInt64, UInt64, Int64]]:
        """Yield both halves of the digests and the positions of all images, sorted, in buckets that fit memory."""
        bits = max(1, (int(self._starts[-1]) // _BUCKET).bit_length())
        for bucket in range(1 << bits):
            parts = []
            for start, file in zip(self._starts.tolist(), self._files, strict=False):
                entries = read_media(file)
                own = np.flatnonzero(entries["high"] >> np.uint64(64 - bits) == bucket)
                parts.append((entries["high"][own], entries["low"][own], own + start))
            high, low, position = (np.concatenate(column) for column in zip(*parts, strict=True))
            by_digest = np.lexsort((low, high))  # stable: equal images stay in the order of the input
            yield high[by_digest], low[by_digest], position[by_digest]

    def _places(self, is_first: npt.NDArray[np.bool_], max_bytes: int) -> UInt64:
        """Cut the images into tars; return the place of each, as in `StoredMedia.index`."""
        edges = itertools.pairwise(self._starts.tolist())
        sizes = np.concatenate(
            [read_media(file)["size"][is_first[slice(*edge)]] for file, edge in zip(self._files, edges, strict=True)]
        )
        self.bytes = int(sizes.sum())
        members = BLOCK - (-sizes // BLOCK) * BLOCK  # a header, and the content padded to whole blocks
        self._ranges = cut_evenly(members, _MOST_IMAGES, min(max_bytes, 1 << PLACE_BITS))
        self.sizes = np.add.reduceat(members, [start for start, _ in self._ranges])
        places: Int64 = np.cumsum(members) - members + BLOCK
        for number, (start, stop) in enumerate(self._ranges):
            places[start:stop] += (number << PLACE_BITS) + BLOCK - places[start]
        return places.astype(np.uint64)

    def entries(self, tar: int) -> MediaEntries:
        """Read the images of a tar, in order."""
        positions = self._firsts[slice(*self._ranges[tar])]
        chunks = np.searchsorted(self._starts, positions, side="right") - 1
        parts = [(chunk, positions[chunks == chunk] - self._starts[chunk]) for chunk in np.unique(chunks).tolist()]
        return np.concatenate([read_media(self._files[chunk])[own] for chunk, own in parts])


def store_media(state: RunState, table: RecordTable, plan: Plan) -> StoredMedia | None:
    """Write the tars that no earlier run has finished.

    Args:
        state: objects of the run.
        table, plan: results of the earlier stages.

    Returns:
        The stored images; None if all images of the input are in files.

    Raises:
        ConfigError: `out/media` has other files, or the disk is too small.
    """
    output = state.output
    index = output.media_work / "index"
    media = MediaPlan(table.files, index, state.options.max_shard_bytes)
    if not media.images:
        return None
    _refuse_other_files(output.media)
    names, done = [], {}
    for number in range(len(media.sizes)):
        task = _task(output, media, number)
        names.append(task.tar.name)
        if (finished := finished_shard(task)) is not None:
            done[finished.name] = finished
    todo = [number for number, name in enumerate(names) if name not in done]
    output.check_space(int(media.sizes[todo].sum()), state.options.unfinished_bytes, replaces=False)
    output.check_space(int(media.sizes[todo].sum()) + plan.num_bytes, state.options.unfinished_bytes)
    state.progress.start("media", media.images, "images")
    state.progress.advance(sum(shard.packs for shard in done.values()))
    state.counters["media_shards_reused"] = len(done)
    write = partial(write_media_tar, state.reader)
    with closing(state.engine.run(write, (_task(output, media, number) for number in todo))) as written:
        for shard in written:
            done[shard.name] = shard
            state.progress.advance(shard.packs)
    state.counters["media_shards_written"] = len(todo)
    return StoredMedia(
        shards=tuple([done[name] for name in names]), images=media.images, bytes=media.bytes, index=index
    )


def _task(output: Folder, media: MediaPlan, number: int) -> MediaTask:
    entries = media.entries(number)
    name = f"media-{number:06d}-{_content_digest(entries)[:16]}.tar"
    return MediaTask(tar=output.media / name, state=state_file(output.media_work, name), entries=entries)


def _refuse_other_files(folder: Path) -> None:
    for file in sorted(folder.glob("*")):
        if not _OWN_NAME.fullmatch(file.name) and file.name != NV_META and not file.name.startswith(".media-"):
            raise ConfigError(
                f"{folder} must be free for the images that are in no file, got {file.name} in it. Move it, or use "
                "another `output_dir`."
            )


def index_media(output: Folder, stored: StoredMedia) -> None:
    """Write `.nv-meta` of `out/media`, unless it is there."""
    meta = output.media / NV_META
    if (meta / "index.sqlite").is_file() and (meta / "index.uuid").read_bytes() == index_uuid(stored.shards):
        return
    remove_tree(meta)  # index.sqlite is the last file that is written
    names = [shard.name for shard in stored.shards]
    write_nv_meta(
        output.media,
        codec=None,
        shards=stored.shards,
        rows=(shard_rows(state_file(output.media_work, name)) for name in names),
        splits={"train": names},
        staging=output.media_work,
    )


def remove_unused(output: Folder, stored: StoredMedia | None) -> None:
    """Delete the tars of `out/media` of earlier runs; call it when the dataset is complete."""
    names = {shard.name for shard in stored.shards} if stored else set()
    found = {match[1] for file in output.media.glob("media-*") if (match := _OWN_NAME.fullmatch(file.name))}
    for name in found - names:
        state_file(output.media_work, name).unlink(missing_ok=True)
        (output.media / name).unlink(missing_ok=True)
        (output.media / name).with_suffix(".tar.idx").unlink(missing_ok=True)
    if found and not names:
        remove_tree(output.media / NV_META)
        if not is_remote(output.media):  # a prefix without objects does not exist
            with contextlib.suppress(OSError):  # it has other files
                output.media.rmdir()
