"""Compilation of the kernels with Numba, once they have enough work.

Input: functions in the subset of Python that Numba compiles. Output: the same functions, which run as Python at first,
and as machine code from the call that makes compilation worth its time. Small inputs thus need neither Numba (half a
second) nor a compilation (some seconds, once: the result is kept in Numba's cache if a folder for it can be written).

compiled            decorator of a function that Python calls
called_by_kernels   decorator of a function that compiled functions call
trailing_zeros      a function that compiled functions can call
compile_now         compile from the next call on
"""

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])
# Array elements and sizes that are passed to kernels in this process until they are compiled: 0.2 s of Python.
_WORTH_IT = 1 << 17
_worked = 0
_called: list[Callable[..., Any]] = []


def compiled(function: Function) -> Function:
    """Compile a function, without the GIL, when this process has called kernels with enough elements.

    Numba caches it beside the file of the function or, if that folder cannot be written, in the cache folder of the
    user. If neither can be written (a read-only installation, and a user without a home), each process compiles again
    for some seconds.

    Args:
        function: written in the subset of Python that Numba compiles; its arguments are arrays and sizes.
    """
    machine_code: Callable[..., Any] | None = None

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal machine_code
        if machine_code is None:
            if not _is_worth_it(arguments):
                return function(*arguments)
            machine_code = _machine_code(function)
        return machine_code(*arguments)

    return call  # type: ignore[return-value]


def called_by_kernels(function: Function) -> Function:
    """Allow compiled functions to call a function; for Python it stays a Python function."""
    _called.append(function)
    return function


def trailing_zeros(word: int) -> int:
    """Number of zero bits below the lowest bit of a word that is not 0; one instruction in compiled functions."""
    return (int(word) & -int(word)).bit_length() - 1


def compile_now() -> None:
    """Compile every function at its next call."""
    global _worked
    _worked = _WORTH_IT


def _is_worth_it(arguments: tuple[Any, ...]) -> bool:
    global _worked
    _worked += sum(each.size if isinstance(each, np.ndarray) else each for each in arguments)
    return _worked >= _WORTH_IT


@lru_cache(maxsize=1)
def _register_called() -> None:
    """Register the functions that compiled functions call with Numba."""
    from numba.cpython.unsafe import numbers
    from numba.extending import overload, register_jitable

    instruction = numbers.trailing_zeros
    overload(trailing_zeros)(lambda word: lambda word: instruction(word))
    for function in _called:
        register_jitable(function)


def _machine_code(function: Function) -> Function:
    from numba import njit

    _register_called()
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
