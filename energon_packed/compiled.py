"""Compilation of the kernels with Numba.

Input: a function in the subset of Python that Numba compiles. Output: the same function as machine code, kept in
Numba's cache if a folder for it can be written.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, without the GIL, and cache the result.

    Numba caches it beside the file of the function or, if that folder cannot be written, in the cache folder of the
    user. If neither can be written (a read-only installation, and a user without a home), each process compiles again
    for some seconds.

    Args:
        function: written in the subset of Python that Numba compiles.
    """
    if _has_cache_folder(function):
        try:
            cached: Function = njit(cache=True, nogil=True)(function)
            return cached
        except RuntimeError as error:  # raised when the decorator runs, if no cache locator finds a folder
            if "cannot cache" not in str(error):
                raise
    uncached: Function = njit(nogil=True)(function)
    return uncached


def _has_cache_folder(function: Any) -> bool:
    """Whether Numba has a folder for compiled code; without a home, Numba would create a folder named `~`."""
    if any(os.environ.get(name) for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")) or os.path.expanduser("~") != "~":
        return True
    folder = Path(function.__code__.co_filename).parent
    return os.access(folder / "__pycache__" if (folder / "__pycache__").exists() else folder, os.W_OK)
