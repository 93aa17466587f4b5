"""Image files -> ImageHeader (size, format) or upright RGB pixels; damaged or too large files raise a RecordError.

Without memory, or if the disk fails, a ResourceError is raised: the file may be intact.

`read_header` returns the size of the image that `load_image` returns; both apply the EXIF orientation. JPEG, PNG and
WebP files with a valid end (PNG: valid checksums) are not decoded. All other formats and suspicious files are decoded,
so that truncated files are detected during packing, not during training.

Pixels are equal to `transformers.image_utils.load_image`: upright RGB, the first frame, without the alpha channel.
They differ only if that function clips: 16-bit grey is scaled to 8 bits, as Pillow scales 16-bit colour, and
32-bit values that are not 0 to 255 are rejected.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from energon_packed.errors import ConfigError, Reason, RecordError, ResourceError
from energon_packed.libraries import calls
from energon_packed.records import MediaReference
from energon_packed.records.media.file_types import video_extension
from energon_packed.system import raise_resource_error

_ORIENTATION = 0x0112  # EXIF 2.3, 4.6.4 A: tag 274
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}
_PNG_METADATA = {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}
MAX_PIXELS = 178_956_970
"""Pixels of the largest image: 512 MiB as RGB. Equal to Pillow's limit for decompression bombs."""
MAX_BYTES = 1 << 30
"""Bytes of the largest image file: some decoders read the file into memory before anything else."""
_DECODER_BYTES = 16
"""Bytes per pixel of the buffers of a decoder: four components, which OpenJPEG decodes to 32 bits each."""
_SIXTEEN_BITS = ("PNG", "PPM", "JPEG2000")  # formats whose integers of 32 bits in Pillow are 16 bits in the file
_SIGNATURE_BYTES = 1024  # bytes at the start of a file that are searched for its format
QUALITY = 95
_LARGEST_SIDE = 65_500  # pixels, of Pillow's encoder


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Image metadata required for packing.

    Attributes:
        width, height: pixels, after applying the EXIF orientation.
        extension: file extension of the actual format, without the dot.
        num_bytes: size of the file.
        decoded: its pixels were decoded, because header and structure are not enough.
    """

    width: int
    height: int
    extension: str
    num_bytes: int
    decoded: bool = False


def read_header(reference: MediaReference) -> ImageHeader:
    """Read the size and format of an image.

    Raises:
        RecordError: `missing_image`, `image_outside_root` or `corrupt_image`.
        ResourceError: memory, open files or the disk fail.
    """
    with reference.open() as stream, _opened(reference, stream) as image:
        num_bytes = _num_bytes(stream)
        size = _quick_size(image, stream, num_bytes)
        decoded = size is None
        if size is None:
            size = _decoded(image, stream).size
        return ImageHeader(*size, _extension(image), num_bytes, decoded)


def load_image(reference: MediaReference) -> Image.Image:
    """Decode an image to RGB with the EXIF orientation applied; the first frame of an animation.

    Raises:
        RecordError: `missing_image`, `image_outside_root` or `corrupt_image`.
        ResourceError: memory, open files or the disk fail.
    """
    with reference.open() as stream, _opened(reference, stream) as image:
        return _decoded(image, stream)


def sniff_extension(data: bytes) -> str:
    """File extension of an image or video by content.

    Returns:
        `jpg`, `png`, `gif`, `webp`, `bmp`, `tif`, or Pillow's format name; or a `video_extension`.

    Raises:
        RecordError: `corrupt_image`, if it is neither an image nor a video.
    """
    if data.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if (container := video_extension(data)) is not None:
        return container
    return read_header(MediaReference(data=data)).extension


def is_upright(data: bytes) -> bool:
    """Whether an image has no EXIF orientation, so that readers which ignore it see what `load_image` returns.

    Raises:
        RecordError: `corrupt_image`.
    """
    reference = MediaReference(data=data)
    with reference.open() as stream, _opened(reference, stream) as image:
        return bool(Image.Image.getexif(image).get(_ORIENTATION, 1) == 1)


# Exceptions of Pillow's parsers for corrupt data; UnidentifiedImageError is an OSError, NotImplementedError a
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
    AssertionError,
    MemoryError,
    zlib.error,
    Image.DecompressionBombError,
)


@contextmanager
def _opened(reference: MediaReference, stream: BinaryIO) -> Iterator[Image.Image]:
    """Open an image and check its limits; errors inside the block that the data causes become a `corrupt_image`."""
    needed = 0
    try:
        if (num_bytes := _num_bytes(stream)) > MAX_BYTES:
            raise ValueError(f"{num_bytes:,} bytes are more than the limit of {MAX_BYTES:,}; save it compressed")
        with calls("pillow", is_parser=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large images and odd metadata
            with Image.open(stream) as image:
                if image.width * image.height > MAX_PIXELS:  # Pillow's own limit may be off
                    raise ValueError(_too_large(image.width * image.height))
                if image.format == "EPS":
                    raise ValueError("EPS is a program, which is not run; convert it to PNG")
                needed = num_bytes + _DECODER_BYTES * image.width * image.height
                yield image
    except (RecordError, ResourceError, ConfigError):
        raise
    except _DECODE_ERRORS as error:
        raise_resource_error(error, reference.label)
        # Decoders report a lack of memory as damage: "broken data stream" (JPEG 2000, progressive JPEG), and error -9
        # (TIFF), as a damaged tile size does. It is damage if there is enough memory for an intact file.
        # WebP fails before its size is known, so that its files always count as damaged.
        if isinstance(error, OSError) and "truncated" not in str(error):
            try:
                np.empty(needed, dtype=np.uint8)
            except MemoryError as shortage:
                raise_resource_error(shortage, reference.label)
        raise _corrupt(reference, error) from error


class _Bounded:
    """A file for decoders: reads of more bytes than the file has, as damaged data asks for, do not allocate them."""

    def __init__(self, stream: BinaryIO, num_bytes: int) -> None:
        self._stream, self._num_bytes = stream, num_bytes

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(min(size, self._num_bytes))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _num_bytes(stream: BinaryIO) -> int:
    num_bytes = stream.seek(0, 2)
    stream.seek(0)
    return num_bytes


def _decoded(image: Image.Image, stream: BinaryIO) -> Image.Image:
    if getattr(image, "fp", None) is stream:  # some formats decode a part of the file
        image.fp = _Bounded(stream, _num_bytes(stream))  # type: ignore[attr-defined]
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image)
    # `convert` copies the pixels, which is needless here. Other formats may contain more frames, which a copy drops.
    return image if image.mode == "RGB" and image.format in ("JPEG", "PNG") else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert a grey image of more than 8 bits to RGB; `convert` would turn all values above 255 white."""
    values = np.asarray(image)
    if image.mode.startswith("I;16") or image.format in _SIXTEEN_BITS:
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    low, high = values.min(), values.max()
    # NaN fails both comparisons. Floats up to 1 are a scale of 0 to 1, which would become black.
    if not (low >= 0 and high <= 255) or (image.mode == "F" and 0 < high <= 1):
        raise ValueError(f"32-bit image has values {low:g} to {high:g}, expected 0 to 255; save it as 8-bit or 16-bit")
    return image.convert("RGB")


def _extension(image: Image.Image) -> str:
    name = image.format or "img"
    return _EXTENSIONS.get(name, name.lower())


def _quick_size(image: Image.Image, stream: BinaryIO, num_bytes: int) -> tuple[int, int] | None:
    """(width, height) after EXIF orientation from the header, or None if decoding is required."""
    if image.format in ("JPEG", "MPO"):
        complete = _jpeg_ends(stream, num_bytes)
    elif image.format == "PNG":
        complete = _png_is_plain(stream, num_bytes)
    elif image.format == "WEBP":
        stream.seek(4)
        complete = struct.unpack("<I", stream.read(4))[0] + 8 <= num_bytes
    else:
        complete = False
    if not complete:
        return None
    # Use the base class's getexif: PNG's override decodes all pixels to find a late EXIF chunk, which
    # `_png_is_plain` has ruled out.
    orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    width, height = image.size
    return (height, width) if orientation in _SIDEWAYS else (width, height)


def _jpeg_ends(stream: BinaryIO, num_bytes: int) -> bool:
    """Whether an end-of-image marker occurs near the end and after the start of the scan (ITU-T T.81, B.1.1).

    Thumbnails in earlier segments contain such a marker too.
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
    for tail in (256, 4096):  # nearly always in the last bytes; reading more is slow for images in a tar on disk
        stream.seek(max(at, num_bytes - tail))
        if b"\xff\xd9" in stream.read(tail):
            return True
    return False


def _png_is_plain(stream: BinaryIO, num_bytes: int) -> bool:
    """Whether every chunk has a valid checksum and no metadata follows the pixels (PNG specification, 5.3)."""
    stream.seek(8)
    pixels = False
    while len(head := stream.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        body = stream.read(min(length, num_bytes))  # a read of 4 GiB would allocate them first
        if len(body) < length or zlib.crc32(body, zlib.crc32(kind)).to_bytes(4, "big") != stream.read(4):
            return False
        if kind == b"IEND":
            return pixels
        if pixels and kind in _PNG_METADATA:
            return False
        pixels = pixels or kind == b"IDAT"
    return False


def _corrupt(reference: MediaReference, error: Exception) -> RecordError:
    text = " ".join(str(error).split()) or type(error).__name__
    if "cannot identify image file" in text:
        text = _unidentified(reference)
    elif isinstance(error, Image.DecompressionBombError) and (match := re.search(r"\((\d+) pixels\)", text)):
        text = _too_large(int(match[1]))
    if ";" not in text:
        text += "; replace the image"
    return RecordError(Reason.CORRUPT_IMAGE, f"{reference.label}: {text}")


def _too_large(pixels: int) -> str:
    return f"{pixels:,} pixels are more than the limit of {MAX_PIXELS:,}; resize it"


def _unidentified(reference: MediaReference) -> str:
    """Describe a file that Pillow cannot read."""
    with reference.open() as stream:
        try:
            start = stream.read(_SIGNATURE_BYTES)
        except OSError as error:
            raise_resource_error(error, reference.label)
            raise
    if not start:
        return "is empty, 0 bytes"
    if re.search(rb"<svg[\s>]", start):
        return "an SVG drawing has no pixels; convert it to PNG"
    return "not an image that Pillow can read"


def as_jpeg(data: bytes) -> bytes:
    """Return an upright JPEG unchanged, another image as JPEG of quality 95 without chroma subsampling and metadata.

    Pixels are equal to `load_image`: RGB, upright, the first frame. The bytes are the same in every process with the
    same Pillow.

    Raises:
        RecordError: `corrupt_image`, if it cannot be decoded or has a side of more than 65,500 pixels.
    """
    image = _to_convert(data)
    return data if image is None else _jpeg(image)


def frame_as_jpeg(frame: npt.NDArray[np.uint8]) -> bytes:
    """Return a frame of a video, RGB (height, width, 3), as `as_jpeg` returns an image."""
    return _jpeg(Image.fromarray(frame))


def _jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY, subsampling=0, progressive=False, optimize=False)
    return out.getvalue()


def check_as_jpeg(data: bytes) -> bool:
    """Whether `as_jpeg` decodes an image. Raises the same errors."""
    return _to_convert(data) is not None


def _to_convert(data: bytes) -> Image.Image | None:
    """The decoded image to save as JPEG; None for an upright JPEG."""
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
