"""Images of one conversation: how many patches they take, by their headers, and their pixels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from energon_packed.encoding.image_runs import ImageRun, Int64, Pixels
from energon_packed.encoding.images import load_image, read_header
from energon_packed.encoding.jpeg import check_as_jpeg
from energon_packed.encoding.patch_positions import check_patch_positions, load_patch_positions
from energon_packed.encoding.vision import VisionFamily
from energon_packed.records import Conversation, MediaReference

ImageCheck = Literal["header", "full", "convert"]


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Tokens of each image of a conversation, bytes of its images and .npy files, and images that were decoded."""

    runs: Sequence[ImageRun] = ()
    num_bytes: int = 0
    decoded: int = 0


def measure_media(vision: VisionFamily, conversation: Conversation) -> MediaSize:
    """Tokens and bytes, from the headers of the images.

    Raises:
        RecordError: an image or .npy file is missing, damaged or of a shape that the family rejects.
    """
    headers = [read_header(image) for image in conversation.images]
    runs = [vision.run(header.height, header.width) for header in headers]
    num_bytes = sum(header.num_bytes for header in headers)
    if conversation.patch_positions:
        vision.check_decided()
        patches = [vision.num_patches(header.height, header.width) for header in headers]
        num_bytes += check_patch_positions(conversation.patch_positions, patches)
        if vision.takes_patch_positions and vision.patch_order == "auto":
            _in_blocks(vision, conversation, [vision.grid(header.height, header.width) for header in headers])
    return MediaSize(runs, num_bytes, sum([header.decoded for header in headers]))


def check_pixels(conversation: Conversation, how: ImageCheck) -> int:
    """Decode images, for what a header does not show.

    Args:
        conversation: with any number of images.
        how: `header` decodes none, `full` all of them, `convert` those that `as_jpeg` converts.

    Returns:
        How many were decoded.

    Raises:
        RecordError: an image is missing or cannot be decoded.
    """
    if how == "header" or not conversation.images:
        return 0
    if how == "convert":
        return sum([check_as_jpeg(image.read()) for image in conversation.images])
    for image in conversation.images:
        load_image(image)
    return len(conversation.images)


def read_pixels(vision: VisionFamily, conversation: Conversation) -> Pixels:
    """Pixels by the image processor of the family, or with the same values. Raises as `measure_media` does."""
    vision.check_decided()
    return vision.read(_decoded(vision, conversation.images))


def _decoded(vision: VisionFamily, images: Sequence[MediaReference]) -> Iterator[Image.Image]:
    for reference in images:
        image = load_image(reference)
        vision.run(image.height, image.width)  # rejects shapes that the processor would crash on
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
