"""Arrow columns: arrays or strings in, columns of a table out, and back.

They are converted by their buffers, because the conversions of pyarrow import pandas (if installed) in all workers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numeric_column(
    values: Sequence[int] | npt.NDArray[Any], dtype: Any, valid: npt.NDArray[np.bool_] | None = None
) -> Any:
    """Build a numeric Arrow column.

    Args:
        values: shape (n,).
        dtype: numpy type of the column.
        valid: bool (n,), False for null; None for a column without nulls.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    bitmap = None if valid is None else _bitmap(valid)
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [bitmap, pa.py_buffer(array)])


def string_column(values: Sequence[str | None]) -> Any:
    """Build a string column, with null for None; lone surrogates become question marks."""
    encoded = [b"" if value is None else value.encode(errors="replace") for value in values]
    # Layout of pa.string(): a bitmap, n + 1 int32 offsets, and the bytes of all strings.
    ends = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(item) for item in encoded], out=ends[1:])
    valid = np.array([value is not None for value in values], dtype=bool)
    buffers = [None if valid.all() else _bitmap(valid), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def dictionary_column(
    codes: npt.NDArray[Any], names: Any, dtype: Any, valid: npt.NDArray[np.bool_] | None = None
) -> Any:
    """Build a dictionary column: `names[code]` for each code.

    Args:
        codes: shape (n,).
        names: string column.
        dtype: numpy type in which the codes are stored.
        valid: as in `numeric_column`.
    """
    return pa.DictionaryArray.from_arrays(numeric_column(codes, dtype, valid), names)


def as_numpy(column: Any, dtype: Any) -> npt.NDArray[Any]:
    """Values of a numeric column without nulls, shape (n,); `dtype` is the numpy type of the column."""
    arrays = [
        np.frombuffer(chunk.buffers()[1], dtype=dtype)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _bitmap(valid: npt.NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
