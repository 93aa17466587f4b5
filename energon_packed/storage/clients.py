"""Clients of multi-storage-client by URL, and its errors as errors of this package."""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from energon_packed.errors import EnergonPackedError, ResourceError
from energon_packed.libraries import MULTI_STORAGE, calls
from energon_packed.storage.rust_client import prepare_client, rust_key, start_loop

_STATUS = re.compile(r"status code: (\d{3})")  # errors of the client in Rust have it in their text only
_CHECK = "check the endpoint and the network, then run the same command again"
_PACKAGES = {
    "boto3": "energon-packed[s3]", "botocore": "energon-packed[s3]", "awscrt": "energon-packed[s3]",
    "multistorageclient": "energon-packed[s3]",
    "google": "multi-storage-client[google-cloud-storage]", "azure": "multi-storage-client[azure-storage-blob]",
}  # fmt: skip
# Without a handler, Python prints the errors of the client next to the error message. Handlers of users get them.
logging.getLogger("multistorageclient").addHandler(logging.NullHandler())


class StorageError(OSError, ResourceError):
    """An object store refuses or fails a request, or cannot be reached; the objects may be intact.

    `filename` is the URL, and `strerror` the cause and the remedy. A missing object is a FileNotFoundError.
    """

    def __str__(self) -> str:
        return super().__str__() if self.filename is None else f"{self.filename}: {self.strerror}"


def client_of(url: str) -> tuple[Any, str]:
    """Return the client of an object or folder, one for each process and profile, and its key."""
    with converted_errors(url, "cannot be used with this configuration of multi-storage-client"):
        from multistorageclient import resolve_storage_client

        client, key = resolve_storage_client(url)
    prepare_client(client)
    return client, key


def range_of(at: int, size: int) -> Any:
    """Return bytes [at, at + size) as a range of multi-storage-client."""
    from multistorageclient.types import Range

    return Range(at, size)


def start_rust(urls: Sequence[str]) -> None:
    """Let threads that request several objects, or ranges of an object, use the client in Rust of their profile."""
    with contextlib.suppress(StorageError):  # each request raises it
        if len(urls) > 1 and rust_key(*client_of(urls[0])):
            start_loop()


@contextmanager
def converted_errors(path: str | Path, failure: str = "", *, verb: str = "read") -> Iterator[None]:
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
