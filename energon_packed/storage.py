"""Object stores in place of local folders. Input: `s3://BUCKET/KEY`, `gs://BUCKET/KEY` or
`msc://PROFILE/KEY`. Output: `RemotePath`, with the interface of `pathlib.Path`.

    as_path       string or path to Path; RemotePath for these schemes
    RemotePath    names are computed without requests; `stat`, `open`, `iterdir` and `glob` send requests, and so do
                  the writing methods: an object has its old content or all of the new content
    RemoteReader  the stream of `RemotePath.open`: reads byte ranges, and never the whole object
    energon_url   RemotePath to the URL by which Energon opens the same object
    map_paths     a function of paths to its results; of objects, several at a time
    statuses      paths to the status of each; of objects, from a listing of their folder
    read_ranges   byte ranges of objects to their bytes, with few requests
    request_objects  requests objects at the same time, before each is read
    ReadAhead     reads values in threads before they are needed

Requests are sent by multi-storage-client, as in Megatron-Energon: both use the same configuration (`MSC_CONFIG`, or
~/.msc_config.yaml) and the same credentials. Without a configuration, `s3://` uses the credentials, region and
endpoint of boto3 (such as AWS_ACCESS_KEY_ID, AWS_PROFILE and AWS_ENDPOINT_URL). The client retries requests; its
cache of clients is emptied after a fork, so that no connection is shared.

A key is a path: keys with `//`, `/./` or a trailing slash cannot be named.
"""

import contextlib
import errno
import hashlib
import io
import itertools
import logging
import os
import re
import stat
import threading
import time
import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar, cast

from energon_packed.errors import ConfigError, EnergonPackedError, ResourceError
from energon_packed.libraries import MULTI_STORAGE, calls, private
from energon_packed.rust_client import (
    REQUESTS,
    full_key,
    is_loop_started,
    prepare_client,
    rust_key,
    send_in_loop,
    start_loop,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DIGEST = "sha256"  # key of the metadata
READ_AHEAD = 1 << 20
"""Bytes that a sequential reader requests at once."""
_SCHEMES = ("s3:/", "gs:/", "msc:/")  # with one slash, as Path collapses `//`
_MAGIC = re.compile(r"[*?\[]")
_STATUS = re.compile(r"status code: (\d{3})")  # errors of the client in Rust have it in their text only
_FRESH = 60.0  # seconds for which an open stream trusts the status of its object: a request for each read costs more
_MOST_RECENT = 1 << 14
_FEW = 3  # objects of a folder that are not worth a listing, which needs a second request to check one of them
_CHECK = "check the endpoint and the network, then run the same command again: completed work is reused"
_MOST_BETWEEN, _BETWEEN_MEMBERS = 256 << 10, 4 << 10  # bytes between two ranges of a request
_MOST_MERGED = 8 << 20  # bytes of ranges of a request: several requests transfer more at the same time
T = TypeVar("T")
K = TypeVar("K")
_PACKAGES = {
    "boto3": "energon-packed[s3]", "botocore": "energon-packed[s3]", "awscrt": "energon-packed[s3]",
    "multistorageclient": "energon-packed[s3]",
    "google": "multi-storage-client[google-cloud-storage]", "azure": "multi-storage-client[azure-storage-blob]",
}  # fmt: skip
_recent: OrderedDict[str, tuple[float, os.stat_result]] = OrderedDict()  # of `recent_status`, by URL
# The last ranges that this process requested, (offset, bytes) by URL and time: the contents of a key of a tar, such as
# its images, are read after the headers of several keys. If two threads add ranges of an object at the same time, one
# may be lost, which costs a request.
_blocks: OrderedDict[tuple[str, int], tuple[tuple[int, bytes], ...]] = OrderedDict()
_MOST_BLOCKS, _MOST_OBJECTS, _BLOCK_BYTES = 64, 256, 64 << 20  # ranges of an object, objects, and bytes of all
MOST_TOGETHER = _BLOCK_BYTES // READ_AHEAD
"""Objects of a `request_objects` whose bytes are certainly kept."""
# Without a handler, Python prints the errors of the client next to the error message. Handlers of users get them.
logging.getLogger("multistorageclient").addHandler(logging.NullHandler())


class StorageError(OSError, ResourceError):
    """An object store refuses or fails a request, or cannot be reached; the objects may be intact.

    `filename` is the URL, and `strerror` the cause and the remedy. A missing object is a FileNotFoundError.
    """

    def __str__(self) -> str:
        return super().__str__() if self.filename is None else f"{self.filename}: {self.strerror}"


class RemotePath(PosixPath):
    """An object, or a prefix with objects (a folder), as a path. It has no state, and can be pickled.

    Raises:
        FileNotFoundError: no object or folder of this name, from `stat` and `open`.
        StorageError: the request is refused (403) or fails, a package is missing, or the profile is unknown.
    """

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        return text.replace("/", "//", 1) if text.startswith(_SCHEMES) else text

    def __fspath__(self) -> str:
        return str(self)

    def is_absolute(self) -> bool:
        """Return True: a URL does not depend on the working directory."""
        return True

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return the path without `..`; object stores have no links."""
        return type(self)(absolute_name(self))

    def absolute(self) -> "RemotePath":
        """Return the path itself."""
        return self

    def expanduser(self) -> "RemotePath":
        """Return the path itself."""
        return self

    @property
    def parents(self) -> Sequence["RemotePath"]:
        """The folders above, up to the bucket."""
        return [type(self)(*self.parts[:count]) for count in range(len(self.parts) - 1, 1, -1)]

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Request size, kind and time of the object.

        `st_mtime_ns` has the seconds of the object's time, and a hash of its ETag as the nanoseconds: stores record
        seconds, and the stamp of a replaced object must differ.
        """
        status = self._request(strict=True)
        _keep_recent({self: status})
        return status

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is an object or folder of this name."""
        return self._mode(strict=True) != 0

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is an object of this name."""
        return stat.S_ISREG(self._mode(strict=False))

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether objects have this prefix."""
        client, key = self._client()
        try:
            with _converted_errors(self):
                return bool(client.info(f"{key.rstrip('/')}/" if key else "").type == "directory")
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """Open the object for reading; `buffering` is the number of bytes that are requested at once.

        Raises:
            ConfigError: the mode is not `r` or `rb`.
            FileNotFoundError, StorageError, IsADirectoryError: the object cannot be opened.
        """
        if mode not in ("r", "rb"):
            raise ConfigError(f"{self} must be a local path to be written. Use a path of a mounted file system")
        stream = RemoteReader(self, buffering if buffering > 0 else READ_AHEAD)
        return stream if mode == "rb" else io.TextIOWrapper(stream, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        """Request the whole object."""
        return self._read(None)

    def read_range(self, at: int, size: int, answer: bytes | Exception | None = None) -> bytes:
        """Request bytes [at, at + size); fewer at the end of the object. `answer` is that of `send_in_loop`."""
        try:
            return self._read(_range(at, size), answer) if size > 0 else b""
        except StorageError as error:
            if error.errno == errno.ERANGE:
                return b""
            raise

    def _read(self, wanted: Any, answer: bytes | Exception | None = None) -> bytes:
        """Request a range of multi-storage-client, or the whole object."""
        if answer is None and is_loop_started() and (found := rust_key(*self._client())):
            (answer,) = send_in_loop([(*found, wanted)])
        if isinstance(answer, bytes) and answer:
            return answer
        client, key = self._client()
        with _converted_errors(self):
            if isinstance(answer, Exception):
                raise answer
            return bytes(client.read(key, byte_range=wanted))  # also an empty object: it may be a symbolic link

    def iterdir(self) -> Generator["RemotePath", None, None]:
        """List objects and folders."""
        return (path for path, _ in self.entries())

    def glob(self, pattern: str) -> Iterator["RemotePath"]:  # type: ignore[override]
        """List objects and folders that match; `**` is any number of folders, and at the end everything below."""
        return self._matches(PurePosixPath(pattern).parts)

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:  # type: ignore[override]
        """List matches in this folder and all folders below."""
        return self._matches(("**", *PurePosixPath(pattern).parts))

    def objects(self) -> Iterator["RemotePath"]:
        """List all objects below."""
        return (path for path, _ in self.entries(below=True))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: object stores have no folders without objects."""

    def upload(self, local: Path) -> None:
        """Store the content of a local file as this object, with its SHA-256 as metadata.

        The object has its old content until the last byte is stored: one request stores a small file, and several
        requests (a multipart upload) a large one.
        """
        with local.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        client, key = self._client()
        with _converted_errors(self, verb="written"):
            client.upload_file(key, str(local), attributes={_DIGEST: digest})

    def write_bytes(self, data: "Buffer") -> int:
        """Store bytes as this object, with their SHA-256 as metadata; return their number."""
        client, key = self._client()
        content = bytes(data)
        with _converted_errors(self, verb="written"):
            client.write(key, content, attributes={_DIGEST: hashlib.sha256(content).hexdigest()})
        return len(content)

    def create(self, content: bytes) -> bool:
        """Store the object if there is none of this name; return whether this call stored it.

        S3 decides it (`If-None-Match: *`). For stores without such requests, the object is read before and after
        writing: of several writers at the same time, the last writer stores it.
        """
        client, key = self._client()
        provider = private(client, "_storage_provider", MULTI_STORAGE)  # only providers have conditional requests
        with _converted_errors(self, verb="written"):
            from multistorageclient.types import PreconditionFailedError

            try:
                if provider is None:
                    raise NotImplementedError
                provider.put_object(key, content, if_none_match="*")
                return True
            except PreconditionFailedError:
                return False
            except NotImplementedError:
                if not client.is_file(key):
                    client.write(key, content)
                return bool(client.read(key) == content)

    def stored(self) -> tuple[int, str | None]:
        """Request the size of the object in bytes, and the SHA-256 that `upload` stored with it."""
        client, key = self._client()
        with _converted_errors(self):
            info = client.info(key, strict=False)
            return info.content_length, (info.metadata or {}).get(_DIGEST)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; unlike files, a missing object is not an error."""
        client, key = self._client()
        with _converted_errors(self, verb="written"), contextlib.suppress(FileNotFoundError):
            client.delete(key)

    def rename(self, target: Path) -> Path:  # type: ignore[override]
        """Copy the object, which must fit in memory, and delete it here."""
        target.write_bytes(self.read_bytes())
        self.unlink()
        return target

    def abort_uploads(self) -> None:
        """Abort multipart uploads below this prefix that killed processes left: they cost money, and are not listed.

        Other stores than S3 delete them by themselves.
        """
        client, key = self._client()
        provider: Any = private(client, "_storage_provider", MULTI_STORAGE)
        if "S3StorageProvider" not in [kind.__name__ for kind in type(provider).__mro__]:
            return
        s3 = private(provider, "_s3_client", MULTI_STORAGE)
        bucket, _, prefix = full_key(provider, f"{key.rstrip('/')}/").partition("/")
        with _converted_errors(self, verb="written"):
            for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _client(self) -> tuple[Any, str]:
        return _client_of(str(self))

    def _request(self, *, strict: bool) -> os.stat_result:
        """Request the status; without `strict`, folders are not found, which saves a request for missing objects."""
        client, key = self._client()
        with _converted_errors(self):
            return _status(client.info(key, strict=strict))

    def _mode(self, *, strict: bool) -> int:
        try:
            return self._request(strict=strict).st_mode
        except FileNotFoundError:
            return 0

    def entries(self, *, below: bool = False) -> Iterator[tuple["RemotePath", Any]]:
        """Yield (path, metadata of the client) of the entries; with `below`, of all objects below."""
        client, key = self._client()
        prefix = f"{key.rstrip('/')}/" if key else ""
        with _converted_errors(self):
            for info in client.list(prefix, include_directories=not below):
                # The marker of the folder itself is a key that ends in a slash.
                if name := info.key.removeprefix(prefix) if info.key.startswith(prefix) else "":
                    yield self / name, info

    def _matches(self, parts: tuple[str, ...]) -> Iterator["RemotePath"]:
        """Yield the paths that match the components of a pattern, in the order of the store."""
        literal = 0
        while literal < len(parts) and not _MAGIC.search(parts[literal]):
            literal += 1
        folder, parts = self.joinpath(*parts[:literal]), parts[literal:]
        if not parts:
            if folder.exists():
                yield folder
        elif "**" in parts:
            seen: set[tuple[str, ...]] = set()
            for path in folder.objects():
                names = path.parts[len(folder.parts) :]
                # Folders match, too; they are not in the list of the objects below.
                for inner in (names[:count] for count in range(1, len(names) + 1)):
                    if inner not in seen and _fits(inner, parts):
                        seen.add(inner)
                        yield folder.joinpath(*inner)
        else:
            for path, info in folder.entries():
                if fnmatchcase(path.name, parts[0]):
                    if len(parts) == 1:
                        yield path
                    elif info.type == "directory":
                        yield from path._matches(parts[1:])


class RemoteReader(io.BufferedReader):
    """A seekable binary stream over byte ranges of an object.

    Sequential reads request blocks; `read_range` requests exactly the bytes that it returns.
    """

    def __init__(self, path: RemotePath, buffer_size: int = READ_AHEAD, *, is_recent: bool = False) -> None:
        """Open an object.

        Args:
            path: the object.
            buffer_size: bytes that are requested at once.
            is_recent: accept a status of the last minute, if bytes of this version are kept.
        """
        since, status = _recent.get(str(path), (0.0, None))
        is_kept = status is not None and (str(path), status.st_mtime_ns) in _blocks
        is_fresh = is_recent and is_kept and time.monotonic() - since < _FRESH
        self._object = _Object(path, status if is_fresh else None)
        super().__init__(self._object, buffer_size)

    def status(self) -> os.stat_result:
        """Return the status of the object, at most a minute old."""
        return self._object.status()

    def read_range(self, at: int, size: int) -> bytes:
        """Return bytes [at, at + size); fewer at the end of the object."""
        return self._object.read_range(at, size)

    def request(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request ranges (at, size) of at most 1 MiB at the same time; reading them soon needs no further requests."""
        small = [(at, size) for at, size in dict.fromkeys(ranges) if size <= READ_AHEAD]
        paths = [self._object.path] * len(small)
        _start_rust(paths)
        map_paths(lambda path, own: self._object.read_range(*own), paths, small)


class RangeStream(io.RawIOBase):
    """A seekable raw stream over a source of byte ranges.

    A subclass has `read_range(at, size)`, which returns bytes from `at`, fewer at the end, and `end()`, the size.
    """

    _at = 0

    @abstractmethod
    def read_range(self, at: int, size: int) -> bytes:
        """Return bytes [at, at + size); fewer at the end, and none after it."""

    @abstractmethod
    def end(self) -> int:
        """Return the size in bytes."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position.

        Raises:
            ValueError: it would be negative.
        """
        base = self.end() if whence == os.SEEK_END else {os.SEEK_SET: 0, os.SEEK_CUR: self._at}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: "Buffer") -> int:
        """Read into a buffer, and return the number of bytes."""
        view = memoryview(buffer)
        data = self.read_range(self._at, len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Return all bytes from the position on."""
        data = self.read_range(self._at, self.end() - self._at)
        self._at += len(data)
        return data


class _Object(RangeStream):
    """Byte ranges of an object as a raw stream."""

    def __init__(self, path: RemotePath, status: os.stat_result | None = None) -> None:
        self.path = path
        status = status or path.stat()
        self._since, self._status = _recent.get(str(path), (time.monotonic(), status))
        if stat.S_ISDIR(self._status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))

    def status(self) -> os.stat_result:
        since, status = _recent.get(str(self.path), (self._since, self._status))
        if since > self._since:  # another reader has requested it in the meantime
            self._since, self._status = since, status
        if time.monotonic() - self._since > _FRESH:
            self._status, self._since = self.path.stat(), time.monotonic()
        return self._status

    def end(self) -> int:
        return self.status().st_size

    def read_range(self, at: int, size: int, *, most_kept: int | None = None) -> bytes:
        size = min(size, self.end() - at)  # stores refuse ranges after the end
        if size <= 0 or len(data := self._known(at, size)) == size:
            return b"" if size <= 0 else data
        version = self._version()  # before the request: an object that is replaced in the meantime has a newer version
        data = self.path.read_range(at, size)
        if len(data) <= (READ_AHEAD if most_kept is None else most_kept):
            blocks = ((at, data), *_blocks.pop(version, ()))[:_MOST_BLOCKS]
            ends = itertools.accumulate(len(block) for _, block in blocks)
            _blocks[version] = tuple(block for block, end in zip(blocks, ends, strict=True) if end <= _BLOCK_BYTES)
            while len(_blocks) > _MOST_OBJECTS or _kept_bytes() > _BLOCK_BYTES:
                with contextlib.suppress(KeyError):  # another thread has removed the last one
                    _blocks.popitem(last=False)
        return data

    def readinto(self, buffer: "Buffer") -> int:
        view = memoryview(buffer)
        if known := self._known(self._at, len(view)):  # less than the buffer, without a request
            view[: len(known)] = known
            self._at += len(known)
            return len(known)
        return super().readinto(view)

    def _known(self, at: int, size: int) -> bytes:
        """Return up to `size` bytes from `at` of a range that was requested before; b"" if there is none."""
        for start, data in _blocks.get(self._version(), ()):
            if start <= at < start + len(data):
                return data[at - start : at - start + size]
        return b""

    def _version(self) -> tuple[str, int]:
        return str(self.path), self.status().st_mtime_ns


def _kept_bytes() -> int:
    return sum(len(block) for blocks in list(_blocks.values()) for _, block in blocks)


def as_path(value: str | Path) -> Path:
    """Return the path that a string names: a RemotePath for `s3://`, `gs://` and `msc://`, or else a Path."""
    if isinstance(value, RemotePath):
        return value
    return RemotePath(value) if str(value).startswith(_SCHEMES) else Path(value)


def absolute_name(path: str | Path) -> str:
    """Return the absolute path or URL without `..`, as `os.path.abspath`: links are not followed."""
    if not is_remote(path):
        return os.path.abspath(path)
    scheme, *names = str(path).split("/")
    found: list[str] = []
    for name in names:
        if name == "..":
            found = found[:1] + found[1:-1]  # the bucket stays
        elif name not in ("", "."):
            found.append(name)
    return f"{scheme}//{'/'.join(found)}"


def is_remote(path: str | Path) -> bool:
    """Return whether a path is in an object store."""
    return isinstance(path, RemotePath) or str(path).startswith(_SCHEMES)


def recent_status(path: Path) -> os.stat_result:
    """Return the status of a file; of an object, the result of a `stat` that is at most a minute old.

    For checks before every read, which would otherwise send a request for each record.
    """
    since, status = _recent.get(str(path), (0.0, None))
    return status if status is not None and time.monotonic() - since < _FRESH else path.stat()


def request_objects(urls: Iterable[str], *, whole: bool = False) -> None:
    """Request the first MiB of objects at the same time, so that reading them at once needs no further requests.

    Args:
        urls: the objects. Those that cannot be read are left out: their readers have the error.
        whole: request objects of up to 32 MiB completely, and leave out larger ones.
    """

    def read(path: RemotePath) -> None:
        with contextlib.suppress(OSError):
            found = _Object(path, recent_status(path))
            if not whole:
                found.read_range(0, READ_AHEAD)
            elif found.end() <= _BLOCK_BYTES // 2:
                found.read_range(0, found.end(), most_kept=found.end())

    paths = [*map(RemotePath, dict.fromkeys(urls))]
    _start_rust(paths)
    map_paths(read, paths)


def statuses(paths: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Return kind, size and time of each file; missing files, and local files without a status, are left out.

    Objects of a folder are listed, 1,000 with each request. If the listings of a store have other times or ETags than
    its objects, as in GCS, each object is requested, by threads.

    Raises:
        StorageError: the store fails.
    """
    found: dict[Path, os.stat_result] = {}
    by_folder: dict[RemotePath, set[RemotePath]] = {}
    for path in paths:
        if isinstance(path, RemotePath):
            by_folder.setdefault(path.parent, set()).add(path)
            continue
        with contextlib.suppress(OSError):
            now = path.stat()
            # Datasets keep it for each file: the other values need 400 bytes.
            fields = (now.st_mode, 0, 0, 1, 0, 0, now.st_size, 0, 0, 0)
            found[path] = os.stat_result(fields, {"st_mtime_ns": now.st_mtime_ns})
    for listed in map_paths(_listed, [*by_folder], by_folder.values(), purpose="folders"):
        found |= listed
    others = [path for objects in by_folder.values() for path in objects if path not in found]
    return found | {
        path: status
        for path, status in zip(others, map_paths(_status_or_none, others), strict=True)
        if status is not None
    }


def _listed(folder: RemotePath, objects: set[RemotePath]) -> dict[Path, os.stat_result]:
    """Return the status of objects by the listing of their folder; {} if it cannot be used."""
    if len(objects) < _FEW:
        return {}
    most = 1000 + 4 * len(objects)  # a folder may have millions of other objects
    first = min(objects)
    asked = _pool("requests").submit(_status_or_none, first)  # in the meantime: listing needs two requests
    try:
        entries = itertools.islice(folder.entries(), most)
        found: dict[Path, os.stat_result] = {
            path: _status(info) for path, info in entries if path in objects and info.type != "directory"
        }
        status = asked.result()
        if status is None or first not in found or stamp_of(status) != stamp_of(found[first]):
            return {}
    except OSError:  # for example, listings are not permitted
        return {}
    _keep_recent(found)
    return found


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return bytes and time of the last change (ns) of a file, which differ if it was replaced or changed."""
    return status.st_size, status.st_mtime_ns


def _status_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _keep_recent(found: Mapping[Path, os.stat_result]) -> None:
    """Keep statuses for `recent_status`."""
    now = time.monotonic()
    for path, status in found.items():
        _recent[str(path)] = now, status
    while len(_recent) > _MOST_RECENT:
        _recent.popitem(last=False)


def energon_url(path: Path) -> str:
    """Return the path in the form that Energon's EPath accepts: `msc://PROFILE/KEY` of a RemotePath.

    Raises:
        StorageError: the profile is unknown, or a package is missing.
    """
    if not isinstance(path, RemotePath):
        return str(path)
    client, key = path._client()
    return f"msc://{client.profile}/{key}"


def map_paths(
    function: Callable[..., T], paths: Sequence[str | Path], *more: Iterable[Any], purpose: str = "requests"
) -> list[T]:
    """Return the results of `map`, in order. Objects are requested by threads: a request needs milliseconds.

    Args:
        function: of a path and of an item of each of `more`. The error of the first path that fails is raised.
        paths: of files or folders.
        more: further arguments of the function, as of `map`.
        purpose: another name if the function waits for requests itself: threads that wait for their own pool hang.
    """
    if len(paths) < 2 or not any(map(is_remote, paths)):
        return list(map(function, paths, *more))
    return list(_pool(purpose).map(function, paths, *more))


def read_ranges(ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Read bytes [at, at + size) of objects (URL, at, size); fewer at the end of an object.

    Ranges of an object are read together, up to 8 MiB, if the bytes between them are at most 256 KiB and 5% of their
    bytes (or 4 KiB, the headers between two members of a tar). Requests are sent at the same time.

    Raises:
        FileNotFoundError, StorageError: an object does not exist, or cannot be read.
    """
    blocks: list[tuple[str, int, int, list[int]]] = []  # URL, start, stop, indices of its ranges
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        url, start, size = ranges[index]
        stop = start + size
        if blocks and blocks[-1][0] == url:
            _, first, last, members = blocks[-1]
            is_near = start - last <= min(_MOST_BETWEEN, max(_BETWEEN_MEMBERS, (last - first) // 20))
            if is_near and max(last, stop) - first <= max(_MOST_MERGED, last - first):
                blocks[-1] = (url, first, max(last, stop), [*members, index])
                continue
        blocks.append((url, start, stop, [index]))

    results = [b""] * len(ranges)
    contents = _contents([(url, start, stop - start) for url, start, stop, _ in blocks])
    for (_, first, _, members), content in zip(blocks, contents, strict=True):
        for index in members:
            _, start, size = ranges[index]
            results[index] = content[start - first : start - first + size]
    return results


def _contents(blocks: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Read blocks (URL, at, size) at the same time: in the event loop, or in threads if their client has none."""
    folders: dict[str, tuple[Any, str] | None] = {}  # the client of an object would need a third of its request
    requests = {}
    for index, (url, at, size) in enumerate(blocks):
        folder, _, name = url.rpartition("/")
        if folder not in folders:
            folders[folder] = None
            with contextlib.suppress(StorageError):  # `read_range` raises it, with the name of the object
                folders[folder] = rust_key(*_client_of(f"{folder}/"))
        if size > 0 and (found := folders[folder]):
            client, prefix = found
            requests[index] = client, prefix + name, _range(at, size)
    answers = dict(zip(requests, send_in_loop(requests.values()), strict=True))
    contents = {index: answer for index, answer in answers.items() if isinstance(answer, bytes) and answer}
    others = [index for index in range(len(blocks)) if index not in contents]

    def read(url: str, index: int) -> bytes:
        return RemotePath(url).read_range(*blocks[index][1:], answers.get(index))

    contents.update(zip(others, map_paths(read, [blocks[index][0] for index in others], others), strict=True))
    return [contents[index] for index in range(len(blocks))]


def _range(at: int, size: int) -> Any:
    from multistorageclient.types import Range

    return Range(at, size)


def _client_of(url: str) -> tuple[Any, str]:
    """Return the client of an object or folder, one for each process and profile, and its key."""
    with _converted_errors(url, "cannot be used with this configuration of multi-storage-client"):
        from multistorageclient import resolve_storage_client

        client, key = resolve_storage_client(url)
    prepare_client(client)
    return client, key


def _start_rust(paths: Sequence[RemotePath]) -> None:
    """Let threads that request several objects, or ranges of an object, use the client in Rust of their profile."""
    with contextlib.suppress(StorageError):  # each request raises it
        if len(paths) > 1 and rust_key(*_client_of(str(paths[0]))):
            start_loop()


_pools: dict[tuple[int, str], ThreadPoolExecutor] = {}


def _pool(purpose: str) -> ThreadPoolExecutor:
    """Return the threads of this process for a purpose: a fork has no threads, and tasks wait for other purposes."""
    key = os.getpid(), purpose
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(REQUESTS, f"energon-packed-{purpose}")
    return _pools[key]


_locks: dict[tuple[int, Path], threading.Lock] = {}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file that several threads of this process need: the first reads it, and the others wait.

    A thread must look for the result of the others first, as the lock exists while the first thread has it. A fork has
    other locks: a thread of its parent that has locked the file is not in it.
    """
    key = os.getpid(), path
    try:
        with _locks.setdefault(key, threading.Lock()):
            yield
    finally:
        _locks.pop(key, None)


class ReadAhead(Generic[K, T]):
    """Reads values in threads before they are needed, for readers that know their next keys.

    Keys are read in groups, whose objects are requested together: waking a thread for each key, and for each of its
    requests, needs as much CPU time as reading it. A value is kept until `get` returns it, or until `limit` newer
    values are requested. Copies of this object, in other processes too, start empty.

    Args:
        read: returns the values of a group of keys, in order; several threads call it.
        limit: values that are kept, or are being read.
        group: most keys of a group.
    """

    def __init__(self, read: Callable[[list[K]], list[T]], limit: int = 32, group: int = 8) -> None:
        self._read, self._limit, self._group = read, limit, group
        self._futures: OrderedDict[K, tuple[Future[list[T | None]], int]] = OrderedDict()  # and the index in the group
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"read": self._read, "limit": self._limit, "group": self._group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def request(self, keys: Iterable[K]) -> None:
        """Start to read values, unless they are being read already, and the next requests may complete a group."""
        if self._process != os.getpid():  # a fork has no threads
            self._process, self._futures = os.getpid(), OrderedDict()
        keys = list(keys)
        new = [key for key in dict.fromkeys(keys) if key not in self._futures]
        if len(new) < self._group and new[:1] != keys[:1]:  # the first of these keys are needed first
            return
        for start in range(0, len(new), self._group):
            members = new[start : start + self._group]
            future: Future[Any] = _pool("read-ahead").submit(self._read, members)
            self._futures |= {key: (future, index) for index, key in enumerate(members)}
        while len(self._futures) > max(self._limit, len(keys)):
            self._futures.popitem(last=False)

    def get(self, key: K) -> T:
        """Return a value, which is read now if it was not requested. Raises the errors of `read`."""
        future, index = self._futures.pop(key, (None, 0)) if self._process == os.getpid() else (None, 0)
        if future is not None:
            with contextlib.suppress(Exception):  # of any key of the group: reading this key alone raises its own
                values = future.result()
                value, values[index] = values[index], None
                return cast(T, value)
        return self._read([key])[0]


def _fits(names: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Return whether the components of a path match the components of a pattern."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_fits(names[count:], parts[1:]) for count in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _status(info: Any) -> os.stat_result:
    """Convert the metadata of the client."""
    if info.type == "directory":
        return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    seconds = int(info.last_modified.timestamp())
    stamp = seconds * 10**9 + zlib.crc32((info.etag or "").encode()) % 10**9
    times = (seconds, seconds, seconds)
    return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, info.content_length, *times), {"st_mtime_ns": stamp})


@contextmanager
def _converted_errors(path: str | RemotePath, failure: str = "", *, verb: str = "read") -> Iterator[None]:
    """Convert the exceptions of the client and its libraries.

    Their messages are not quoted, as they may contain parts of the configuration.

    Args:
        path: for the message.
        failure: message for other exceptions.
        verb: what cannot be done, for the message.

    Raises:
        FileNotFoundError, StorageError: instead of any exception.
    """
    try:
        with contextlib.nullcontext() if failure else calls(MULTI_STORAGE):  # or options of the user
            yield
    except EnergonPackedError:
        raise
    except Exception as error:
        raise _converted(error, str(path), failure, verb) from error


def _converted(error: Exception, url: str, failure: str, verb: str) -> OSError:
    causes: list[Any] = [cause for cause in (error, error.__cause__, error.__context__) if cause is not None]
    response: Any = next(
        (cause.response for cause in causes if isinstance(getattr(cause, "response", None), dict)), {}
    )
    code = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or getattr(causes[-1], "code", None)
    if code is None and (stated := _STATUS.search(str(error))):
        code = int(stated[1])
    name = response.get("Error", {}).get("Code") or type(causes[-1]).__name__
    detail = f"{code} {name}" if code and str(code) != str(name) else str(name)
    if name == "NoSuchBucket":
        return StorageError(errno.EIO, "the bucket does not exist; check its name and the endpoint", url)
    if isinstance(error, FileNotFoundError) or code == 404:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if code == 416:  # a range after the end
        return StorageError(errno.ERANGE, "the object ends before this range", url)
    if isinstance(error, ImportError):
        package = str(error.name or "").partition(".")[0]
        remedy = f"install it: pip install '{_PACKAGES.get(package, package)}'"
        return StorageError(errno.EIO, f"the package {package} is not installed; {remedy}", url)
    if isinstance(error, PermissionError) or code in (401, 403) or "Credential" in str(name):
        remedy = "check the credentials, and the permissions of the bucket"
        return StorageError(errno.EACCES, f"access is denied ({detail}); {remedy}", url)
    if failure and not code:
        profile = url.split("/")[2] if url.startswith("msc://") and url.count("/") > 1 else ""
        if profile and isinstance(error, ValueError) and "not found in configuration" in str(error):
            failure = f"the profile {profile!r} is not configured"
        remedy = "check the file of MSC_CONFIG, or ~/.msc_config.yaml"
        return StorageError(errno.EIO, f"{failure} ({type(error).__name__}); {remedy}", url)
    return StorageError(errno.EIO, f"the object store cannot be {verb} ({detail}); {_CHECK}", url)
