"""Small real videos, written with PyAV, whose frames contain their number; and damaged videos.

make_video(folder / "a.mp4", frames=30)      a file
number_of(frame)                             the number that a decoded frame shows
COMBINATIONS                                 (codec, extension) that the installed FFmpeg writes and reads
damaged_videos(folder)                       files that must be rejected
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.internals import ROTATIONS, set_matrix, write_video

Frame = NDArray[np.uint8]
_ROWS, _COLUMNS = 3, 4  # blocks of a frame: the first is always light, the others are the bits of the number
_INTRA = ("mjpeg", "ffv1", "prores_ks", "huffyuv", "rawvideo")  # encoders without groups of pictures
CODECS = {
    "libx264": ("mp4", "mov", "mkv", "avi", "ts", "flv"),
    "libx265": ("mp4", "mov", "mkv", "ts", "flv"),
    "mpeg4": ("mp4", "mov", "mkv", "avi", "ts"),
    "mpeg2video": ("mp4", "mov", "mkv", "avi", "ts"),
    "libvpx": ("mkv", "webm", "avi"),
    "libvpx-vp9": ("mp4", "mkv", "webm", "avi", "flv"),
    "libsvtav1": ("mp4", "mkv", "webm", "avi", "flv"),
    "mjpeg": ("mp4", "mov", "mkv", "avi"),
    "ffv1": ("mp4", "mkv", "avi"),
    "prores_ks": ("mov", "mkv"),
}
"""Encoders, and the extensions of the containers that can store their packets."""
COMBINATIONS = [(codec, extension) for codec, extensions in CODECS.items() for extension in extensions]


def numbered(number: int, width: int = 64, height: int = 48) -> Frame:
    """Draw the bits of a number, up to 2047, as light and dark blocks on a background that differs by the number."""
    bits = [1, *((number >> bit) & 1 for bit in range(_ROWS * _COLUMNS - 1))]
    frame = np.empty((height, width, 3), dtype=np.uint8)
    down, across = np.mgrid[:height, :width]
    frame[..., 0] = 30 + (down + 3 * number) % 40
    frame[..., 1] = 30 + (across + 5 * number) % 40
    frame[..., 2] = 40
    rows, columns = np.arange(_ROWS + 1) * height // _ROWS, np.arange(_COLUMNS + 1) * width // _COLUMNS
    for index, bit in enumerate(bits):
        row, column = divmod(index, _COLUMNS)
        if bit:
            frame[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] += np.uint8(150)
    return frame


def number_of(frame: Frame) -> int:
    """Return the number of a frame, and check that it is upright; the frame may be resized."""
    height, width = frame.shape[:2]
    middles = [
        frame[
            int((row + 0.3) * height / _ROWS) : int((row + 0.7) * height / _ROWS),
            int((column + 0.3) * width / _COLUMNS) : int((column + 0.7) * width / _COLUMNS),
        ].mean()
        > 115
        for row in range(_ROWS)
        for column in range(_COLUMNS)
    ]
    assert middles[0], "the frame is rotated or damaged"
    return sum(int(bit) << index for index, bit in enumerate(middles[1:]))


def make_video(
    path: Path,
    *,
    codec: str = "libx264",
    width: int = 64,
    height: int = 48,
    frames: int = 30,
    fps: Fraction | int = 30,
    gop: int = 12,
    b_frames: int = 2,
    rotation: int = 0,
    times: Sequence[int] | None = None,
    audio: bool = False,
    fragmented: bool = False,
    streamed: bool = False,
    options: dict[str, str] | None = None,
) -> Path:
    """Write a video of numbered frames.

    Args:
        path: the file; its extension is the container.
        codec: name of an encoder of FFmpeg.
        width, height: pixels of an upright frame.
        frames: number of frames.
        fps: frames per second.
        gop: distance of keyframes.
        b_frames: consecutive B-frames, if the codec has them.
        rotation: clockwise degrees that a player must rotate by, stored in the header (mp4, mov).
        times: time of each frame in units of 1 / `fps`, for a variable frame rate.
        audio: with an audio track.
        fragmented: mp4 in fragments, without a table of frames.
        streamed: without a duration and an index, as written to a pipe (mkv, webm).
        options: more options of the encoder.
    """
    chosen = {} if codec in _INTRA else {"g": str(gop)}
    if codec in ("libx264", "mpeg4", "mpeg2video"):
        chosen["bf"] = str(b_frames)
    elif codec == "libx265":
        chosen["x265-params"] = f"log-level=none:keyint={gop}:bframes={b_frames}:pools=none:frame-threads=1"
    elif codec.startswith("libvpx"):
        chosen |= {"cpu-used": "8", "deadline": "realtime"}
    elif codec == "libsvtav1":
        chosen["preset"] = "12"
    muxer_options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"} if fragmented else {}
    if streamed:
        muxer_options["live"] = "1"
    stored = (height, width) if rotation in (90, 270) else (width, height)
    upright = (numbered(number, width, height) for number in range(frames))
    write_video(
        path,
        (np.ascontiguousarray(np.rot90(frame, rotation // 90)) for frame in upright),
        fps=fps,
        codec=codec,
        options=chosen | (options or {}),
        muxer_options=muxer_options,
        times=times,
        audio=audio,
    )
    if rotation:
        a, b, c, d = ROTATIONS[rotation]
        set_matrix(path, a, b, c, d, *stored)
    return path


Packet = tuple[int, bytes, bool]  # time of presentation, which is also that of decoding; content; is a keyframe


def rewrite(
    source: Path,
    target: Path,
    change: Callable[[list[Packet]], Iterable[Packet]],
    *,
    muxer: str | None = None,
    by_decoding: bool = False,
) -> Path:
    """Write other packets of a video without B-frames to another file, without decoding them.

    `by_decoding` writes times of decoding as those of presentation.
    """
    import av

    with av.open(str(source)) as container, av.open(str(target), "w", format=muxer) as out:
        track = container.streams.video[0]
        stream = out.add_stream_from_template(track)
        packets = [
            ((packet.dts if by_decoding else packet.pts), bytes(packet), packet.is_keyframe)
            for packet in container.demux(track)
            if packet.size
        ]
        for time, data, is_keyframe in change(packets):
            packet = av.Packet(data)
            packet.pts, packet.dts = time, time
            packet.time_base, packet.is_keyframe, packet.stream = track.time_base, is_keyframe, stream
            out.mux(packet)
    return target


def remux(
    source: Path,
    target: Path,
    *,
    skipped: int = 0,
    shift: int = 0,
    options: dict[str, str] | None = None,
    by_decoding: Iterable[int] = (),
) -> Path:
    """Copy the packets of a video to another file, without decoding them.

    Args:
        source, target: the files.
        skipped: packets at the start that are left out.
        shift: frames by which all times are decreased.
        options: options of the muxer.
        by_decoding: numbers of packets after `skipped` whose time of presentation is replaced by that of the first.
    """
    import av

    muxer = {".mkv": "matroska", ".ts": "mpegts"}.get(target.suffix)
    with (
        av.open(str(source)) as container,
        av.open(str(target), "w", format=muxer, container_options={"fflags": "+bitexact", **(options or {})}) as out,
    ):
        track = container.streams.video[0]
        stream = out.add_stream_from_template(track)
        ticks = round(shift / (track.average_rate * track.time_base))
        for number, packet in enumerate(container.demux(track)):
            if packet.size and number >= skipped:
                packet.pts, packet.dts = packet.pts - ticks, packet.dts - ticks
                if number == skipped:
                    first = packet.pts
                elif number - skipped in by_decoding:
                    packet.pts = packet.dts = first
                packet.stream = stream
                out.mux(packet)
    return target


def decoded(path: Path) -> list[tuple[float | None, Frame]]:
    """Return (seconds, RGB pixels) of every frame as PyAV decodes them from the start, as stored: not rotated."""
    import av

    with av.open(str(path)) as container:
        return [
            (frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(container.streams.video[0])
        ]


def damaged_videos(folder: Path) -> Iterator[Path]:
    """Write files that are not videos, and yield their paths; the name is the damage."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = make_video(folder / "whole.mp4", frames=24).read_bytes()
    (folder / "whole.mp4").unlink()
    stream = make_video(folder / "whole.mkv", frames=24).read_bytes()
    (folder / "whole.mkv").unlink()
    moov = whole.index(b"moov") - 4
    contents = {
        "empty.mp4": b"",
        "text.mp4": b"a text that somebody renamed\n" * 40,
        "zeros.avi": bytes(10_000),
        "header-only.mp4": whole[: whole.index(b"mdat") - 4],
        "no-index.mp4": whole[:moov],
        "truncated.mkv": stream[: len(stream) * 2 // 3],
        "truncated-index.mp4": whole[:-100],
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name
    yield wrong_bytes(folder / "wrong-bytes.mp4", whole)
    yield endless(folder / "endless.mp4")
    yield make_bomb(folder / "bomb.mp4")
    yield only_audio(folder / "only-audio.mp4")
    yield no_frames(folder / "no-frames.mkv", stream)


def wrong_bytes(path: Path, content: bytes) -> Path:
    """Write a video with zeros in its pictures."""
    middle = content.index(b"mdat") + (content.index(b"moov") - content.index(b"mdat")) // 2
    path.write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])
    return path


def endless(path: Path, frames: int = 2_000_000_000) -> Path:
    """Write a video of a few bytes whose header declares years of frames of one byte each."""
    make_video(path, frames=2, codec="mjpeg")
    data = bytearray(path.read_bytes())
    times, sizes, chunks = data.index(b"stts") + 4, data.index(b"stsz") + 4, data.index(b"stsc") + 4
    data[times : times + 16] = struct.pack(">IIII", 0, 1, frames, 1024)
    data[sizes : sizes + 12] = struct.pack(">III", 0, 1, frames)
    data[chunks : chunks + 20] = struct.pack(">IIIII", 0, 1, 1, frames, 1)
    path.write_bytes(data)
    return path


def make_bomb(path: Path, side: int = 16_000) -> Path:
    """Write a video of a few kilobytes whose frames have `side` * `side` pixels, in its header and in its pictures."""
    make_video(path, codec="mjpeg", frames=4)
    data = path.read_bytes()
    data = data.replace(struct.pack(">HH", 64, 48), struct.pack(">HH", side, side))  # sample entry: width, height
    path.write_bytes(data.replace(struct.pack(">HH", 48, 64), struct.pack(">HH", side, side)))  # JPEG: height, width
    return path


def only_audio(path: Path) -> Path:
    """Write a file with an audio track alone."""
    import av

    with av.open(str(path), "w", container_options={"fflags": "+bitexact"}) as out:
        stream = out.add_stream("aac", 44_100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44_100), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 44_100, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def no_frames(path: Path, stream: bytes) -> Path:
    """Write the header of a Matroska file without a cluster."""
    path.write_bytes(stream[: stream.index(b"\x1f\x43\xb6\x75")])
    return path
