"""Packets of a video -> frames that they show, and whether a decoder can start at them.

Marks of keyframes in containers are not enough. FFmpeg sets them for recovery points of H.264, after which an image is
refreshed over several frames, encoders mark forward keyframes, and a decoder that starts after a change of parameters
uses the wrong ones. A decoder returns the same frames as if it had decoded all packets before only at

    H.264         an IDR picture; an intra picture with an exact recovery point of 0 frames (ISO/IEC 14496-10, D.2.8)
    HEVC          an IDR, BLA or CRA picture, for the frames that are not shown before it (ISO/IEC 23008-2, 3.69)
    AV1           a sequence header and a key frame that is shown (AV1 specification, 7.6.3)
    VP8, VP9      a key frame (RFC 6386, 9.1; VP9 specification, 6.2)
    GIF           the first frame
    MPEG-1, -2, -4    an intra picture, for the frames that are not shown before it
    FFV1          a keyframe (RFC 9043, 4.4)
    Motion JPEG, ProRes, DNxHD, lossless codecs     every frame, with its tables

and, if parameters of the stream have changed, with these parameters in the packet. All other codecs are decoded from
their first packet.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

_MOST_HEADER = 1 << 12  # bytes of a packet in which its headers are searched


class Starts:
    """Finds packets at which a decoder can start; call it for the keyframes of a file in their order.

    Args:
        codec: name of FFmpeg.
        extradata: parameters in the header of the container.
    """

    def __init__(self, codec: str, extradata: bytes | None) -> None:
        self._find = _FIND.get(codec)
        self.is_known = self._find is not None
        self._extradata = extradata or b""
        self._has_changed = False

    def is_start(self, packet: Any) -> bool:
        """Whether a decoder that starts at this packet returns the frames of a decoder that has decoded all before."""
        if self._find is None:
            return False
        has_new = packet.has_sidedata("new_extradata")
        found, parameters, is_whole = self._find(bytes(packet), self._extradata)
        self._has_changed |= has_new or any(one not in self._extradata for one in parameters)
        return found and (is_whole or has_new or not self._has_changed)


# Whether it is a start, its parameters of the stream, and whether these are all that a decoder needs.
_Found = tuple[bool, list[bytes], bool]


def _h264(data: bytes, extradata: bytes) -> _Found:
    parameters: list[bytes] = []
    is_recovery = found = False
    for unit in _units(data, extradata[4:5] if extradata[:1] == b"\1" else b""):
        kind = unit[0] & 31
        if kind in (7, 8):
            parameters.append(unit)
        elif kind == 6:
            is_recovery |= _is_exact_recovery(unit)
        elif kind in (1, 5):
            # The bits of the header of a first slice that is intra: first_mb_in_slice 0, slice_type 2 or 7.
            found = kind == 5 or (is_recovery and (unit[1] >> 4 == 0b1011 or unit[1] == 0b10001000))
            break
    return found, parameters, len({unit[0] & 31 for unit in parameters}) == 2


def _is_exact_recovery(unit: bytes) -> bool:
    """Whether an SEI unit has a recovery point of 0 frames whose frames match exactly: 7.3.2.3.1 and D.1.8."""
    at = 1
    while at + 2 < len(unit):
        kind = size = 0
        while at < len(unit) and unit[at] == 255:
            kind, at = kind + 255, at + 1
        kind, at = kind + unit[at], at + 1
        while at < len(unit) and unit[at] == 255:
            size, at = size + 255, at + 1
        if at + 1 >= len(unit):
            return False
        size, at = size + unit[at], at + 1
        if kind == 6:
            return unit[at] >> 6 == 0b11  # recovery_frame_cnt 0, exact_match_flag
        at += size
    return False


def _hevc(data: bytes, extradata: bytes) -> _Found:
    parameters: list[bytes] = []
    found = False
    for unit in _units(data, extradata[21:22] if extradata[:1] == b"\1" else b""):
        kind = unit[0] >> 1 & 63
        if kind in (32, 33, 34):
            parameters.append(unit)
        elif kind < 32:
            found = 16 <= kind <= 21
            break
    return found, parameters, {33, 34} <= {unit[0] >> 1 & 63 for unit in parameters}


def _units(data: bytes, lengths: bytes) -> Iterator[bytes]:
    """Yield the units of H.264 and HEVC, which have their length before them, or a start code (Annex B)."""
    if lengths:
        at, width = 0, (lengths[0] & 3) + 1
        while at + width < len(data):
            size = int.from_bytes(data[at : at + width], "big")
            if size:
                yield data[at + width : at + width + size]
            at += width + size
        return
    at = data.find(b"\0\0\1")
    while at >= 0:
        end = data.find(b"\0\0\1", at + 3)
        unit = (data[at + 3 :] if end < 0 else data[at + 3 : end]).rstrip(b"\0")
        if len(unit) > 1:
            yield unit
        at = end


def _av1(data: bytes, extradata: bytes) -> _Found:
    at, has_sequence = 0, False
    while at < len(data):
        kind, has_extension, has_size = data[at] >> 3 & 15, data[at] & 4, data[at] & 2
        at += 2 if has_extension else 1
        size, shift = 0, 0
        while has_size and at < len(data):  # leb128
            size |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                break
        if kind == 1:
            has_sequence = True
        elif kind in (3, 6):  # show_existing_frame 0, frame_type 0, show_frame 1
            return has_sequence and data[at : at + 1] != b"" and data[at] >> 4 == 0b0001, [], True
        if not has_size:
            break
        at += size
    return False, [], True


def _mpeg2(data: bytes, extradata: bytes) -> _Found:
    head = data[:_MOST_HEADER]
    picture = head.find(b"\0\0\1\0")
    found = 0 <= picture < len(head) - 5 and head[picture + 5] >> 3 & 7 == 1
    # A sequence header resets the matrices, which extensions of pictures change.
    sequences = re.findall(rb"\x00\x00\x01\xb3.*?(?=\x00\x00\x01)", head, re.DOTALL)
    return found, sequences + re.findall(rb"\x00\x00\x01\xb5[\x30-\x3f]", head), bool(sequences)


def _mpeg4(data: bytes, extradata: bytes) -> _Found:
    head = data[:_MOST_HEADER]
    picture = head.find(b"\0\0\1\xb6")
    found = 0 <= picture < len(head) - 4 and head[picture + 4] >> 6 == 0
    layers = re.findall(rb"\x00\x00\x01[\x20-\x2f].*?(?=\x00\x00\x01)", head[: picture + 3], re.DOTALL)
    return found, layers, bool(layers)


def _every(data: bytes, extradata: bytes) -> _Found:
    return True, [], True


_FIND: dict[str, Callable[[bytes, bytes], _Found]] = {
    **dict.fromkeys(("prores", "dnxhd", "huffyuv", "ffvhuff", "utvideo", "magicyuv", "dvvideo", "v210"), _every),
    "h264": _h264,
    "hevc": _hevc,
    "av1": _av1,
    "vp8": lambda data, _: (not data[0] & 1, [], True),
    "vp9": lambda data, _: (not _vp9_bits(data[0]) & 0b1100, [], True),
    "mpeg1video": _mpeg2,
    "mpeg2video": _mpeg2,
    "mpeg4": _mpeg4,
    "mjpeg": lambda data, _: (b"\xff\xdb" in data[:_MOST_HEADER], [], True),  # has its own tables
    "ffv1": lambda data, _: (int.from_bytes(data[:2], "big") >= 0x7F80, [], True),
    "gif": lambda data, _: (data[:3] == b"GIF", [], True),  # the others draw over the last frame
    "png": lambda data, _: (data[:4] == b"\x89PNG", [], True),
}


def num_shown(codec: str, data: memoryview) -> int:
    """Count the frames of a packet that are shown: 9.1 of RFC 6386 (VP8), 6.2 and Annex B of the VP9 specification."""
    if codec == "vp8":
        return data[0] >> 4 & 1
    marker = data[-1]
    if marker >> 5 == 0b110:
        count, width = (marker & 7) + 1, (marker >> 3 & 3) + 1
        index = data[-2 - count * width :]
        if len(index) == 2 + count * width and index[0] == marker:
            sizes = [int.from_bytes(index[1 + width * n : 1 + width * (n + 1)], "little") for n in range(count)]
            starts = [sum(sizes[:n]) for n in range(count)]
            return sum(_is_shown(data[start]) for start, size in zip(starts, sizes, strict=True) if size)
    return int(_is_shown(data[0]))


def _is_shown(first: int) -> bool:
    """Whether a frame of VP9 is shown, from its first byte."""
    return bool(_vp9_bits(first) & 0b1010)


def _vp9_bits(first: int) -> int:
    """show_existing_frame, frame_type, show_frame and error_resilient_mode, from the first byte of a frame of VP9."""
    return first << 1 if first >> 4 & 3 == 3 else first  # profile 3 has one more bit
