"""Image headers and pixels.

`read_header` tells the size that `load_image` will have, without decoding pixels: both look at the EXIF orientation.
JPEG, PNG and WebP with a good end (PNG: with good check sums) take the short way; every other format, and every file
that looks wrong, is decoded, so that a file cut short is found while packing and not while training.
"""

import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from PIL import Image, ImageOps

from energon_packed.conversation import MediaReference
from energon_packed.errors import Reason, RecordError

_ORIENTATION = 0x0112  # EXIF 2.3, 4.6.4 A: tag 274
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}
_PNG_METADATA = {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What packing needs to know of an image.

    Attributes:
        width, height: pixels, after the EXIF orientation.
        extension: file extension of the actual format, without a dot.
        num_bytes: size of the file.
    """

    width: int
    height: int
    extension: str
    num_bytes: int


def read_header(reference: MediaReference) -> ImageHeader:
    """Size and format of an image.

    Raises:
        RecordError: `missing_image`, `image_outside_root` or `corrupt_image`.
    """
    with reference.open() as stream:
        num_bytes = stream.seek(0, 2)
        stream.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(stream) as image:
                    size = _quick_size(image, stream, num_bytes)
                    if size is None:
                        size = _decoded(image).size
                    extension = _extension(image)
        except _DECODE_ERRORS as error:
            raise _corrupt(reference, error) from error
    return ImageHeader(*size, extension, num_bytes)


def load_image(reference: MediaReference) -> Image.Image:
    """The pixels, upright by EXIF, as RGB; the first frame of an animation.

    Raises:
        RecordError: `missing_image`, `image_outside_root` or `corrupt_image`.
    """
    with reference.open() as stream:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(stream) as image:
                    return _decoded(image)
        except _DECODE_ERRORS as error:
            raise _corrupt(reference, error) from error


def sniff_extension(data: bytes) -> str:
    """File extension by content: `jpg`, `png`, `gif`, `webp`, `bmp`, `tif`, or what Pillow calls the format."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    return read_header(MediaReference(data=data)).extension


# What Pillow's many parsers raise for broken data; UnidentifiedImageError is an OSError, NotImplementedError a
# RuntimeError, IndexError and KeyError are LookupErrors, ZeroDivisionError an ArithmeticError.
_DECODE_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    LookupError,
    RuntimeError,
    ArithmeticError,
    TypeError,
    AttributeError,
    Image.DecompressionBombError,
)


def _decoded(image: Image.Image) -> Image.Image:
    image.load()
    return ImageOps.exif_transpose(image).convert("RGB")


def _extension(image: Image.Image) -> str:
    name = image.format or "img"
    return _EXTENSIONS.get(name, name.lower())


def _quick_size(image: Image.Image, stream: BinaryIO, num_bytes: int) -> tuple[int, int] | None:
    """Upright (width, height) from the header, or None where only decoding can tell."""
    if image.format in ("JPEG", "MPO"):
        complete = _jpeg_ends(stream, num_bytes)
    elif image.format == "PNG":
        complete = _png_is_plain(stream)
    elif image.format == "WEBP":
        stream.seek(4)
        complete = struct.unpack("<I", stream.read(4))[0] + 8 <= num_bytes
    else:
        complete = False
    if not complete:
        return None
    # The base class's getexif: that of PNG decodes all pixels to look for a late EXIF chunk, which `_png_is_plain`
    # has ruled out.
    orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    width, height = image.size
    return (height, width) if orientation in _SIDEWAYS else (width, height)


def _jpeg_ends(stream: BinaryIO, num_bytes: int) -> bool:
    """Whether an end-of-image marker stands near the end and after the start of the scan (ITU-T T.81, B.1.1).

    A thumbnail in the segments before has such a marker too.
    """
    at = 2
    while True:
        stream.seek(at)
        head = stream.read(4)
        if len(head) < 4 or head[0] != 0xFF:
            return False
        if head[1] == 0xDA:
            break
        at += 1 if head[1] == 0xFF else 2 + int.from_bytes(head[2:], "big")  # a fill byte, or a segment
    stream.seek(max(at, num_bytes - 4096))
    return b"\xff\xd9" in stream.read()


def _png_is_plain(stream: BinaryIO) -> bool:
    """True when every chunk is whole by its check sum, and no metadata follows the pixels (PNG specification, 5.3)."""
    stream.seek(8)
    pixels = False
    while len(head := stream.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        body = stream.read(length)
        if len(body) < length or zlib.crc32(body, zlib.crc32(kind)).to_bytes(4, "big") != stream.read(4):
            return False
        if kind == b"IEND":
            return pixels
        if pixels and kind in _PNG_METADATA:
            return False
        pixels = pixels or kind == b"IDAT"
    return False


def _corrupt(reference: MediaReference, error: Exception) -> RecordError:
    text = str(error)
    if "cannot identify image file" in text:
        text = "not an image that Pillow can read"
    return RecordError(Reason.CORRUPT_IMAGE, f"{reference.label}: {text}")
