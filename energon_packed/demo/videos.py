"""Write videos with PyAV: RGB frames in, a file out, for `demo --videos`, tests and benchmarks.

The same frames and settings result in the same bytes, with the same build of PyAV.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_packed.encoding.av_file import load_av

_MUXERS = {
    "mkv": "matroska",
    "ts": "mpegts",
    "mpg": "mpeg",
    "wmv": "asf",
}  # extensions that are not the name of a muxer
_PIXEL_FORMATS = {"mjpeg": "yuvj420p", "prores": "yuv422p10le", "prores_ks": "yuv422p10le"}
_OPTIONS = {"libx264": {"preset": "ultrafast"}}  # the decisions of slower presets differ between runs
_SAMPLE_RATE = 44_100  # hertz of the audio track
ROTATIONS = {  # clockwise degrees that a player rotates by -> a, b, c, d of the matrix, ISO/IEC 14496-12, 6.2.2
    0: (1, 0, 0, 1),
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
}


def write_video(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],
    *,
    fps: Fraction | int = 30,
    codec: str = "libx264",
    options: Mapping[str, str] | None = None,
    muxer: str | None = None,
    muxer_options: Mapping[str, str] | None = None,
    pixel_format: str | None = None,
    times: Sequence[int] | None = None,
    audio: bool = False,
) -> Path:
    """Encode frames to a file.

    Args:
        path: the file to write.
        frames: RGB frames (height, width, 3), all of the same size, which is even.
        fps: frames per second.
        codec: name of an encoder of FFmpeg.
        options: options of the encoder.
        muxer: name of a muxer of FFmpeg; None for the muxer of the extension.
        muxer_options: options of the muxer.
        pixel_format: name of a pixel format of FFmpeg; None for the common format of the encoder.
        times: time of each frame in units of 1 / `fps`, increasing; None for 0, 1, 2, ...
        audio: add a track with a tone.

    Returns:
        `path`.

    Raises:
        ConfigError: PyAV is not installed.
    """
    av = load_av()
    extension = path.suffix[1:]
    rate = Fraction(fps)
    # Without `bitexact`, muxers write the version of FFmpeg and random numbers.
    settings = {"fflags": "+bitexact", **(muxer_options or {})}
    with av.open(str(path), "w", format=muxer or _MUXERS.get(extension, extension), container_options=settings) as out:
        stream: Any = out.add_stream(
            codec, rate=rate, options={"threads": "1"} | _OPTIONS.get(codec, {}) | dict(options or {})
        )
        stream.codec_context.time_base = 1 / rate
        stream.pix_fmt = pixel_format or _PIXEL_FORMATS.get(codec, "yuv420p")
        tone: Any = (
            out.add_stream("aac" if extension in ("mp4", "mov", "ts") else "ac3", _SAMPLE_RATE) if audio else None
        )
        count = 0
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if index == 0:
                stream.height, stream.width = pixels.shape[:2]
            frame.pts = index if times is None else times[index]
            frame.time_base = 1 / rate
            out.mux(stream.encode(frame))
            count = index + 1
        if count:
            out.mux(stream.encode())
        if tone is not None:
            _add_tone(av, out, tone, float(count / rate))
    return path


def set_matrix(path: Path, a: float, b: float, c: float, d: float, width: int = 0, height: int = 0) -> None:
    """Store the matrix (a b; c d) of a display in the track headers of an mp4: ISO/IEC 14496-12, 6.2.2 and 8.3.2.

    `width` and `height` are the sides of a stored frame, for the offset that keeps the frame at positive positions.
    """
    data = bytearray(path.read_bytes())
    at = -1
    while (at := data.find(b"tkhd", at + 1)) >= 0:
        version = data[at + 4]
        matrix = at + 4 + (52 if version else 40)
        x, y = max(0.0, -(a * width), -(c * height)), max(0.0, -(b * width), -(d * height))
        numbers = [round(value * 65536) for value in (a, b)], [round(value * 65536) for value in (c, d)]
        offsets = [round(value * 65536) for value in (x, y)]
        data[matrix : matrix + 36] = struct.pack(">9i", *numbers[0], 0, *numbers[1], 0, *offsets, 1 << 30)
    path.write_bytes(data)


def _add_tone(av: Any, out: Any, stream: Any, seconds: float) -> None:
    """Write a tone of 440 Hz."""
    samples = np.sin(np.arange(int(seconds * _SAMPLE_RATE)) * (2 * np.pi * 440 / _SAMPLE_RATE)).astype(np.float32)
    frame = av.AudioFrame.from_ndarray((samples / 4)[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts = _SAMPLE_RATE, 0
    out.mux(stream.encode(frame))
    out.mux(stream.encode())
