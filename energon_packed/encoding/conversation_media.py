"""Images of one conversation: how many patches they take, by their headers, and their pixels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from energon_packed.encoding.images import load_image, read_header
from energon_packed.encoding.patch_positions import check_patch_positions, load_patch_positions
from energon_packed.encoding.vision import VisionFamily
from energon_packed.records import Conversation, MediaReference

Int64 = npt.NDArray[np.int64]
NO_IMAGES: Int64 = np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Patches of each image of a conversation, and bytes of its images and .npy files."""

    patches: Sequence[int] = ()
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pixels:
    """Pixels of the images of a conversation.

    Attributes:
        values: float32 (patches, patch_dim) tensor, or the ImagePatches that become one; None without images.
        grids_tensor: int64 (images, 3) tensor, patches in t, h and w.
        grids: the same as an array.
    """

    values: Any = None
    grids_tensor: Any = None
    grids: Int64 = field(default_factory=lambda: NO_IMAGES)

    @property
    def patches(self) -> list[int]:
        """Patches of each image."""
        return [int(count) for count in self.grids.prod(axis=1)]


def measure_media(vision: VisionFamily, conversation: Conversation) -> MediaSize:
    """Patches and bytes, from the headers of the images.

    Raises:
        RecordError: an image or .npy file is missing, damaged or of a shape that the family rejects.
    """
    headers = [read_header(image) for image in conversation.images]
    patches = [vision.num_patches(header.height, header.width) for header in headers]
    num_bytes = sum(header.num_bytes for header in headers)
    for positions, count in _positions_and_patches(conversation, patches):
        num_bytes += check_patch_positions(positions, count)
    return MediaSize(patches, num_bytes)


def read_pixels(vision: VisionFamily, conversation: Conversation) -> Pixels:
    """Pixels by the image processor of the family, or with the same values. Raises as `measure_media` does."""
    values, grids = vision.patches(_decoded(vision, conversation.images))
    return Pixels(values, grids, grids.numpy().astype(np.int64))


def _decoded(vision: VisionFamily, images: Sequence[MediaReference]) -> Iterator[Image.Image]:
    for reference in images:
        image = load_image(reference)
        vision.num_patches(image.height, image.width)  # rejects shapes that the processor would crash on
        yield image


def patch_positions(vision: VisionFamily, conversation: Conversation, pixels: Pixels) -> Int64 | None:
    """Positions int64 (patches, 3) of the .npy files, or of the family; None where its vision tower takes none.

    Raises:
        RecordError: `missing_patch_positions`.
    """
    given = [load_patch_positions(p, n) for p, n in _positions_and_patches(conversation, pixels.patches)]
    if given and vision.takes_patch_positions:
        return np.concatenate(given)
    return vision.patch_positions(pixels.grids)


def _positions_and_patches(conversation: Conversation, patches: Sequence[int]) -> list[tuple[MediaReference, int]]:
    return list(zip(conversation.patch_positions, patches, strict=True)) if conversation.patch_positions else []
