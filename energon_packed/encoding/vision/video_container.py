"""Header of a video or audio file -> its declared size, and whether its frames may be rotated.

FFmpeg plays a truncated file up to its last byte without an error, and it reports a rotation with decoded frames only.
Both can be read from the header: ISO/IEC 14496-12 (mp4, mov), RFC 8794 and RFC 9559 (mkv, webm), and RIFF (avi, wav).
FFmpeg leaves out damaged pages of an Ogg file: their checksums are compared here (RFC 3533, 6).
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_MOST_BOXES = 16  # boxes of a level that are read: a fragmented file has thousands, each at another place
_HEAD = 1 << 16  # bytes in which the track headers of a Matroska file are searched
_EBML, _SEGMENT, _CLUSTER, _PROJECTION = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75", b"\x76\x70"
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"uuid")  # first boxes of a file
_RIFF_SLACK = 8  # some writers count the header of 8 bytes, too
_UNKNOWN = (0, 0xFFFFFFFF)  # sizes of RIFF files that were written to a pipe
_REVERSED = bytes(int(f"{value:08b}"[::-1], 2) for value in range(256))


@dataclass(frozen=True, slots=True)
class ContainerHeader:
    """Values of the header of a file.

    Attributes:
        end: bytes that the file must have; 0 if the header does not declare it.
        may_be_rotated: frames may be stored rotated or mirrored.
    """

    end: int = 0
    may_be_rotated: bool = False


def read_container_header(stream: BinaryIO, num_bytes: int) -> ContainerHeader:
    """Read the header of a file of `num_bytes` bytes; any content is accepted."""
    stream.seek(0)
    head = stream.read(12)
    if head[4:8] in _BOXES:
        return _of_boxes(stream, num_bytes)
    if head[:4] == _EBML:
        return _of_matroska(stream, num_bytes)
    if head[:4] == b"RIFF" and head[8:] in (b"AVI ", b"WAVE"):
        size = int.from_bytes(head[4:8], "little")
        is_known = head[8:] == b"AVI " or size not in _UNKNOWN
        return ContainerHeader(size + 8 if is_known and size + 8 > num_bytes + _RIFF_SLACK else 0)
    return ContainerHeader()


def has_damaged_page(stream: BinaryIO) -> bool:
    """Whether a page of an Ogg file is incomplete or has another checksum. Bytes after all tracks are ignored."""
    stream.seek(0)
    tracks = 0
    while head := stream.read(27):
        if len(head) < 27 or head[:5] != b"OggS\0":
            return tracks > 0
        sizes = stream.read(head[26])
        page = head[:22] + bytes(4) + head[26:] + sizes + stream.read(sum(sizes))
        # The checksum has no reflection, start and final XOR, which zlib's has: 0x04C11DB7 is the polynomial of both.
        checksum = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
        if checksum.to_bytes(4, "big").translate(_REVERSED) != head[22:26]:
            return True
        tracks += bool(head[5] & 2) - bool(head[5] & 4)  # first page and last page of a track
    return False


def _of_boxes(stream: BinaryIO, num_bytes: int) -> ContainerHeader:
    last, rotated = 0, False
    for kind, start, end in _boxes(stream, 0, num_bytes):
        last = max(last, end)
        if kind == b"moov":
            rotated = any(_is_rotated(stream, *header) for header in _matrices(stream, start, end))
    return ContainerHeader(last, rotated)


def _boxes(stream: BinaryIO, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start of the content, end) of the first boxes of a range: 4.2 of ISO/IEC 14496-12."""
    for _ in range(_MOST_BOXES):
        stream.seek(at)
        head = stream.read(16)
        if at + 8 > end or len(head) < 8:
            return
        size, kind = struct.unpack(">I4s", head[:8])
        start = at + 8
        if size == 1 and len(head) == 16:
            size, start = int.from_bytes(head[8:], "big"), at + 16
        elif size == 0:
            size = end - at
        if size < start - at:
            return
        at += size
        yield kind, start, at


def _matrices(stream: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start of a movie or track header, place of the matrix if it is of version 0): 8.2.2 and 8.3.2."""
    for kind, inner, inner_end in _boxes(stream, start, end):
        if kind == b"mvhd":
            yield inner, 36
        elif kind == b"trak":
            yield from ((header, 40) for child, header, _ in _boxes(stream, inner, inner_end) if child == b"tkhd")


def _is_rotated(stream: BinaryIO, header: int, at: int) -> bool:
    stream.seek(header)
    data = stream.read(at + 12 + 20)
    if len(data) < at + 32:
        return False
    if data[0] == 1:  # times and duration have 64 bits
        at += 12
    a, b, _, c, d = struct.unpack(">5i", data[at : at + 20])
    return a < 0 or d < 0 or bool(b or c)


def _of_matroska(stream: BinaryIO, num_bytes: int) -> ContainerHeader:
    stream.seek(0)
    head = stream.read(_HEAD)
    size, at = _number(head, 4)
    at += size
    end = 0
    if head[at : at + 4] == _SEGMENT:
        size, start = _number(head, at + 4)
        # All bits of an unknown size are set; it ends with the file.
        end = start + size if size + 1 != 1 << (7 * (start - at - 4)) else 0
    return ContainerHeader(end, _PROJECTION in head.partition(_CLUSTER)[0])


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of variable size and the place after it: RFC 8794, 4."""
    first = data[at] if at < len(data) else 0
    length = 9 - first.bit_length()
    value = int.from_bytes(data[at : at + length], "big") & ((1 << (7 * length)) - 1)
    return value, at + length
