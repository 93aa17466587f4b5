"""Files of measured chunks: the restart state of the measure stage.

Input: the columns of the measured records of a chunk (a range of a source), their tokens if the flavor stores
tokens, and digests of their images in memory if media are stored by reference. Output: files that later stages and
later runs read; a chunk with complete files is not measured again.

NAME.arrow   the columns of SCHEMA, a table row per record; its metadata has the counts of COUNTED, and the paths of
             all media files with a digest of their sizes and times of change, and the entries of NAME.media
NAME.tokens  for every measured record its L input_ids and then its L labels, as little-endian int32, without a header;
             offsets follow from the lengths of the records. With this file, no text is tokenized twice. If a record
             has loss weights, the weights of all tokens follow, as little-endian float32.
NAME.columns for every measured record with columns a .npy of a structured array (L,), whose fields are the columns, so
             that the tokens of a fragment are one range; offsets follow from the column `columns_bytes`.
NAME.media   for every image or video of a measured record that is in no file, such as a cell of a table, an entry of
             the dtype `MEDIA_ENTRY`; of equal files only the first. Rejected records have none.
NAME.frames  for every measured record with videos or audio the selected frames of each video and the clip of each
             audio file, in JSON (formats/videos.py, formats/audios.py); offsets follow from the column
             `frames_bytes`. The frames that are measured are the frames that are written, also if the lengths are
             planned again for another `seq_len`.

The tokens of a record that is a group are the tokens of its samples, end to end.

chunk_reader.py reads tokens, columns and frames of single records.
"""

import hashlib
import io
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from energon_packed.encoding import EncodedSample
from energon_packed.errors import Reason
from energon_packed.files import atomic_path, atomic_write
from energon_packed.formats.audios import clip_as_dict
from energon_packed.formats.videos import frames_as_dict
from energon_packed.pipeline.measured.arrow_columns import as_numpy, numeric_column, string_column
from energon_packed.records import AudioClip, FrameSelection, MediaReference
from energon_packed.records.media.reference import media_digest
from energon_packed.storage import StorageError, as_path, is_remote, map_paths

Int64 = npt.NDArray[np.int64]
NUMBER = 4
"""Bytes of an id, a label or a loss weight."""
TOKEN = 2 * NUMBER
"""Bytes of a token without its weight: an id and a label."""
# Suffixes of the files of a chunk beside NAME.arrow.
TOKENS, COLUMNS, MEDIA, FRAMES = ".tokens", ".columns", ".media", ".frames"
KINDS = ("text", "image", "video", "audio")
PACKED = "packed"
TRUNCATED = "truncated"
"""Status in lengths.parquet of a record that is packed, but truncated to `seq_len`."""
SPLIT, FRAGMENT = "split", "fragment"
"""Status in lengths.parquet of a record that is packed as fragments, and of each fragment."""
STATUSES = (PACKED, *(reason.value for reason in Reason))
WEIGHTED = "loss weights other than 0 and 1"
"""Note of a record with such weights."""
SCHEMA = pa.schema(
    {
        "address": pa.int64(),
        "size": pa.int32(),
        "length": pa.int32(),
        "supervised": pa.int32(),
        "weight_checksum": pa.int64(),
        "text_bytes": pa.int32(),
        "media_bytes": pa.int64(),
        "media_stamp": pa.int64(),
        "num_images": pa.int32(),
        "num_decoded": pa.int32(),
        "kind": pa.int8(),
        "status": pa.int8(),
        "narrow": pa.int8(),
        "divisible": pa.int8(),
        "id": pa.string(),
        "detail": pa.string(),
    }
)
MORE_COLUMNS = {
    "num_videos": pa.int32(),
    "num_frames": pa.int32(),  # selected frames of all videos
    "extracted_bytes": pa.int64(),  # of the media with these frames as images, if the run extracts frames
    "frames_bytes": pa.int32(),  # of the record in NAME.frames
    "num_audios": pa.int32(),
    "audio_ms": pa.int64(),  # duration of its audio files and used tracks in milliseconds
    "columns_bytes": pa.int64(),  # of the record in NAME.columns
    "group": pa.int64(),  # hash of its source and the key of its group; 0 without a group
    "members": pa.int32(),  # samples of a record that is a group; 0 for others
    "labeled": pa.int8(),  # 1 for a sample with a role, a label or per-token values
}
"""Columns that a chunk file has only if a value is not 0: most records are text without groups."""
_MEMBERS = b"members"  # key of the metadata: `MEMBER` of all members of the chunk, in order
MEMBER = np.dtype([("length", "<i4"), ("supervised", "<i4"), ("images", "<i4")])
"""Tokens, targets and images of a sample of a record that is a group."""
Members = npt.NDArray[np.void]
COUNTED = ("unused_fields", "notes")
"""Attributes of a conversation that are lists of strings; a chunk file has the number of records with each string."""
StringCounts = dict[str, Counter[str]]
_MEDIA, _MEDIA_DIGEST = b"media", b"media_digest"  # keys of the metadata; both are missing without media files
_ENTRIES = b"media_entries"  # key of the metadata: entries of NAME.media, or -1 if there are images but no such file
MEDIA_ENTRY = np.dtype(
    [
        ("high", "<u8"), ("low", "<u8"), ("size", "<i8"),
        ("address", "<i8"), ("bytes", "<i4"), ("source", "<i4"), ("image", "<i4"),
    ]
)  # fmt: skip
"""Image in memory: both halves of its digest (see `media_digest`) and its size, then address, bytes and source of its
record, and the index of the image in the record."""
MediaEntries = npt.NDArray[np.void]
NUMERIC = {
    name: np.dtype(str(kind)).type  # `to_numpy` would import pandas, if it is installed
    for name, kind in (*zip(SCHEMA.names, SCHEMA.types, strict=True), *MORE_COLUMNS.items())
    if name not in ("id", "detail")
}
# Records that were rejected for these reasons are measured again, because the files may have been fixed.
_FIXABLE = [
    STATUSES.index(reason.value)
    for reason in (
        Reason.MISSING_IMAGE,
        Reason.CORRUPT_IMAGE,
        Reason.IMAGE_OUTSIDE_ROOT,
        Reason.MISSING_PATCH_POSITIONS,
        Reason.MISSING_VIDEO,
        Reason.CORRUPT_VIDEO,
        Reason.UNSUPPORTED_VIDEO,
        Reason.MISSING_AUDIO,
        Reason.CORRUPT_AUDIO,
        Reason.UNSUPPORTED_AUDIO,
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Range of a source, measured into a file.

    Attributes:
        source: index of the source.
        start, stop: range of addresses.
        file: file of the measured records.
        keep_tokens: their tokens are stored too.
        keep_media: digests of their images in memory are stored too.
    """

    source: int
    start: int
    stop: int
    file: Path
    keep_tokens: bool = False
    keep_media: bool = False

    @property
    def label(self) -> str:
        """Description for messages."""
        return f"measuring input {self.source} from {self.start} to {self.stop}"


class MediaFiles:
    """Size and time of the last change of media files, read once for each path; of objects, at the same time.

    Args:
        paths: files to add.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._stamps: dict[str, bytes] = {}
        self.add(paths)

    def add(self, paths: Iterable[str]) -> None:
        """Read size and time of more files."""
        new = [path for path in dict.fromkeys(paths) if path not in self._stamps]
        self._stamps.update(zip(new, map_paths(_stamp, new), strict=True))

    def __len__(self) -> int:
        return len(self._stamps)

    def stamp(self, references: Iterable[MediaReference]) -> int:
        """Compute a digest of path, size and time of change of the files of a record; 0 without files.

        Call it before the content is read: an image that is replaced later has another digest in the next run.
        """
        files = [file for reference in references if (file := reference.file) is not None]
        self.add(files)
        stamps = [self._stamps[file] for file in files]
        return int.from_bytes(_digest(stamps)[:8], "little", signed=True) if files else 0

    def digest(self) -> bytes:
        """Digest of paths, sizes and times of change of all files; b"" without files."""
        return _digest(self._stamps.values()) if self._stamps else b""

    def dump(self) -> bytes:
        """Compress the paths: images of a chunk are mostly in the same folder."""
        return zlib.compress("\0".join(self._stamps).encode("utf-8", "surrogatepass"), 1)

    @staticmethod
    def load(paths: bytes) -> "MediaFiles":
        """Read size and time of the files that `dump` listed."""
        return MediaFiles(zlib.decompress(paths).decode("utf-8", "surrogatepass").split("\0"))


def _stamp(path: str) -> bytes:
    try:
        status = as_path(path).stat() if is_remote(path) else os.stat(path)
        change = f"{status.st_size} {status.st_mtime_ns}"
    except StorageError:
        raise
    except (OSError, ValueError):  # a missing file, or an impossible name: its record is rejected when it is read
        change = ""
    return f"{path}\0{change}".encode("utf-8", "surrogatepass")


def _digest(stamps: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for stamp in stamps:
        digest.update(stamp + b"\0")
    return digest.digest()


def compare_media(chunk: Chunk) -> tuple[Chunk, int, bool]:
    """Compare the media files of a measured chunk with their state when it was measured.

    Returns:
        The chunk, the number of its files, and whether all of them have the same size and time of the last change.
    """
    metadata = read_rows(chunk.file).schema.metadata
    files = MediaFiles.load(metadata[_MEDIA])
    return chunk, len(files), files.digest() == metadata[_MEDIA_DIGEST]


class MediaInMemory:
    """Images, videos and audio files of the measured records of a chunk that are in no file.

    Args:
        chunk: the chunk. Without `keep_media`, it is only noted that there are files.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._entries: dict[str, tuple[int, ...]] = {}
        self._any = False

    def add(self, address: int, size: int, files: Iterable[MediaReference]) -> None:
        """Add the `media_files` of the record with this address and size."""
        for index, image in enumerate(files):
            if image.data is None:
                continue
            self._any = True
            if self._chunk.keep_media and (digest := media_digest(image.data)) not in self._entries:
                halves = int(digest[:16], 16), int(digest[16:], 16)
                self._entries[digest] = (*halves, len(image.data), address, size, self._chunk.source, index)

    def write(self) -> int:
        """Write the file; return the number of its entries, or -1 if there are images and it was not asked for."""
        entries = np.array(list(self._entries.values()), dtype=MEDIA_ENTRY)
        write_beside(self._chunk.file, MEDIA, entries.tobytes())
        return -1 if self._any and not self._entries else len(self._entries)


def read_media(rows_file: Path) -> MediaEntries:
    """Read the images and videos in memory of a measured chunk."""
    file = rows_file.with_suffix(MEDIA)
    return np.fromfile(file, dtype=MEDIA_ENTRY) if file.exists() else np.zeros(0, dtype=MEDIA_ENTRY)


def dump_frames(selections: Sequence[FrameSelection], clips: Sequence[AudioClip] = ()) -> bytes:
    """Return the selected frames of the videos of a record, and the clips of its audio files, as JSON; b"" without."""
    if not selections and not clips:
        return b""
    values = [*map(frames_as_dict, selections), *map(clip_as_dict, clips)]
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def write_beside(rows_file: Path, suffix: str, content: bytes) -> None:
    """Write a file beside the file of the records of a chunk; there is none without content."""
    if content:
        atomic_write(rows_file.with_suffix(suffix), content)
    else:
        rows_file.with_suffix(suffix).unlink(missing_ok=True)  # of an earlier run that measured other records


def write_rows(
    file: Path,
    columns: Mapping[str, Sequence[Any]],
    counts: StringCounts,
    media: MediaFiles,
    entries: int = 0,
    members: Members | None = None,
) -> None:
    """Write the columns of `SCHEMA`, and the columns of `MORE_COLUMNS` that have a value other than 0.

    The file appears when it is complete.

    Args:
        file: file of the chunk.
        columns: columns by name.
        counts: result of `count_strings` for all records of the chunk.
        media: files of all images and .npy files of the chunk.
        entries: result of `MediaInMemory.write`.
        members: of all records that are groups, in order; None without such a record.
    """
    metadata = {name.encode(): orjson.dumps(counts[name]) for name in COUNTED}
    metadata[_ENTRIES] = str(entries).encode()
    if media:
        metadata |= {_MEDIA: media.dump(), _MEDIA_DIGEST: media.digest()}
    if members is not None:
        metadata[_MEMBERS] = members.tobytes()
    schema = SCHEMA
    for name, kind in MORE_COLUMNS.items():
        if any(columns[name]):
            schema = schema.append(pa.field(name, kind))
    schema = schema.with_metadata(metadata)
    arrays = [
        numeric_column(columns[name], NUMERIC[name]) if name in NUMERIC else string_column(columns[name])
        for name in schema.names
    ]
    with (
        atomic_path(file) as temporary,
        pa.OSFile(str(temporary), "wb") as out,
        pa.ipc.new_file(out, schema) as writer,
    ):
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def read_rows(file: Path) -> Any:
    """Map the Arrow table of a chunk file into memory."""
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def read_members(rows: Any) -> Members:
    """Return the members that `write_rows` stored, from the table of a chunk file."""
    return np.frombuffer(rows.schema.metadata.get(_MEMBERS, b""), dtype=MEMBER)


def read_counts(rows: Any) -> StringCounts:
    """Return the counts that `write_rows` stored, from the table of a chunk file."""
    return {name: Counter(orjson.loads(rows.schema.metadata[name.encode()])) for name in COUNTED}


def count_strings(conversations: Sequence[Any]) -> StringCounts:
    """Count the conversations that list each string, by the names in `COUNTED`."""
    return {
        name: Counter(
            _utf8(string) for conversation in conversations for string in set(getattr(conversation, name, ()))
        )
        for name in COUNTED
    }


def _utf8(string: str) -> str:
    """Replace lone surrogates, which JSON input may contain and UTF-8 cannot encode, by question marks."""
    return string if string.isascii() else string.encode(errors="replace").decode()


def measured_records(chunk: Chunk) -> int:
    """Number of records in a measured chunk."""
    return int(read_rows(chunk.file).num_rows)


def is_measured(chunk: Chunk) -> bool:
    """Whether an earlier run has measured a chunk, with no record whose missing or damaged media may be fixed now.

    Media files that have changed since then are found by `compare_media`.
    """
    if not chunk.file.exists():
        return False
    try:
        rows = read_rows(chunk.file)
        status = as_numpy(rows["status"], np.int8)
        if chunk.keep_tokens:
            size = tokens_size(as_numpy(rows["length"], np.int32))
            if chunk.file.with_suffix(TOKENS).stat().st_size not in (size, size + size // TOKEN * NUMBER):
                return False
        if chunk.keep_media:
            media = chunk.file.with_suffix(MEDIA)
            size = media.stat().st_size if media.exists() else 0
            if int(rows.schema.metadata[_ENTRIES]) * MEDIA_ENTRY.itemsize != size:
                return False
        for name, suffix in (("columns_bytes", COLUMNS), ("frames_bytes", FRAMES)):
            if name in rows.schema.names:
                size = as_numpy(rows[name], NUMERIC[name]).sum(dtype=np.int64)
                if chunk.file.with_suffix(suffix).stat().st_size != size:
                    return False
    except (pa.ArrowInvalid, OSError):  # damaged
        return False
    return not np.isin(status, _FIXABLE).any()


def has_media(chunk: Chunk) -> bool:
    """Whether a measured chunk has media files."""
    return _MEDIA in read_rows(chunk.file).schema.metadata


def dump_columns(sample: EncodedSample | None) -> bytes:
    """Return the columns of a sample as a .npy of a structured array (L,); b"" without columns."""
    if sample is None or not sample.columns:
        return b""
    fields = [(name, column.dtype.newbyteorder("<"), column.shape[1:]) for name, column in sample.columns.items()]
    rows = np.empty(len(sample), dtype=fields)
    for name, column in sample.columns.items():
        rows[name] = column
    out = io.BytesIO()
    np.lib.format.write_array(out, rows, version=(1, 0), allow_pickle=False)
    return out.getvalue()


def write_tokens(file: Path, samples: Sequence[EncodedSample]) -> None:
    """Write the tokens of the measured records of a chunk, in order; the file appears when it is complete."""
    with atomic_path(file) as temporary, temporary.open("wb") as out:
        for sample in samples:
            for values in (sample.input_ids, sample.labels):
                out.write(values.astype("<i4").data)
        weights = [sample.loss_weights for sample in samples]
        if any([own is not None for own in weights]):
            for sample, own in zip(samples, weights, strict=True):
                out.write((np.ones(len(sample)) if own is None else own).astype("<f4").tobytes())


def tokens_size(lengths: npt.NDArray[np.int32]) -> int:
    """Bytes of the ids and labels of records with these lengths; -1 for a rejected one."""
    return int(TOKEN * lengths[lengths > 0].sum(dtype=np.int64))
