"""Threads that wait for requests: pools, locks of files, and values that are read before they are needed."""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from energon_packed.storage.rust_client import REQUESTS

K = TypeVar("K")
T = TypeVar("T")
_pools: dict[tuple[int, str], ThreadPoolExecutor] = {}


def pool(purpose: str) -> ThreadPoolExecutor:
    """Return the threads of this process for a purpose: a fork has no threads, and tasks wait for other purposes."""
    key = os.getpid(), purpose
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(REQUESTS, f"energon-packed-{purpose}")
    return _pools[key]


def map_in_threads(
    function: Callable[..., T], items: Sequence[Any], *more: Iterable[Any], purpose: str = "requests"
) -> list[T]:
    """Return the results of `map`, in order, from the threads of a purpose; a single item needs no thread."""
    return list(map(function, items, *more) if len(items) < 2 else pool(purpose).map(function, items, *more))


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
            future: Future[Any] = pool("read-ahead").submit(self._read, members)
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
