"""`compiled`: functions that Numba compiles, and keeps compiled where there is a place for that."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, signatures: Any = None) -> Function:
    """Compile a function, without the GIL, and cache the result beside its file or in the cache folder of the user.

    Where neither can be written (a read-only installation, and a user without a home), each process compiles again.

    Args:
        function: in the part of Python that Numba compiles.
        signatures: types of its arguments, which compile it now; None compiles it at the first call.
    """
    given = () if signatures is None else (signatures,)
    try:
        made: Function = njit(*given, cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = njit(*given, nogil=True)(function)
    return made
