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
    if conversation.patch_positions:
        vision.check_decided()
        num_bytes += check_patch_positions(conversation.patch_positions, patches)
        if vision.takes_patch_positions and vision.patch_order == "auto":
            _in_blocks(vision, conversation, [vision.grid(header.height, header.width) for header in headers])
    return MediaSize(patches, num_bytes)


def read_pixels(vision: VisionFamily, conversation: Conversation) -> Pixels:
    """Pixels by the image processor of the family, or with the same values. Raises as `measure_media` does."""
    vision.check_decided()
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
    if not conversation.patch_positions:
        return vision.patch_positions(pixels.grids)
    if not vision.takes_patch_positions:
        check_patch_positions(conversation.patch_positions, pixels.patches)
        return vision.patch_positions(pixels.grids)
    return _in_blocks(vision, conversation, [(int(h), int(w)) for _, h, w in pixels.grids])


def _in_blocks(vision: VisionFamily, conversation: Conversation, grids: Sequence[tuple[int, int]]) -> Int64:
    return load_patch_positions(conversation.patch_positions, grids, vision.merge_size, vision.patch_order)
