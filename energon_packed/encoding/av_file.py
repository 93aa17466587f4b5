"""Opens video and audio files with FFmpeg, by PyAV; the only module that opens them.

Files are untrusted: FFmpeg reads through `MediaReference.open` and can open nothing else, its containers are those of
a `FileKind`, and bytes and memory have limits. Damage inside the block of `opened_file` becomes a RecordError.
"""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

import numpy as np

from energon_packed.encoding.vision.video_container import ContainerHeader, has_damaged_page, read_container_header
from energon_packed.errors import ConfigError, Reason, RecordError, ResourceError
from energon_packed.libraries import calls
from energon_packed.records import MediaReference
from energon_packed.records.media.kinds import MediaKind
from energon_packed.storage import is_remote
from energon_packed.system import memory_limit, raise_resource_error

MAX_FILE_BYTES = 1 << 34
"""Bytes of the largest file, 16 GiB: more than 3 hours of video at 10 Mbit/s. All are read to count the frames."""
_MOST_BETWEEN_PACKETS = 1 << 28  # bytes that are read for one packet, as large as a frame of 8192 * 8192 at 4 bytes
_OPEN_MEMORY = 1 << 29  # bytes that reading of header and index may allocate
_BLOCK, _REMOTE_BLOCK = 1 << 15, 1 << 20  # bytes per read: a request of an object is slower than reading 1 MiB
# PyAV 18 decodes titles and comments strictly by default; later releases keep other bytes, and have no such argument.
_METADATA: dict[str, dict[str, Any]] = {"18": {"metadata_errors": "replace"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """Kind of a file.

    Attributes:
        media: the kind of media that it contains, for messages and reasons.
        demuxers: names of the demuxers; other formats of FFmpeg read other files (playlists), devices, or images.
        containers: their formats, for messages.
        remedy: what to do with a damaged file.
        options: options of FFmpeg.
    """

    media: MediaKind
    demuxers: str
    containers: str
    remedy: str
    options: Mapping[str, str] = field(default_factory=dict)


class Damaged(Exception):
    """A file cannot be used; the message is what it is or has, after its name."""


class OpenFile:
    """An open file.

    Attributes:
        av: the module.
        container: the file, as PyAV reads it.
        stream: its bytes.
        header: of the container.
        num_bytes: size of the file.
        needed: bytes that the decoder of an intact file allocates.
    """

    def __init__(self, av: Any, container: Any, stream: "LimitedStream", header: ContainerHeader, num_bytes: int):
        self.av, self.container, self.stream = av, container, stream
        self.header, self.num_bytes, self.needed = header, num_bytes, _BLOCK

    def check_pages(self) -> None:
        """Raise `Damaged` if a page of an Ogg file is damaged: FFmpeg leaves it out. Call it after the last packet."""
        if self.container.format.name == "ogg" and has_damaged_page(self.stream.file):
            raise Damaged("has damaged data; copy it again")


class LimitedStream:
    """A file for FFmpeg, which may read a limited number of bytes until the next packet."""

    def __init__(self, stream: BinaryIO) -> None:
        self.file = stream
        self.spent = 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data = self.file.read(size)
        self.spent += len(data)
        if self.spent > _MOST_BETWEEN_PACKETS:
            raise Damaged(f"has more than {_MOST_BETWEEN_PACKETS:,} bytes without a frame; convert it")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        if whence == 0 and offset < 0:
            raise Damaged("has a negative place in its index")
        try:
            return self.file.seek(offset, whence)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of the storage
                raise
            # A place before the start: FFmpeg continues after AVERROR(EINVAL), and PyAV would print a traceback.
            return -errno.EINVAL

    def tell(self) -> int:
        """Return the place."""
        return self.file.tell()


def load_av() -> Any:
    """Return the module of PyAV.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError("`av` is needed for video and audio files; pip install 'energon-packed[video]'") from error
    return av


@contextmanager
def opened_file(
    reference: MediaReference, kind: FileKind, *, passed: tuple[type[Exception], ...] = ()
) -> Iterator[OpenFile]:
    """Open a file; errors inside the block that its content causes become a RecordError with the reason of `kind`.

    Args:
        reference: the file.
        kind: what it must be.
        passed: exceptions of the block that are not converted.

    Raises:
        RecordError: the file is missing or damaged, or outside its root.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    av = load_av()
    with calls("av"), _open_reference(reference, kind) as stream:
        container, needed = None, _BLOCK
        try:
            num_bytes = stream.seek(0, 2)
            if not num_bytes:
                raise Damaged("is empty, 0 bytes")
            if num_bytes > MAX_FILE_BYTES:
                raise Damaged(f"has {num_bytes:,} bytes, more than the limit of {MAX_FILE_BYTES:,}; split it")
            header = read_container_header(stream, num_bytes)
            if header.end > num_bytes:
                raise Damaged(f"ends after {num_bytes:,} of {header.end:,} bytes; copy it again")
            stream.seek(0)
            limited = LimitedStream(stream)
            with memory_limit(_OPEN_MEMORY):
                container = av.open(
                    limited,
                    options={**kind.options, "threads": "1"},
                    container_options={"format_whitelist": kind.demuxers, "protocol_whitelist": "none"},
                    buffer_size=_REMOTE_BLOCK if is_remote(reference.file or "") else _BLOCK,
                    io_open=_refuse,
                    **_METADATA.get(av.__version__.partition(".")[0], {}),
                )
            file = OpenFile(av, container, limited, header, num_bytes)
            try:
                yield file
            finally:
                needed = file.needed
        except (RecordError, ResourceError):
            raise
        except passed:
            raise
        except Damaged as error:
            raise _corrupt(reference, kind, str(error)) from error
        except MemoryError as error:
            # FFmpeg reports sizes in damaged data as a lack of memory. It is one if an intact file has too little.
            try:
                np.empty(needed, dtype=np.uint8)
            except MemoryError as shortage:
                raise_resource_error(shortage, reference.label)
            raise _corrupt(reference, kind, "needs more memory than its frames have, as damaged sizes do") from error
        except av.error.FFmpegError as error:
            raise _corrupt(reference, kind, _described(error, kind, is_open=container is not None)) from error
        except OSError as error:
            raise_resource_error(error, reference.label)
            raise _corrupt(reference, kind, error.strerror or str(error)) from error
        # Of PyAV: a name that is not in the header, or a value that it does not know.
        except (ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            raise _corrupt(reference, kind, f"cannot be read: {error}") from error
        finally:
            if container is not None:
                container.close()


def _open_reference(reference: MediaReference, kind: FileKind) -> BinaryIO:
    try:
        return reference.open()
    except RecordError as error:
        if error.reason is not Reason.MISSING_IMAGE:
            raise
        detail = error.detail.replace("of an image file", f"of {kind.media.a.removesuffix(' file')} file")
        raise RecordError(kind.media.missing, detail) from error


def _refuse(name: str, flags: int, options: object) -> NoReturn:
    raise Damaged(f"refers to another file, {name[:80]!r}, which is not opened; store it in one file")


def _described(error: Exception, kind: FileKind, *, is_open: bool) -> str:
    if not is_open:
        return f"is not {kind.media.a} of the formats {kind.containers}, or its header is damaged"
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return f"has damaged data ({reason})"


def _corrupt(reference: MediaReference, kind: FileKind, detail: str) -> RecordError:
    detail = " ".join(detail.split())
    remedy = "" if ";" in detail else f"; {kind.remedy}"
    return RecordError(kind.media.corrupt, f"{reference.label} {detail}{remedy}")
