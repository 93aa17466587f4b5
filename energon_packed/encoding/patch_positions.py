"""Patch positions: one .npy file per image, whole numbers (patches, 3) as (t, h, w). Source of the format: NEP 1."""

import io
import struct
import tokenize

import numpy as np
import numpy.typing as npt

from energon_packed.conversation import MediaReference
from energon_packed.errors import Reason, RecordError

# What numpy's reader of a mutilated header raises.
_HEADER_ERRORS = (ValueError, SyntaxError, TypeError, EOFError, LookupError, struct.error, tokenize.TokenError)


def check_patch_positions(reference: MediaReference, patches: int) -> int:
    """Look at the header of a file without reading its numbers.

    Args:
        reference: the file.
        patches: patches of its image.

    Returns:
        Bytes of the file.

    Raises:
        RecordError: `missing_patch_positions`, when there is no file or it is not that of such an image.
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
            f"{reference.label} holds {dtype} of shape {shape}; the image needs whole numbers of shape ({patches}, 3)",
        )
    return size


def load_patch_positions(reference: MediaReference, patches: int) -> npt.NDArray[np.int64]:
    """Positions int64 (patches, 3). Raises as `check_patch_positions` does."""
    check_patch_positions(reference, patches)
    array = np.lib.format.read_array(io.BytesIO(reference.read()), allow_pickle=False)
    return np.asarray(array, dtype=np.int64)
