"""`compiled`: functions that Numba compiles, and keeps compiled where there is a place for that."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, signatures: Any = None) -> Function:
    """Compile a function, without the GIL, and cache the result beside its file or in the cache folder of the user.

    Where neither can be written (a read-only installation, and a user without a home), each process compiles again,
    which takes some seconds.

    Args:
        function: in the part of Python that Numba compiles.
        signatures: types of its arguments, which compile it now; None compiles it at the first call.
    """
    given = () if signatures is None else (signatures,)
    if not _has_place(function):
        uncached: Function = njit(*given, nogil=True)(function)
        return uncached
    try:
        made: Function = njit(*given, cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = njit(*given, nogil=True)(function)
    return made


def _has_place(function: Any) -> bool:
    """Whether Numba has a folder for compiled code: without a home, it would make one named `~` in the working folder."""
    if any(os.environ.get(name) for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")) or os.path.expanduser("~") != "~":
        return True
    folder = Path(function.__code__.co_filename).parent
    return os.access(folder / "__pycache__" if (folder / "__pycache__").exists() else folder, os.W_OK)
