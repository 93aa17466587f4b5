"""Requests of several files at the same time: statuses, byte ranges and whole objects."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from energon_packed.storage.clients import StorageError, client_of, range_of, start_rust
from energon_packed.storage.path import RemotePath, is_remote
from energon_packed.storage.reader import MOST_KEPT, READ_AHEAD, ObjectStream
from energon_packed.storage.rust_client import rust_key, send_in_loop
from energon_packed.storage.status import keep_recent, recent_status, stamp_of, status_of
from energon_packed.storage.threads import map_in_threads, pool

T = TypeVar("T")
MOST_TOGETHER = MOST_KEPT // READ_AHEAD
"""Objects of a `request_objects` whose bytes are certainly kept."""
_FEW = 3  # objects of a folder that are not worth a listing, which needs a second request to check one of them
_MOST_BETWEEN, _BETWEEN_MEMBERS = 256 << 10, 4 << 10  # bytes between two ranges of a request
_MOST_MERGED = 8 << 20  # bytes of ranges of a request: several requests transfer more at the same time


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
    if not any(map(is_remote, paths)):
        return list(map(function, paths, *more))
    return map_in_threads(function, paths, *more, purpose=purpose)


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
                folders[folder] = rust_key(*client_of(f"{folder}/"))
        if size > 0 and (found := folders[folder]):
            client, prefix = found
            requests[index] = client, prefix + name, range_of(at, size)
    answers = dict(zip(requests, send_in_loop(requests.values()), strict=True))
    contents = {index: answer for index, answer in answers.items() if isinstance(answer, bytes) and answer}
    others = [index for index in range(len(blocks)) if index not in contents]

    def read(url: str, index: int) -> bytes:
        return RemotePath(url).read_range(*blocks[index][1:], answers.get(index))

    contents.update(zip(others, map_paths(read, [blocks[index][0] for index in others], others), strict=True))
    return [contents[index] for index in range(len(blocks))]


def request_objects(urls: Iterable[str], *, whole: bool = False) -> None:
    """Request the first MiB of objects at the same time, so that reading them at once needs no further requests.

    Args:
        urls: the objects. Those that cannot be read are left out: their readers have the error.
        whole: request objects of up to 32 MiB completely, and leave out larger ones.
    """

    def read(path: RemotePath) -> None:
        with contextlib.suppress(OSError):
            found = ObjectStream(path, recent_status(path))
            if not whole:
                found.read_start()
            elif found.end() <= MOST_KEPT // 2:
                found.read_range(0, found.end(), most_kept=found.end())

    urls = [*dict.fromkeys(urls)]
    start_rust(urls)
    map_paths(read, [*map(RemotePath, urls)])


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
    asked = pool("requests").submit(_status_or_none, first)  # in the meantime: listing needs two requests
    try:
        entries = itertools.islice(folder.entries(), most)
        found: dict[Path, os.stat_result] = {
            path: status_of(info) for path, info in entries if path in objects and info.type != "directory"
        }
        status = asked.result()
        if status is None or first not in found or stamp_of(status) != stamp_of(found[first]):
            return {}
    except OSError:  # for example, listings are not permitted
        return {}
    keep_recent(found)
    return found


def _status_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
