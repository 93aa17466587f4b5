"""RemotePath: an object, or a prefix with objects, with the interface of `pathlib.Path`."""

import contextlib
import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Generator, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from energon_packed.errors import ConfigError
from energon_packed.libraries import MULTI_STORAGE, private
from energon_packed.storage.clients import StorageError, client_of, converted_errors, range_of
from energon_packed.storage.reader import READ_AHEAD, RemoteReader
from energon_packed.storage.rust_client import full_key, is_loop_started, rust_key, send_in_loop
from energon_packed.storage.status import keep_recent, status_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DIGEST = "sha256"  # key of the metadata
_SCHEMES = ("s3:/", "gs:/", "msc:/")  # with one slash, as Path collapses `//`
_MAGIC = re.compile(r"[*?\[]")


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
        keep_recent({self: status})
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
            with converted_errors(self):
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
        """Request bytes [at, at + size); fewer at the end of the object. `answer` is a result of `send_in_loop`."""
        try:
            return self._read(range_of(at, size), answer) if size > 0 else b""
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
        with converted_errors(self):
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
        with converted_errors(self, verb="written"):
            client.upload_file(key, str(local), attributes={_DIGEST: digest})

    def write_bytes(self, data: "Buffer") -> int:
        """Store bytes as this object, with their SHA-256 as metadata; return their number."""
        client, key = self._client()
        content = bytes(data)
        with converted_errors(self, verb="written"):
            client.write(key, content, attributes={_DIGEST: hashlib.sha256(content).hexdigest()})
        return len(content)

    def create(self, content: bytes) -> bool:
        """Store the object if there is none of this name; return whether this call stored it.

        S3 decides it (`If-None-Match: *`). For stores without such requests, the object is read before and after
        writing: of several writers at the same time, the last writer stores it.
        """
        client, key = self._client()
        provider = private(client, "_storage_provider", MULTI_STORAGE)  # only providers have conditional requests
        with converted_errors(self, verb="written"):
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
        with converted_errors(self):
            info = client.info(key, strict=False)
            return info.content_length, (info.metadata or {}).get(_DIGEST)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; unlike files, a missing object is not an error."""
        client, key = self._client()
        with converted_errors(self, verb="written"), contextlib.suppress(FileNotFoundError):
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
        with converted_errors(self, verb="written"):
            for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _client(self) -> tuple[Any, str]:
        return client_of(str(self))

    def _request(self, *, strict: bool) -> os.stat_result:
        """Request the status; without `strict`, folders are not found, which saves a request for missing objects."""
        client, key = self._client()
        with converted_errors(self):
            return status_of(client.info(key, strict=strict))

    def _mode(self, *, strict: bool) -> int:
        try:
            return self._request(strict=strict).st_mode
        except FileNotFoundError:
            return 0

    def entries(self, *, below: bool = False) -> Iterator[tuple["RemotePath", Any]]:
        """Yield (path, metadata of the client) of the entries; with `below`, of all objects below."""
        client, key = self._client()
        prefix = f"{key.rstrip('/')}/" if key else ""
        with converted_errors(self):
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


def energon_url(path: Path) -> str:
    """Return the path in the form that Energon's EPath accepts: `msc://PROFILE/KEY` of a RemotePath.

    Raises:
        StorageError: the profile is unknown, or a package is missing.
    """
    if not isinstance(path, RemotePath):
        return str(path)
    client, key = path._client()
    return f"msc://{client.profile}/{key}"


def _fits(names: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Return whether the components of a path match the components of a pattern."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_fits(names[count:], parts[1:]) for count in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])
