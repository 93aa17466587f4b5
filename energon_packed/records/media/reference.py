"""MediaReference: a path, a byte range of a file, or bytes in; the bytes of one image (or .npy file) out.

No other module reads media. Paths from data files are untrusted: with a `root`, a path that leaves it as written
(through `..`) is refused. Links inside the root are followed, unless the root refuses links. Only regular files are
opened: opening a FIFO would wait for its writer, and a device may never end.
"""

import base64
import binascii
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, urlparse

from blake3 import blake3

from energon_packed.errors import DataChangedError, Reason, RecordError, ResourceError
from energon_packed.files import IrregularFile, LinkRefused, open_regular, open_shared, read_range, read_start, status
from energon_packed.records.fields import read_setting, shown, unsupported_field
from energon_packed.records.media.kinds import MEDIA_KINDS, MediaKind
from energon_packed.storage import RangeStream, RemotePath, RemoteReader, absolute_name, as_path, is_remote
from energon_packed.system import ABSENT, raise_resource_error

CHANGED_REMEDY = "Restore the file, pass `media_root` if it was moved, or pack again."
_BLOCK = 1024  # bytes per read of a byte range, so that reading a header does not read the whole image
_REMOTE_BLOCK = 1 << 16  # the same of an object: a request is slower than the transfer of more bytes
IMAGE_SETTINGS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Fields of a content part or object with an image that resize it, as in qwen-vl-utils."""


class Locator(NamedTuple):
    """Location of a media file that a pack refers to; formats/references.py describes its fields."""

    file: str
    offset: int
    size: int
    digest: str | None = None
    changed: tuple[int, int] | None = None
    source: str | None = None
    member: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object, without the keys that are not set."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class PackedImage(NamedTuple):
    """An image of a pack that stores its location: what its bytes must be.

    Attributes:
        place: pack and sample, for messages.
        digest: `media_digest` of its bytes, or None.
        changed: size of its file, and time of the last change in ns, or None.
        kind: `image`, `video` or `audio`, for messages.
    """

    place: str
    digest: str | None
    changed: tuple[int, int] | None
    kind: str = "image"

    def error(self, change: str) -> DataChangedError:
        """Return the error for a change, such as `PATH has other bytes`."""
        # Ids and names of files may have line breaks, and workers send an error as its last line.
        message = in_line(f"{self.place}, is not the packed {self.kind}: {change}")
        return DataChangedError(f"{message}. {CHANGED_REMEDY}")


class ImageChanged(Exception):
    """A file is not the packed file; the message is its path and its change."""


def in_line(text: str) -> str:
    """Escape line breaks."""
    return text.replace("\n", "\\n").replace("\r", "\\r")


def read_packed(
    path: str | Path,
    offset: int,
    size: int,
    *,
    digest: str | None,
    changed: Sequence[int] | None,
    requested: bytes | None = None,
) -> bytes:
    """Read an image whose location is stored in a pack, and compare its bytes: the only reader of such images.

    Args:
        path, offset, size: the bytes.
        digest, changed: as in `PackedImage`.
        requested: the bytes, if they were requested together with others.

    Raises:
        ImageChanged: the file changed, or is missing.
        ResourceError: it cannot be read.
    """
    end, data, now = offset + size, requested, None
    try:
        if data is None:
            if offset == 0 and not is_remote(path):
                now, data = read_start(path, size)  # the file of a single image would take the place of an open tar
            else:
                # A tar stays open for its other members, but must be the file that has this name now: a replaced or
                # removed file must not be read from the file opened before.
                stream = open_shared(as_path(path), current=True)
                now = status(stream)
                # Before reading, so that a size in a damaged locator allocates no memory.
                data = read_range(stream, offset, size) if end <= now.st_size else b""
    except IrregularFile as error:
        raise ImageChanged(f"{path} {error}") from error
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno in ABSENT:
            raise ImageChanged(f"{path} does not exist ({error.strerror})") from error
        raise_resource_error(error, path)
        raise ResourceError(f"{path}: {error}; check the file system") from error
    if len(data) < size:
        has = "" if now is None else f"has {now.st_size} bytes and "
        raise ImageChanged(f"{path} {has}ends before byte {end}")
    if digest is not None and media_digest(data) != digest:
        raise ImageChanged(f"{path} has other bytes")
    if changed is not None and now is not None and [now.st_size, now.st_mtime_ns] != list(changed):
        raise ImageChanged(f"{path} has another size or time of change")
    return data


def media_digest(data: bytes) -> str:
    """Return the first 128 bits of the BLAKE3 hash of a file, as 32 hex digits (`b3sum --length 16`)."""
    return blake3(data).hexdigest(length=16)


class ImageRoot(NamedTuple):
    """The folder of media paths, as a data file uses it.

    Attributes:
        folder: folder that relative paths start from, and that every path must stay in as it is written.
        start: folder of the data file: a path such as `../images/x.png` that leaves `folder` starts from it instead.
        links: follow symbolic links below `folder`; False refuses them.
    """

    folder: str
    start: str | None = None
    links: bool = True

    def find(self, path: str) -> tuple[str, bool]:
        """Return the absolute path of a file without `..`, links unresolved, and whether it is inside `folder`."""
        folder = absolute_name(self.folder)
        climbs = os.path.normpath(path).split("/", 1)[0] == ".."
        starts = [self.start, folder] if climbs and self.start is not None else [folder]
        found = [_joined(start, path) for start in starts]
        inside = [name for name in found if _contains(folder, name)]
        # A folder that is reached by a link has two names, and absolute paths may start with either of them.
        if not inside and os.path.isabs(path) and not is_remote(folder):
            inside = [name for name in found if _contains(os.path.realpath(folder), name)]
        return (inside or found)[0], bool(inside)


def _joined(folder: str, path: str) -> str:
    return absolute_name(as_path(path) if is_remote(path) else as_path(folder) / path)


def _contains(folder: str, path: str) -> bool:
    # The separator keeps /data/images2 outside the folder /data/images.
    return path == folder or path.startswith(folder.rstrip("/") + "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReference:
    """Bytes of a single media file: exactly one of `path` and `data` is set.

    Attributes:
        path: a file; relative paths start from `root`, or from the working directory if `root` is None.
        data: the bytes in memory.
        root: folder that `path` must stay inside as it is written; None for no limit.
        offset, size: byte range of `path`; None for the whole file.
        packed: what the bytes must be, of an image whose location is stored in a pack. They are compared at every
            opening, for which all of them are read.
        name: name of `data` for messages, such as its part of a pack; None if it has no name.
        settings: settings of the record for this image, by the names of `IMAGE_SETTINGS`, such as
            {"max_pixels": 50176}; they win over the settings of the vision family. None without settings.
        extension: file extension of its format in a pack, without a dot; "" if it is in no pack.
        locator: location that packs store in place of the bytes; None to store the bytes.

    Examples:
        >>> image = MediaReference.from_value("cat.jpg", "photos")
        >>> image.label
        'cat.jpg'
    """

    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    root: str | ImageRoot | None = None
    offset: int | None = None
    size: int | None = None
    packed: PackedImage | None = None
    name: str | None = field(default=None, compare=False)
    settings: Mapping[str, int] | None = field(default=None, hash=False)
    extension: str = field(default="", compare=False)
    locator: Locator | None = field(default=None, compare=False)

    @classmethod
    def from_value(
        cls, value: object, root: str | ImageRoot | None = None, *, kind: str = "image"
    ) -> "MediaReference":
        """Make a reference from a record's value: path, `file://` or `data:` URL, bytes, {"bytes"/"path"/"url"}.

        Args:
            value: the value.
            root: folder that relative paths start from, and that they must stay inside.
            kind: `image`, `video` or `audio`, for errors.

        Raises:
            RecordError: `missing_image`, `missing_video` or `missing_audio` if the value does not name media;
                `unsupported_media` if it is remote; `unsupported_field` for an invalid setting of an image.
        """
        if isinstance(value, MediaReference):
            return value
        expected = MEDIA_KINDS[kind]
        # `bytes` first: datasets stores {"bytes", "path"}, and its path is a name without a file.
        if isinstance(value, dict):
            inner = next(
                (value[key] for key in ("bytes", "path", "url", "image") if value.get(key)), value.get("bytes")
            )
            if isinstance(inner, dict):
                raise RecordError(expected.missing, f"{expected.a} is nested in two objects; use a path, url or bytes")
            if inner is None:
                detail = f"{expected.a} is {shown(value)}, which has no path, url, bytes or image; use one of them"
                raise RecordError(expected.missing, detail)
            reference = cls.from_value(inner, root, kind=kind)
            return reference.with_settings(read_image_settings(value)) if kind == "image" else reference
        if isinstance(value, bytes | bytearray | memoryview):
            return cls(data=bytes(value))
        if not isinstance(value, str) or not value:
            raise RecordError(expected.missing, f"{expected.a} is {shown(value)}; use a path or bytes")
        if value.startswith("data:"):
            return cls(data=_data_url(value, expected))
        if value.startswith("file://"):
            return cls(path=_file_url(value), root=root)
        # Nothing is fetched: a run must not depend on the network, nor contact hosts that a data file names.
        is_object = is_remote(value)
        if is_object and root is not None and is_remote(_root_of(root).folder):
            return cls(path=value, root=root)
        if is_object:
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"{shown(value)} is remote, and `image_root` is not; download it, or set `image_root` to its folder",
            )
        if value.startswith(("http://", "https://")):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                f"{shown(value)} is remote; download it and pass a path, nothing is fetched",
            )
        return cls(path=value, root=root)

    def with_settings(self, settings: Mapping[str, int]) -> "MediaReference":
        """Return the image with these settings, except settings that it has already."""
        return replace(self, settings={**settings, **(self.settings or {})}) if settings else self

    def resolved(self) -> str:
        """Return the path of the file, links unresolved; absolute if there is a `root`.

        Raises:
            RecordError: `image_outside_root` if it is not inside `root`.
        """
        assert self.path is not None
        if self.root is None:
            return self.path
        if "\0" in self.path:
            raise RecordError(Reason.MISSING_IMAGE, f"{shown(self.path)} contains a null byte")
        root = _root_of(self.root)
        found, is_inside = root.find(self.path)
        if is_inside:
            return found
        both = (
            "/"
            if is_remote(found) or is_remote(root.folder)
            else os.path.commonpath([found, absolute_name(root.folder)])
        )
        such = "" if os.path.isabs(self.path) or both == "/" else f", such as {both}"
        raise RecordError(
            Reason.IMAGE_OUTSIDE_ROOT,
            f"{self.path} leads to {found}, outside `image_root` {root.folder}; pass a folder that contains "
            f"both{such}",
        )

    def open(self) -> BinaryIO:
        """Open a readable, seekable binary stream over the bytes.

        Raises:
            RecordError: `missing_image`, also if the path is not a regular file; `image_outside_root`.
            ResourceError: the file exists, but cannot be opened.
            DataChangedError: it is not the packed image.
        """
        if self.data is not None:
            return io.BytesIO(self.data)
        if self.packed is not None:
            return io.BytesIO(self._read_packed(self.packed))
        return self._open()

    def _read_packed(self, packed: PackedImage) -> bytes:
        path, size = as_path(self.resolved()), self.size
        assert size is not None  # of every locator
        try:
            return read_packed(path, self.offset or 0, size, digest=packed.digest, changed=packed.changed)
        except ImageChanged as change:
            raise packed.error(str(change)) from change
        except ResourceError as error:
            raise ResourceError(f"{packed.place}, cannot be read: {error}") from error

    def _open(self) -> BinaryIO:
        path = self.resolved()
        is_object = is_remote(path)
        try:
            if not is_object:
                stream = open_regular(path, self._without_links())
            elif self.offset is None:
                stream = RemoteReader(RemotePath(path), _REMOTE_BLOCK, is_recent=True)
            else:
                stream = open_shared(RemotePath(path))
        except (IrregularFile, IsADirectoryError) as error:
            raise RecordError(Reason.MISSING_IMAGE, f"{self.path}: {error}; pass the path of an image file") from None
        except LinkRefused as error:
            raise RecordError(Reason.IMAGE_OUTSIDE_ROOT, str(error)) from None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in ABSENT:
                raise_resource_error(error, self.path)
                raise
            hint = "; its folders are separated by \\, write / in the record" if "\\" in path else ""
            raise RecordError(Reason.MISSING_IMAGE, f"{absolute_name(path)}: {_reason(error)}{hint}") from error
        if self.offset is None:
            return stream
        end = status(stream).st_size
        size = end - self.offset if self.size is None else self.size
        # A shorter range would decode as a truncated image with a misleading message.
        if self.offset + size > end:
            if not is_object:
                stream.close()
            raise RecordError(
                Reason.MISSING_IMAGE,
                f"{self.path} ends inside bytes {self.offset}..{self.offset + size}",
            )
        block = _REMOTE_BLOCK if is_object else _BLOCK
        return io.BufferedReader(_Window(stream, self.offset, size, is_owner=not is_object), buffer_size=block)

    def num_bytes(self) -> int:
        """Return the number of bytes without reading them. Raises the errors of `open`."""
        if self.locator is not None:
            return self.locator.size
        with self.open() as stream:
            return stream.seek(0, os.SEEK_END)

    def read(self) -> bytes:
        """Read all bytes, as many as the file has when it is opened. Raises the errors of `open`, too.

        Raises:
            RecordError: `missing_image` if the file grows in the meantime.
            ResourceError: the file cannot be read.
        """
        if self.data is not None:
            return self.data
        with self.open() as stream:
            try:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(0)
                # One byte more shows whether a writer is still appending; objects are complete, and read at once.
                data = stream.read() if self.is_remote else stream.read(size + 1)
            except (OSError, MemoryError) as error:
                raise_resource_error(error, self.path)
                raise
        if len(data) > size:
            detail = f"{self.path} grew past its {size} bytes while it was read; pack when its writer has finished"
            raise RecordError(Reason.MISSING_IMAGE, detail)
        return data

    @property
    def file(self) -> str | None:
        """Path of the file, with `root` and with symbolic links; None outside `root`, and for bytes in memory."""
        if self.path is None or self.root is None or "\0" in self.path:
            return self.path
        found, is_inside = _root_of(self.root).find(self.path)
        return found if is_inside else None

    @property
    def is_remote(self) -> bool:
        """Whether it is in an object store."""
        return is_remote(self.path or "") or (self.root is not None and is_remote(_root_of(self.root).folder))

    @property
    def url(self) -> str | None:
        """URL of an object that is this file, and not a tar with it; None for others."""
        return self.file if self.offset is None and self.is_remote else None

    def _without_links(self) -> str | None:
        root = None if self.root is None else _root_of(self.root)
        return None if root is None or root.links else root.folder

    @property
    def label(self) -> str:
        """Short name for messages."""
        return self.path or self.name or f"<{len(self.data or b'')} bytes>"


def urls_of(files: Iterable[MediaReference]) -> list[str]:
    """Return the URLs of files that are objects, to request them together."""
    return [url for file in files if (url := file.url)]


def read_image_settings(record: Mapping[str, Any], label: str = "an image") -> dict[str, int]:
    """Read the settings of an image in a content part or object.

    Args:
        record: the content part or object.
        label: the owner of the settings, for errors.

    Raises:
        RecordError: `unsupported_field` if a value is not a whole number above 0, or if two settings exclude each
            other.
    """
    given = {name: record[name] for name in IMAGE_SETTINGS if record.get(name) is not None}
    settings = {name: int(read_setting(value, f"{name} of {label}", is_whole=True)) for name, value in given.items()}
    sides = sum(name in settings for name in IMAGE_SETTINGS[2:])
    if sides == 1 or (sides and len(settings) > sides):  # qwen-vl-utils ignores one side, and the pixels beside both
        raise unsupported_field(
            f"{' and '.join(settings)} of {label}; use resized_height with resized_width, or min_pixels and max_pixels"
        )
    return settings


def _root_of(root: str | ImageRoot) -> ImageRoot:
    return root if isinstance(root, ImageRoot) else ImageRoot(str(root))


class _Window(RangeStream):
    """A byte range of an open file as a file object; closing it closes the file if it is the owner."""

    def __init__(self, stream: BinaryIO, offset: int, size: int, *, is_owner: bool) -> None:
        self._stream, self._offset, self._size, self._is_owner = stream, offset, size, is_owner

    def end(self) -> int:
        return self._size

    def read_range(self, at: int, size: int) -> bytes:
        # The position of the file, which other readers may share, stays as it is.
        return read_range(self._stream, self._offset + at, max(0, min(size, self._size - at)))

    def close(self) -> None:
        if self._is_owner:
            self._stream.close()
        super().close()


def _data_url(value: str, kind: MediaKind) -> bytes:
    head, _, body = value.partition(",")
    # Percent-encoded data URLs are valid, but not supported.
    if not head.endswith(";base64"):
        raise RecordError(kind.missing, f"{shown(value)} is not a base64 data URL")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(kind.corrupt, f"{shown(value)}: {error}") from error


def _file_url(value: str) -> str:
    try:
        return unquote(urlparse(value).path)
    except ValueError as error:
        raise RecordError(Reason.MISSING_IMAGE, f"{shown(value)}: {error}") from error


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
