"""Patch positions: one .npy file per image, integers (patches, 3) as (t, h, w). Source of the format: NEP 1."""

import io
import struct
import tokenize

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason, RecordError
from energon_packed.records import MediaReference

# Exceptions that NumPy raises for a corrupt header.
_HEADER_ERRORS = (ValueError, SyntaxError, TypeError, EOFError, LookupError, struct.error, tokenize.TokenError)


def check_patch_positions(reference: MediaReference, patches: int) -> int:
    """Validate the header of a file without reading its data.

    Args:
        reference: .npy file.
        patches: number of patches of its image.

    Returns:
        File size in bytes.

    Raises:
        RecordError: `missing_patch_positions`, if the file is missing or does not match the image.
    """
    try:
        with reference.open() as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            start, size = stream.tell(), stream.seek(0, 2)
    except RecordError as error:
        raise RecordError(Reason.MISSING_PATCH_POSITIONS, error.detail) from error
    except _HEADER_ERRORS as error:
        raise RecordError(Reason.MISSING_PATCH_POSITIONS, f"{reference.label}: {error}") from error
    if shape != (patches, 3) or dtype.kind not in "iu" or size - start != patches * 3 * dtype.itemsize:
        raise RecordError(
            Reason.MISSING_PATCH_POSITIONS,
            f"{reference.label} has dtype {dtype} and shape {shape}; the image needs integers of shape ({patches}, 3)",
        )
    return size


def load_patch_positions(reference: MediaReference, patches: int) -> npt.NDArray[np.int64]:
    """Load positions, int64 (patches, 3). Raises as `check_patch_positions`."""
    check_patch_positions(reference, patches)
    array = np.lib.format.read_array(io.BytesIO(reference.read()), allow_pickle=False)
    return np.asarray(array, dtype=np.int64)
