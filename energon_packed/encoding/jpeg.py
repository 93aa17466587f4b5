"""JPEGs of images, for readers that take no other format and no EXIF orientation."""

import io

from PIL import Image

from energon_packed.encoding.images import is_upright, load_image
from energon_packed.errors import Reason, RecordError
from energon_packed.records import MediaReference

QUALITY = 95
_LARGEST_SIDE = 65_500  # pixels, of Pillow's encoder


def as_jpeg(data: bytes) -> bytes:
    """An upright JPEG as it is; another image as a JPEG of quality 95, without chroma subsampling and metadata.

    Pixels are those of `load_image`: RGB, upright, the first frame. The bytes are the same in every process with the
    same Pillow.

    Raises:
        RecordError: `corrupt_image`, where it cannot be decoded or has a side of more than 65,500 pixels.
    """
    image = _to_convert(data)
    if image is None:
        return data
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY, subsampling=0, progressive=False, optimize=False)
    return out.getvalue()


def check_as_jpeg(data: bytes) -> bool:
    """Whether `as_jpeg` decodes an image; raises as it does."""
    return _to_convert(data) is not None


def _to_convert(data: bytes) -> Image.Image | None:
    """The image that becomes a JPEG; None where it is an upright one."""
    if data.startswith(b"\xff\xd8\xff") and is_upright(data):
        return None
    image = load_image(MediaReference(data=data))
    if max(image.size) > _LARGEST_SIDE:
        raise RecordError(
            Reason.CORRUPT_IMAGE,
            f"an image of {image.width} x {image.height} pixels cannot be a JPEG, whose sides have at most "
            f"{_LARGEST_SIDE:,}; set `keep_bytes`",
        )
    return image
