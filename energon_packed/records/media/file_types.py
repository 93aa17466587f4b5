"""Types of media files: the first bytes of a file in, the extension of its format out."""

import re

from energon_packed.records.media.kinds import AUDIO, VIDEO, MediaKind

# Brands of ISO base media files that contain images (HEIF, AVIF); all other files of this kind are videos or audio.
_IMAGE_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1", b"avif", b"avis", b"crx ")
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")  # first boxes of MP4 and QuickTime
_SIGNATURES = {  # in the order of the tests
    VIDEO.name: {
        "webm": rb"\x1a\x45\xdf\xa3.{0,60}webm",  # the document type of an EBML file, RFC 8794
        "mkv": rb"\x1a\x45\xdf\xa3",
        "avi": rb"RIFF....AVI ",
        "flv": rb"FLV\x01",
        "wmv": rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF, the container of WMV
        "mpg": rb"\x00\x00\x01[\xba\xb3]",  # MPEG program stream, MPEG video
        # MPEG transport stream: packets of 188 bytes, or of 192 bytes with a time before each. Files of other formats,
        # such as GIF, may have the byte 0x47 at two of these places by chance.
        "ts": rb"\x47(?:.{187}\x47){3}|.{4}\x47(?:.{191}\x47){3}",
    },
    AUDIO.name: {
        "wav": rb"(?:RIFF|RF64|BW64)....WAVE",
        "flac": rb"fLaC",
        "opus": rb"OggS.{23}.{1,255}?OpusHead",
        "ogg": rb"OggS(?!.{23}.{1,255}?\x80theora)",
        "m4a": rb"....ftyp(?:M4A |M4B )",
        "aiff": rb"FORM....AIF[FC]",
        "w64": rb"riff\x2e\x91\xcf\x11",
        "caf": rb"caff\x00",
        "au": rb"\.snd",
        "amr": rb"#!AMR",
        "aac": rb"ADIF|\xff[\xf0\xf1\xf8\xf9]",
        "mp3": rb"ID3|\xff[\xe2-\xe7\xf2-\xff]",
    },
}
_COMPILED = {
    kind: {extension: re.compile(pattern, re.DOTALL) for extension, pattern in signatures.items()}
    for kind, signatures in _SIGNATURES.items()
}
SIGNATURE_BYTES = 584
"""Bytes at the start of a file that decide its format."""


def is_video_content(head: bytes) -> bool:
    """Whether the first `SIGNATURE_BYTES` bytes of a file belong to a video container."""
    return video_extension(head) is not None


def video_extension(head: bytes) -> str | None:
    """Return the extension of a video without the dot, from its first `SIGNATURE_BYTES` bytes; None for others."""
    if head[4:8] in _BOXES:
        if head[8:12] in _IMAGE_BRANDS:
            return None
        # Files of QuickTime may start with other boxes; a segment of a fragmented mp4 starts with `styp`.
        return "mp4" if head[4:8] in (b"ftyp", b"styp") and head[8:12] != b"qt  " else "mov"
    return _extension(VIDEO, head)


def stored_extension(data: bytes) -> str:
    """Return the extension of an audio file in a pack, without the dot, by its content."""
    return audio_extension(data) or video_extension(data) or "audio"


def audio_extension(head: bytes) -> str | None:
    """Return the extension of an audio file without the dot, from its first `SIGNATURE_BYTES` bytes; else None."""
    return _extension(AUDIO, head)


def _extension(kind: MediaKind, head: bytes) -> str | None:
    return next((extension for extension, pattern in _COMPILED[kind.name].items() if pattern.match(head)), None)
