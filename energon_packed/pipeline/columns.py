"""Arrow columns from and to numpy and lists, by their buffers.

pyarrow's own conversions import pandas wherever it is installed, in every worker; these avoid that.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numbers(values: Sequence[int] | npt.NDArray[Any], dtype: Any, valid: npt.NDArray[np.bool_] | None = None) -> Any:
    """A column of numbers; null where `valid` is False.

    Args:
        values: shape (n,).
        dtype: numpy type of the column.
        valid: bool (n,), or None.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    bitmap = None if valid is None else _bitmap(valid)
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [bitmap, pa.py_buffer(array)])


def texts(values: Sequence[str | None]) -> Any:
    """A column of texts; null where a value is None. Lone surrogates become question marks."""
    encoded = [b"" if value is None else value.encode(errors="replace") for value in values]
    ends = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(item) for item in encoded], out=ends[1:])
    valid = np.array([value is not None for value in values], dtype=bool)
    buffers = [None if valid.all() else _bitmap(valid), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def named(codes: npt.NDArray[Any], names: Sequence[str], dtype: Any) -> Any:
    """A dictionary column: `names[code]` for each code.

    Args:
        codes: shape (n,).
        names: texts.
        dtype: numpy type that the codes are kept in.
    """
    return pa.DictionaryArray.from_arrays(numbers(codes, dtype), texts(names))


def as_numpy(column: Any, dtype: Any) -> npt.NDArray[Any]:
    """The values of a column of numbers without nulls, shape (n,); `dtype` is the numpy type of the column."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype=dtype)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _bitmap(valid: npt.NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
