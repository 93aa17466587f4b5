"""VideoReference: a video file of a record, and the frames of it that a sample has (FrameSelection).

A record names a file. Measuring selects its frames from the packets of the file, without decoding, by the settings of
the vision family. A pack stores the file and the selection, so that training decodes exactly these frames, whatever
the settings of the encoder are then.

The module also defines which names and which bytes belong to a video file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_packed.records.media import MediaReference

VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".flv", ".f4v"),
    *(".wmv", ".asf", ".3gp", ".3g2", ".ogv", ".vob"),
)
"""Extensions of video files."""
# Brands of ISO base media files that contain images (HEIF, AVIF); all other files of this kind are videos or audio.
_IMAGE_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1", b"avif", b"avis", b"crx ")
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")  # first boxes of MP4 and QuickTime
_SIGNATURES = {  # in the order of the tests
    "webm": rb"\x1a\x45\xdf\xa3.{0,60}webm",  # the document type of an EBML file, RFC 8794
    "mkv": rb"\x1a\x45\xdf\xa3",
    "avi": rb"RIFF....AVI ",
    "flv": rb"FLV\x01",
    "wmv": rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF, the container of WMV
    "mpg": rb"\x00\x00\x01[\xba\xb3]",  # MPEG program stream, MPEG video
    # MPEG transport stream: packets of 188 bytes, or of 192 bytes with a time before each. Files of other formats,
    # such as GIF, may have the byte 0x47 at two of these places by chance.
    "ts": rb"\x47(?:.{187}\x47){3}|.{4}\x47(?:.{191}\x47){3}",
}
_COMPILED = {extension: re.compile(pattern, re.DOTALL) for extension, pattern in _SIGNATURES.items()}
SIGNATURE_BYTES = 584
"""Bytes at the start of a file that `video_extension` needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSelection:
    """Frames of a video file.

    Attributes:
        indices: frames in order of presentation, from 0; not decreasing.
        timestamps: time of presentation of each of them in seconds after frame 0.
        fps: average frames per second of the file.
        num_frames: frames of the file.
        height, width: pixels of an upright frame.
        resized: (height, width) that frames are resized to; None for families that resize them as images.
        settings: resolved settings that selected them, by the names of the processors, such as {"fps": 2.0}.

    Examples:
        >>> size = {"height": 480, "width": 640}
        >>> frames = FrameSelection(indices=(0, 15), timestamps=(0.0, 0.5), fps=30.0, num_frames=45, **size)
        >>> frames.num_frames / frames.fps
        1.5
    """

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    fps: float
    num_frames: int
    height: int
    width: int
    resized: tuple[int, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReference:
    """A video of a sample: a video file, or its selected frames as images (`pack --extract-frames`).

    Attributes:
        file: the video file; None if only the frames are stored.
        frames: the selected frames; None in a record, before it is measured. Always set if there is no `file`.
        images: without a `file`, an image for each of the `frames`, of their height and width. They are frames of a
            video: the model gets them as it gets the frames of a file.
        settings: settings of the record for this video, by the names of the processors, such as {"fps": 1.0}; they
            win over the settings of the vision family.
        images_before: number of images of the conversation before this video; for stored tokens, whose text has no
            placeholders. None if it is unknown, or if placeholders have the order.

    Examples:
        >>> record = {"videos": ["cat.mp4"], "prompts": ["What is it?"], "captions": ["A cat."]}
        >>> video = normalize(record).videos[0]
        >>> video.file.label, video.frames
        ('cat.mp4', None)
    """

    file: MediaReference | None
    frames: FrameSelection | None = None
    images: tuple[MediaReference, ...] = ()
    images_before: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> tuple[MediaReference, ...]:
        """The video file, or the images of its frames."""
        return self.images if self.file is None else (self.file,)


def has_video_suffix(name: str) -> bool:
    """Whether a path or URL ends like a video file; the query of a URL does not count."""
    if "://" in name:
        name = name.partition("?")[0]
    return name.lower().endswith(VIDEO_SUFFIXES)


def is_video_content(head: bytes) -> bool:
    """Whether the first `SIGNATURE_BYTES` bytes of a file belong to a video container."""
    return video_extension(head) is not None


def video_extension(head: bytes) -> str | None:
    """Return the extension of a video without the dot, from its first `SIGNATURE_BYTES` bytes; None for others."""
    if head[4:8] in _BOXES:
        if head[4:8] == b"ftyp" and head[8:12] in _IMAGE_BRANDS:
            return None
        # Files of QuickTime may start with other boxes; a segment of a fragmented mp4 starts with `styp`.
        return "mp4" if head[4:8] in (b"ftyp", b"styp") and head[8:12] != b"qt  " else "mov"
    return next((extension for extension, pattern in _COMPILED.items() if pattern.match(head)), None)
