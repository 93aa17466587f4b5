"""Loop from an RGB image to normalized patches, compiled with Numba for one thread: loader workers share the cores.

A channel of a pixel has 256 values, so rescaling and normalizing are one look-up, and no float image exists. Elements
are copied as integers of the size of the asked type: the same loop serves float32 and bfloat16.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int16, int32, int64, types, uint8, void

from energon_packed.compiled import compiled

UInt8 = npt.NDArray[np.uint8]
IntBits = npt.NDArray[Any]
_IMAGE = types.Array(uint8, 2, "C", readonly=True)  # what Pillow gives; writable arrays are taken too
_SIGNATURES = [void(_IMAGE, bits[:, ::1], int64, int64, int64, bits[:, ::1]) for bits in (int32, int16)]


@partial(compiled, signatures=_SIGNATURES)
def write_patches(image: UInt8, table: IntBits, patch: int, merge: int, frames: int, out: IntBits) -> None:
    """Write the patches of one image, in the order of Qwen2-VL: merged blocks in row-major order, row-major inside.

    Args:
        image: uint8 (height, width * 3), RGB; both sides are multiples of `patch * merge` pixels.
        table: (3, 256), bits of the normalized value of each channel and pixel value.
        patch: pixels per side of a patch.
        merge: patches per side of a merged block.
        frames: temporal patch size; the image is repeated this many times.
        out: (patches, 3 * frames * patch * patch), elements in the order channel, frame, row, column.
    """
    red, green, blue = table[0], table[1], table[2]
    area = patch * patch
    channel = frames * area
    number = 0
    for block_row in range(image.shape[0] // (patch * merge)):
        for block_column in range(image.shape[1] // (3 * patch * merge)):
            for inner in range(merge * merge):
                top = (block_row * merge + inner // merge) * patch
                left = (block_column * merge + inner % merge) * patch * 3
                row = out[number]
                number += 1
                for y in range(patch):
                    line = image[top + y]
                    for x in range(patch):
                        # Unsigned indices spare the compiled code the test for negative ones.
                        at = np.uint64(y * patch + x)
                        pixel = np.uint64(left + 3 * x)
                        row[at] = red[line[pixel]]
                        row[at + np.uint64(channel)] = green[line[pixel + np.uint64(1)]]
                        row[at + np.uint64(2 * channel)] = blue[line[pixel + np.uint64(2)]]
                for start in range(0, 3 * channel, channel):
                    first = row[start : start + area]
                    for frame in range(1, frames):
                        again = row[start + frame * area : start + (frame + 1) * area]
                        for i in range(area):  # compiles in a third of the time of a slice assignment
                            again[i] = first[i]
