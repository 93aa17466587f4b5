"""Statuses of files and objects. The status of an object is kept for a minute, for checks before every read."""

import os
import stat
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FRESH = 60.0  # seconds for which an open stream trusts the status of its object: a request for each read costs more
_MOST_RECENT = 1 << 14
_recent: OrderedDict[str, tuple[float, os.stat_result]] = OrderedDict()  # by URL


def recent_status(path: Path) -> os.stat_result:
    """Return the status of a file; of an object, the result of a `stat` that is at most a minute old.

    For checks before every read, which would otherwise send a request for each record.
    """
    since, status = known_status(str(path))
    return status if status is not None and is_fresh(since) else path.stat()


def known_status(url: str) -> tuple[float, os.stat_result | None]:
    """Return the time of the last request for the status of an object, in seconds of `time.monotonic`, and its result.

    (0.0, None) if it is not kept.
    """
    return _recent.get(url, (0.0, None))


def is_fresh(since: float) -> bool:
    """Return whether a status that was requested at this time is at most a minute old."""
    return time.monotonic() - since < _FRESH


def keep_recent(found: Mapping[Path, os.stat_result]) -> None:
    """Keep statuses for `recent_status`."""
    now = time.monotonic()
    for path, status in found.items():
        _recent[str(path)] = now, status
    while len(_recent) > _MOST_RECENT:
        _recent.popitem(last=False)


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return bytes and time of the last change (ns) of a file, which differ if it was replaced or changed."""
    return status.st_size, status.st_mtime_ns


def status_of(info: Any) -> os.stat_result:
    """Convert the metadata of the client."""
    if info.type == "directory":
        return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    seconds = int(info.last_modified.timestamp())
    stamp = seconds * 10**9 + zlib.crc32((info.etag or "").encode()) % 10**9
    times = (seconds, seconds, seconds)
    return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, info.content_length, *times), {"st_mtime_ns": stamp})
