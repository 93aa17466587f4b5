"""Images, videos and audio files of a record in, the same with a Locator out: `pack --media reference`.

| file of the record | located in |
|---|---|
| a file | that file, auxiliary dataset `files` |
| a member of a tar | the tar, auxiliary dataset `tars` |
| bytes: cells of tables, base64 in JSON, images of a sample_loader | a tar of `out/media`, auxiliary dataset `media` |

stored.py writes `out/media`. `MediaLocator.locate` runs in the write stage, which reads each image once for its
digest, as a copy would.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from energon_packed.encoding.vision.images import read_header, sniff_extension
from energon_packed.errors import Reason, RecordError
from energon_packed.formats.references import FILES, STORED, TARS
from energon_packed.records import MediaReference
from energon_packed.records.media.file_types import SIGNATURE_BYTES, stored_extension, video_extension
from energon_packed.records.media.reference import Locator, media_digest
from energon_packed.shards.tar import ShardSummary
from energon_packed.storage import absolute_name, as_path, is_remote, recent_status

Media = Literal["copy", "reference"]
MediaCheck = Literal["digest", "time"]
PLACE_BITS = 40  # of the offset in a tar, so that a tar has at most 1 TiB


@dataclass(frozen=True, kw_only=True)
class StoredMedia:
    """The images of `out/media`, by digest.

    Attributes:
        shards: the tars.
        images, bytes: images, and the sum of their bytes.
        index: file of uint64 (3, n), little-endian, n >= images: both halves of the digest of each image, ascending,
            and its place: the number of the tar << PLACE_BITS | the offset in it. It is mapped into memory.
    """

    shards: tuple[ShardSummary, ...]
    images: int
    bytes: int
    index: Path

    def find(self, digest: str) -> tuple[str, int] | None:
        """Return the tar and the offset of an image; None if it is not there."""
        high, low, places = self._columns
        half = np.uint64(int(digest[:16], 16))
        first, last = np.searchsorted(high, half, side="left"), np.searchsorted(high, half, side="right")
        row = first + np.searchsorted(low[first:last], np.uint64(int(digest[16:], 16)))
        if row == last or f"{high[row]:016x}{low[row]:016x}" != digest:
            return None
        place = int(places[row])
        return self.shards[place >> PLACE_BITS].name, place & (1 << PLACE_BITS) - 1

    @cached_property
    def _columns(self) -> Any:
        # Rows of the file are contiguous: a search in a column of records would copy the column.
        return np.asarray(np.memmap(self.index, dtype="<u8", mode="r")).reshape(3, -1)[:, : self.images]


@dataclass(slots=True, kw_only=True)
class MediaLocator:
    """Function of the write stage: makes the stored form of an image without its bytes.

    Attributes:
        check: value that readers compare: `digest` of the bytes, or size and `time` of change of the file.
        stored: the images that are in no file of the input.
        seconds: time for reading and hashing images so far.
    """

    check: MediaCheck
    stored: StoredMedia | None
    seconds: float = 0.0

    def locate(self, reference: MediaReference, *, is_audio: bool = False) -> MediaReference:
        """Add the location of an image, video or audio file, with the value that readers compare.

        Raises:
            RecordError: the image cannot be read, or is not the measured image.
        """
        if reference.data is not None:
            return self._stored(reference, reference.data, is_audio=is_audio)
        file = absolute_name(reference.file or "")
        if self.check == "digest":
            start = time.perf_counter()
            extension, size, digest = _audio_content(reference) if is_audio else _content(reference, sniff_extension)
            changed = None
            self.seconds += time.perf_counter() - start
        else:
            status = recent_status(as_path(file))  # compared again after the file is read
            extension, size = _type_and_size(reference, is_audio=is_audio)
            digest, changed = None, (status.st_size, status.st_mtime_ns)
        path, offset = file.lstrip("/"), reference.offset or 0
        # A member of a tar follows its header. Names of members repeat, and Energon needs an extension to decode.
        source, member = (TARS, f"{path}/{offset}.{extension}") if offset else (FILES, path)
        if is_remote(file):  # Energon's auxiliary datasets start from the root of the disk
            locator = Locator(file, offset, size, digest, changed)
        else:
            locator = Locator(file, offset, size, digest, changed, source, member)
        return replace(reference, extension=extension, locator=locator)

    def _stored(self, reference: MediaReference, data: bytes, *, is_audio: bool) -> MediaReference:
        extension, digest = stored_extension(data) if is_audio else sniff_extension(data), media_digest(data)
        place = None if self.stored is None else self.stored.find(digest)
        if place is None:
            raise RecordError(Reason.CORRUPT_IMAGE, f"a file of {len(data)} bytes has other bytes")
        tar, offset = place
        file = f"../{STORED}/{tar}"  # relative to the dataset, so that the output folder can be moved
        locator = Locator(file, offset, len(data), digest, None, STORED, f"{digest}.{extension}")
        return replace(reference, extension=extension, locator=locator)


def _content(reference: MediaReference, extension_of: Callable[[bytes], str]) -> tuple[str, int, str]:
    """File extension by content, bytes and digest."""
    data = reference.read()
    return extension_of(data), len(data), media_digest(data)


def _audio_content(reference: MediaReference) -> tuple[str, int, str]:
    """Return `_content` of an audio file; of the last few files, it is kept, as a file may have thousands of parts."""
    status = recent_status(as_path(reference.resolved()))
    return _kept_content(reference, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _kept_content(reference: MediaReference, size: int, changed: int) -> tuple[str, int, str]:
    return _content(reference, stored_extension)


def _type_and_size(reference: MediaReference, *, is_audio: bool) -> tuple[str, int]:
    """File extension by content, and bytes, from the header of an image or the start of a video or audio file."""
    with reference.open() as stream:
        start, size = stream.read(SIGNATURE_BYTES), stream.seek(0, os.SEEK_END)
    if is_audio:
        return stored_extension(start), size
    if (extension := video_extension(start)) is not None:
        return extension, size
    header = read_header(reference)
    return header.extension, header.num_bytes
