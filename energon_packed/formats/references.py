"""Media by reference: the part `media.json` of a pack in, the media that it locates out.

{key}.media.json   {PART: LOCATOR or null}: the media parts of the pack, in order; null if the tar has the part

A LOCATOR has

    file, offset, size   `size` bytes of `file` from byte `offset`. A relative path starts from the dataset folder
    digest               the first 128 bits of the SHA-256 of these bytes, in hex, or
    changed              [bytes, time of the last change in ns] of `file`, of packs that were written without digests
    source, member       the auxiliary dataset of media.yaml with the bytes, and the name of the entry in it

Every read compares size and digest (or `changed`), so a file that changed raises DataChangedError. No codec knows
references: they are resolved before `Codec.read` gets the parts.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from energon_packed.errors import DataChangedError, FormatError
from energon_packed.files import IrregularFile, Streams, read_range, status
from energon_packed.storage import RemotePath, absolute_name, as_path, is_remote, read_ranges
from energon_packed.system import ABSENT, raise_resource_error

MEDIA_PART = "media.json"
FOLDER, MEDIA_ROOT = "__folder__", "__media_root__"
"""Keys of raw parts: the dataset folder, and the moved folders as (old, new) pairs. Energon's raw parts have neither:
the folder is in their `__sources__`, and the moved folders are those of `set_media_root`."""
MediaRoot = Sequence[tuple[str, str]]
_moved: dict[str, str] = {}


class Locator(NamedTuple):
    """Location of a referenced file; see the module."""

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


def media_digest(data: bytes) -> str:
    """Return the first 128 bits of the SHA-256 of a file, as 32 hex digits."""
    return hashlib.sha256(data).hexdigest()[:32]


def set_media_root(moved: Mapping[str, str]) -> None:
    """Declare folders that moved, for datasets that Energon's own loaders read in this process and its forks.

    Args:
        moved: new folder by old folder. It is added to the folders of earlier calls.
    """
    _moved.update(moved)


def complete_parts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a pack with the referenced media in place of `media.json`, in the order of a copied pack.

    Args:
        raw: `__key__`, bytes by part name, and `FOLDER` or Energon's `__sources__`.

    Raises:
        DataChangedError: a referenced file changed, or is missing.
        ResourceError: a referenced file cannot be read.
        FormatError: `media.json` is damaged.
    """
    if MEDIA_PART not in raw:
        return dict(raw)
    located = _locators(raw)
    parts = {name: content for name, content in raw.items() if name not in located and name != MEDIA_PART}
    reader = _reader_of(raw)
    requested = reader.requested([locator for locator in located.values() if locator is not None])
    for name, locator in located.items():
        if locator is not None:
            parts[name] = reader.read(locator, raw, name, requested)
        elif name in raw:
            parts[name] = raw[name]
    return parts


def _locators(raw: Mapping[str, Any]) -> dict[str, Locator | None]:
    try:
        content = raw[MEDIA_PART]
        value = orjson.loads(content) if isinstance(content, bytes | bytearray | memoryview | str) else content
        return {str(name): None if item is None else _locator(item) for name, item in value.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"{raw.get('__key__')}.{MEDIA_PART} is damaged ({error}); pack the data again") from error


def _locator(value: Mapping[str, Any]) -> Locator:
    locator = Locator(**value)
    has_numbers = isinstance(locator.offset, int) and isinstance(locator.size, int)
    if not has_numbers or min(locator.offset, locator.size) < 0 or not isinstance(locator.file, str):
        raise ValueError(f"{dict(value)} is not a locator")
    if (locator.digest is None) == (locator.changed is None):
        raise ValueError(f"{dict(value)} has no digest")
    return locator


def _reader_of(raw: Mapping[str, Any]) -> "_MediaReader":
    folder, moved = raw.get(FOLDER), raw.get(MEDIA_ROOT) or tuple(_moved.items())
    if folder is None:
        sources = raw.get("__sources__") or ()
        folder = sources[0].dataset_path if sources else ""
    return _cached_reader(str(folder), tuple(moved))


@lru_cache(maxsize=256)
def _cached_reader(folder: str, moved: tuple[tuple[str, str], ...]) -> "_MediaReader":
    return _MediaReader(as_path(folder), moved)


class _MediaReader:
    """Reads the referenced media of a dataset.

    Args:
        folder: the dataset folder.
        moved: (old, new) folders.
    """

    def __init__(self, folder: Path, moved: MediaRoot) -> None:
        self._folder = folder
        self._moved = moved
        self._streams = Streams()

    def requested(self, locators: Sequence[Locator]) -> Callable[[Locator], bytes | None]:
        """Return a function that returns the bytes of the locators with a digest in object stores, else None.

        They are requested together.
        """
        paths = [(locator, self._path(locator.file)) for locator in locators if locator.digest is not None]
        remote = [(locator, path) for locator, path in paths if isinstance(path, RemotePath)]
        try:
            contents = read_ranges([(path, locator.offset, locator.size) for locator, path in remote])
        except OSError:  # it has no part, which `read` names in its errors
            return lambda locator: None
        known = {locator: data for (locator, _), data in zip(remote, contents, strict=True)}
        return known.get

    def read(
        self, locator: Locator, raw: Mapping[str, Any], part: str, requested: Callable[[Locator], bytes | None]
    ) -> bytes:
        """Read and check the bytes of a locator. Raises as `complete_parts`."""
        path, now = self._path(locator.file), None
        try:
            if (data := requested(locator)) is None:
                stream = self._streams.get(path)
                data = read_range(stream, locator.offset, locator.size)
                now = status(stream) if locator.changed is not None else None
        except IrregularFile as error:
            raise _changed(raw, part, path, str(error)) from error
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno in ABSENT:
                raise _changed(raw, part, path, os.strerror(error.errno or errno.ENOENT).lower()) from error
            raise_resource_error(error, path)
            raise FormatError(f"{path} cannot be read: {error}; check the file system") from error
        if len(data) < locator.size:
            end = locator.offset + locator.size
            raise _changed(raw, part, path, f"it ends before byte {end}")
        if locator.digest is not None and media_digest(data) != locator.digest:
            raise _changed(raw, part, path, "it has other bytes")
        if now is not None and [now.st_size, now.st_mtime_ns] != list(locator.changed or ()):
            raise _changed(raw, part, path, "by its size or time of change")
        return data

    def _path(self, file: str) -> Path:
        path = absolute_name(file if is_remote(file) else self._folder / file)
        for old, new in self._moved:
            if path == old or path.startswith(old.rstrip("/") + "/"):
                return as_path(new + path[len(old.rstrip("/")) :])
        return as_path(path)


def _changed(raw: Mapping[str, Any], part: str, path: Path, change: str) -> DataChangedError:
    sample = part.removeprefix("img").partition("_")[0]
    return DataChangedError(
        f"{raw.get('__key__')}: {part}, an image of sample {sample}, is not the packed image: {path} changed since "
        f"({change}). Restore the file, set `media_root` if it was moved, or pack again."
    )
