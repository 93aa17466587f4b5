"""Open tars of a process: a bounded number, whatever the number of shards, folders and readers."""

import itertools
import os
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

from energon_packed.foreign import open_regular
from energon_packed.system import most_open

_MOST_OPEN = 128  # tars; the usual limit of descriptors is 1024
_numbers = itertools.count()
_open: OrderedDict[tuple[int, Path], BinaryIO] = OrderedDict()
_process = os.getpid()


class Streams:
    """The open tars of one reader, each opened on first use; those used longest ago are closed."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        weakref.finalize(self, _forget, self._number)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, tar: Path) -> BinaryIO:
        """The open tar.

        Raises:
            OSError, IrregularFile: as `open_regular`.
        """
        global _process
        if _process != os.getpid():  # after a fork: the same open files would share positions with the parent
            _open.clear()
            _process = os.getpid()
        key = (self._number, tar)
        stream = _open.get(key)
        if stream is None:
            stream = _open[key] = open_regular(tar)
            while len(_open) > most_open(_MOST_OPEN):
                _open.popitem(last=False)  # closed when no thread reads it any more
            return stream
        _open.move_to_end(key)
        return stream


def _forget(number: int) -> None:
    for key in [key for key in _open if key[0] == number]:
        _open.pop(key, None)
