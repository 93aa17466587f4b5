"""Video files -> VideoInfo (frames and their times, from the packets), or upright RGB frames.

    read_video_info    demultiplexes: the frames are counted, and not decoded
    decode_frames      decodes the selected frames, from the last start of the decoder before each of them
    check_video        decodes all frames

All frames equal those of a decoder that starts at the first packet: `video_packets.py` finds the packets at which
another start returns the same frames.

A packet of the containers and codecs below is one frame, except for hidden frames (VP8, VP9, edit lists of mp4), which
are recognized by their header. Frames that packets do not show are counted by decoding: fields of interlaced video,
codecs that are not listed, MPEG-4 frames without content, files that do not start with a keyframe, files whose times
are not in order, and files that are joined. In joined files, times start again; they are continued here, for packets
and decoders alike.

The pixels equal `frame.to_ndarray(format="rgb24")` of PyAV, which `transformers.video_utils.read_video_pyav` calls,
and are then rotated upright, which that function does not do. As there, the aspect ratio of pixels is ignored.

Files are untrusted: `av_file.py` opens them, and frames, pixels and bytes have limits.
"""

import struct
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count, islice
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_packed.encoding.av_file import Damaged, FileKind, OpenFile, load_av, opened_file
from energon_packed.encoding.vision.video_packets import Starts, num_shown
from energon_packed.records import MediaReference
from energon_packed.records.media.kinds import VIDEO
from energon_packed.records.media.video import FrameSelection

MAX_VIDEO_FRAMES = 1 << 22
"""Frames of the longest video: 38 hours at 30 frames per second, of which the index of an mp4 needs 100 MB."""
MAX_FRAME_PIXELS = 1 << 26
"""Pixels of the largest frame, 8192 * 8192: a decoder keeps up to 17 frames."""
MAX_FILE_PIXELS, MAX_PIXELS_PER_BYTE = 1 << 28, 1 << 16
"""Pixels of all frames of a small file, and of a larger file for each of its bytes. A black video of 1920 x 1080
in H.264 has 27,000 for each byte; a GIF can have 2,000,000, of which a few kilobytes are decoded for seconds."""
_MOST_WAITING = 1 << 26  # bytes of packets that are kept until the next keyframe is known
_WORTH_A_SEEK = 1 << 20  # bytes of packets; reading them is as slow as a seek
_KIND = FileKind(
    media=VIDEO,
    demuxers="mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,gif",
    containers="mp4, mov, mkv, webm, avi, ts, mpg, flv, wmv, ogv or gif",
    remedy="replace the video",
    options={"max_pixels": str(MAX_FRAME_PIXELS)},
)
_TIMED = (
    "mov",
    "matroska",
    "mpegts",
    "flv",
    "ogg",
    "gif",
)  # store times of presentation; the others, times of decoding only
_DECODING_TIMES = ("avi", "asf")  # store only the time of decoding of every packet; mpg, of some
_CODEC_NAMES = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}  # decoders -> codecs
_ONE_FRAME_PER_PACKET = (
    *("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores", "dnxhd", "ffv1"),
    *("huffyuv", "ffvhuff", "h263", "flv1", "flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "png", "gif"),
)
_FIELD_CODECS = ("h264", "mpeg2video")  # a packet may be a field, of which two are a frame
_EMPTY_VOP = 9  # bytes of the largest MPEG-4 frame without content (ISO/IEC 14496-2, 6.2.5: vop_coded is 0)
# Codecs whose decoder skips frames that no other frame needs. HEVC is missing: a frame that its own temporal layer
# does not need may be needed by a higher layer.
_SKIPS_NONREFERENCE = ("h264", "mpeg4", "mpeg2video", "mpeg1video")
_MARGIN = 512  # pixels that decoders may add to a side of a frame
_NO_TIME = -(1 << 63)
_MOST_STEPS = 10_000  # entries of an index that are searched for a keyframe
_AS_SELECTED = "as it had when its frames were selected; restore the file, or pack again"

Frame = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoInfo:
    """Frames of a video file.

    Attributes:
        num_frames: frames that a decoder returns.
        timestamps: time of presentation of each frame in seconds after frame 0, float64 (num_frames,).
        fps: average frames per second as in the metadata of Transformers' pyav backend (`average_rate`); if the file
            does not have it, the rate of the timestamps.
        height, width: pixels of an upright frame.
        has_audio: the file has an audio track, which is ignored.
        container, codec: names of FFmpeg, such as `mov` and `h264`.
        num_bytes: size of the file.
        decoded: the frames were counted by decoding, as packets do not show their number.
        by_time: decoders find a frame by its time; otherwise, the file lacks times, and they count the frames.
    """

    num_frames: int
    timestamps: NDArray[np.float64]
    fps: float
    height: int
    width: int
    has_audio: bool
    container: str
    codec: str
    num_bytes: int
    decoded: bool
    by_time: bool = True

    def selection(self, indices: NDArray[np.int64]) -> FrameSelection:
        """Select frames by their indices, int64 (frames,), not decreasing."""
        times = np.asarray(self.timestamps, dtype=np.float64)
        return FrameSelection(
            indices=tuple(indices.tolist()),
            timestamps=tuple(times[indices].tolist()),
            fps=self.fps,
            num_frames=self.num_frames,
            height=self.height,
            width=self.width,
        )


def read_video_info(reference: MediaReference) -> VideoInfo:
    """Count the frames of a video file and read their times without decoding them.

    Raises:
        RecordError: `missing_video`, `image_outside_root` or `corrupt_video`.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    with _opened(reference) as video:
        times = _packet_times(video)
        video.check_pixels(len(times.pts))
        if times.show_frames:
            return _info(reference, video, times)
    with _opened(reference) as video:
        times.pts = array("q", [_NO_TIME if frame.pts is None else frame.pts for frame in _all_frames(video)])
        return _info(reference, video, times)


def decode_frames(reference: MediaReference, frames: FrameSelection) -> Iterator[Frame]:
    """Decode the selected frames, one at a time.

    Decoding starts at the last keyframe before a frame, unless that was decoded already. One thread is used: loader
    workers and packing processes run in parallel, and more threads need more CPU time for the same frames.

    Args:
        reference: the file.
        frames: `indices`, which do not decrease, `timestamps`, `fps`, `height` and `width` are used.

    Yields:
        RGB pixels (height, width, 3), upright, in the order of `indices`. A repeated index yields the same array.

    Raises:
        RecordError: `missing_video`, `image_outside_root`, or `corrupt_video`, which is also raised if the file does
            not contain these frames: another time, another size, or fewer frames.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    decoder: type[_Decoder] = _Jumping
    done = 0
    while True:
        try:
            for pixels in islice(_decode(reference, frames, decoder), done, None):
                yield pixels
                done += 1
            return
        except _Retry as retry:
            decoder = retry.decoder


def check_video(reference: MediaReference, frames: FrameSelection | None = None) -> VideoInfo:
    """Decode all frames of a video file from the first, in bounded memory.

    Args:
        reference: the file.
        frames: selected frames, which `decode_frames` must return as they are among all frames.

    Returns:
        The result of `read_video_info`, which must have as many frames.

    Raises:
        RecordError: `missing_video`, `image_outside_root` or `corrupt_video`.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    info = read_video_info(reference)
    selected = zip(frames.indices, decode_frames(reference, frames), strict=True) if frames else iter(())
    place, pixels = next(selected, (-1, None))
    num_decoded = 0
    with _opened(reference) as video:
        to_pixels = _Converter(video)
        for number, frame in enumerate(_all_frames(video)):
            num_decoded += 1
            if number == place and pixels is not None and not np.array_equal(to_pixels(frame), pixels):
                raise Damaged(f"has a frame {number} that differs if decoding starts at a keyframe; convert it")
            while place == number:
                place, pixels = next(selected, (-1, None))
        if num_decoded != info.num_frames:
            raise Damaged(f"has {info.num_frames} frames, of which {num_decoded} can be decoded; convert it")
    return info


class _Retry(Exception):
    """Frames cannot be found by this decoder; another decoder must be used from the start."""

    def __init__(self, decoder: "type[_Decoder]") -> None:
        super().__init__()
        self.decoder = decoder


class _Video:
    """An open video file.

    Attributes:
        stream: the video track, as FFmpeg chooses it: cover images and small versions are not it.
        header: of the container.
        is_joined: times have started again in the packets so far: the file is several files, one after the other.
    """

    def __init__(self, file: OpenFile) -> None:
        av, container, header, num_bytes = file.av, file.container, file.header, file.num_bytes
        self.container, self.header, self.num_bytes = container, header, num_bytes
        self._file, self.check_pages = file.stream, file.check_pages
        self.is_joined = False
        self._num_decoded = 0
        stream = container.streams.best("video")
        if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
            raise Damaged("has no video track")
        self.stream: Any = stream
        self.context: Any = stream.codec_context
        if self.context is None:
            raise Damaged("has a codec that this build of FFmpeg cannot decode; convert it to H.264")
        if stream.frames > MAX_VIDEO_FRAMES:
            raise Damaged(f"declares {stream.frames:,} frames, more than the limit of {MAX_VIDEO_FRAMES:,}; split it")
        self.demuxer = container.format.name.partition(",")[0]
        self.codec = _CODEC_NAMES.get(self.context.name, self.context.name)
        width, height = self.context.width, self.context.height
        if width <= 0 or height <= 0:
            # FFmpeg also reports a size of 0 for frames above `max_pixels`, which it does not open.
            raise Damaged(f"has no frame size, or frames of more than {MAX_FRAME_PIXELS:,} pixels; resize it")
        _check_pixels(width, height)
        self.stored_size = (height, width)
        self.time_base: Fraction = stream.time_base
        for other in container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all
        # The index of these has exact places of keyframes. That of a joined Matroska file is of its first part.
        self.is_seekable = self.demuxer == "mov" or (self.demuxer == "matroska" and header.end == num_bytes)
        self.starts = Starts(self.codec, self.context.extradata)
        self.is_interlaced = self.context.field_order > 1  # 0 is unknown, 1 progressive
        # AVI and others store times of decoding, which differ from times of presentation if frames are reordered.
        self.has_times = self.demuxer in _TIMED or (self.demuxer in _DECODING_TIMES and not self.context.has_b_frames)
        self.context.thread_count = 1
        # A frame in the data that is larger than in the header is refused before its memory is allocated.
        self.context.options = {"max_pixels": str((width + _MARGIN) * (height + _MARGIN))}

    @property
    def fps(self) -> float | None:
        rate = self.stream.average_rate
        return float(rate) if rate else None

    @property
    def guessed_fps(self) -> float | None:
        rate = self.stream.guessed_rate
        return float(rate) if rate else None

    def packets(self) -> Iterator[Any]:
        """Yield the packets of the video track, without empty packets and without the end.

        Times that start again at a keyframe are continued by a frame after the latest time, except for files in which
        packets may be passed by a seek.

        Raises:
            Damaged: a packet is incomplete, or there are too many.
        """
        file, most = self._file, MAX_VIDEO_FRAMES
        latest, offset = _NO_TIME, 0
        for number, packet in enumerate(self._whole_packets()):
            if number >= most:
                raise Damaged(f"has more than {MAX_VIDEO_FRAMES:,} frames; split it")
            file.spent = 0
            time = packet.pts
            if time is not None:
                if time + offset < latest and packet.is_keyframe:
                    self.is_joined = True
                    if not self.is_seekable:
                        rate = self.stream.average_rate or self.stream.guessed_rate
                        offset = latest - time + max(1, round(1 / (rate * self.time_base)) if rate else 1)
                if offset:
                    packet.pts = time + offset
                latest = max(latest, time + offset)
            yield packet

    def _whole_packets(self) -> Iterator[Any]:
        source = (packet for packet in self.container.demux(self.stream) if packet.size)
        ahead = deque[Any]()
        for number in count():
            packet = ahead.popleft() if ahead else next(source, None)
            if packet is None:
                return
            if packet.is_corrupt:
                # FFmpeg also marks one of the last packets of a ts that is followed by another ts.
                ahead.extend(islice(source, 2 - len(ahead)))
                if not any(other.is_keyframe and _is_earlier(other, packet) for other in ahead):
                    raise Damaged(f"ends inside frame {number}, or bytes of it are missing; copy the file again")
            yield packet

    def decoding_time(self, packet: Any) -> int:
        """Return the time of decoding; `_NO_TIME` if the file stores neither it nor the time of presentation."""
        time = packet.dts if self.demuxer in (*_DECODING_TIMES, *_TIMED) else None
        return _NO_TIME if time is None else int(time)

    def decode(self, packet: Any) -> list[Any]:
        """Decode a packet, or the frames that are left if it is None."""
        frames: list[Any] = self.context.decode(packet)
        self._num_decoded += len(frames)
        self.check_pixels(self._num_decoded)
        for frame in frames:
            if (frame.height, frame.width) != self.stored_size:
                height, width = self.stored_size
                raise Damaged(f"has a frame of {frame.width} x {frame.height} pixels among {width} x {height}")
        return frames

    def check_pixels(self, num_frames: int) -> None:
        """Raise `Damaged` if so many frames have too many pixels for the size of the file."""
        height, width = self.stored_size
        pixels, most = num_frames * height * width, max(MAX_FILE_PIXELS, MAX_PIXELS_PER_BYTE * self.num_bytes)
        if pixels > most:
            found = f"{num_frames:,} frames of {width} x {height}, {pixels:,} pixels"
            limit = f"more than the limit of {most:,} for a file of {self.num_bytes:,} bytes"
            raise Damaged(f"has {found}, {limit}; resize it, or store fewer frames")


def _is_earlier(packet: Any, other: Any) -> bool:
    return packet.pts is not None and other.pts is not None and packet.pts < other.pts


@contextmanager
def _opened(reference: MediaReference) -> Iterator[_Video]:
    """Open a video file; errors inside the block that its content causes become a `corrupt_video`."""
    with opened_file(reference, _KIND, passed=(_Retry,)) as file:
        video = _Video(file)
        file.needed = 32 * video.stored_size[0] * video.stored_size[1]
        yield video


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS:
        pixels = f"{width * height:,} pixels, more than the limit of {MAX_FRAME_PIXELS:,}"
        raise Damaged(f"has frames of {pixels}; resize it")


@dataclass(slots=True)
class _Times:
    """Times of the frames of a file, in units of its time base and in the order of the file.

    Attributes:
        pts: times of presentation; `_NO_TIME` if a frame has none.
        dts: times of decoding of packets; `_NO_TIME` if the file does not have them.
        by_time: frames are found by `pts`; otherwise, they are counted.
        show_frames: a packet is a frame; otherwise, frames must be counted by decoding.
    """

    pts: "array[int]"
    dts: "array[int]"
    by_time: bool
    show_frames: bool


def _packet_times(video: _Video) -> _Times:
    """Read the times of all packets whose frames are shown."""
    pts, dts = array("q"), array("q")
    by_time = video.has_times
    shows = video.codec in _ONE_FRAME_PER_PACKET and not (video.is_interlaced and video.codec in _FIELD_CODECS)
    # Each value of a packet takes as long to read as the packet itself, so that most are read only if they matter.
    hides, is_mpeg4 = video.codec in ("vp8", "vp9"), video.codec == "mpeg4"
    has_edits, reorders = video.demuxer == "mov", bool(video.context.has_b_frames)
    first = 0
    num_frames = 1
    for number, packet in enumerate(video.packets()):
        time = packet.pts
        if number == 0:
            first, by_time = time or 0, by_time and time is not None
            shows = shows and (video.starts.is_start(packet) if video.starts.is_known else packet.is_keyframe)
        if is_mpeg4 and packet.size <= _EMPTY_VOP:
            shows = False
        if time is None:
            time, shows = _NO_TIME, shows and not by_time
        elif time <= first and number:
            # Decoders may drop frames before the first keyframe: they need frames that are not in the file.
            shows = False
        if has_edits and packet.is_discard:
            continue
        if hides and (num_frames := num_shown(video.codec, memoryview(packet))) == 0:
            continue
        pts.append(time)
        if reorders or not by_time:
            dts.append(video.decoding_time(packet))
        for _ in range(1, num_frames):
            pts.append(time)
    if not by_time:
        shows = shows and not reorders
    elif shows and len(pts) > 1:
        shows = _are_ordered(np.frombuffer(pts, dtype=np.int64), np.frombuffer(dts, dtype=np.int64), is_mpeg4=is_mpeg4)
    shows = shows and not video.is_joined
    return _Times(pts, dts, by_time, shows)


def _are_ordered(pts: NDArray[np.int64], dts: NDArray[np.int64], *, is_mpeg4: bool) -> bool:
    """Whether a decoder returns frames in the order of their times, as far as packets show it.

    Args:
        pts: times of presentation in the order of decoding, int64 (n,).
        dts: times of decoding, int64 (n,), if the decoder reorders frames; otherwise int64 (0,).
        is_mpeg4: FFmpeg drops B-frames of MPEG-4 whose own times contradict those of their neighbors.
    """
    if not len(dts):
        return bool((np.diff(pts) >= 0).all())
    # Some files store times of decoding as those of presentation, of all frames or some: a decoder with a delay cannot
    # return a frame at the time of its decoding, unless a later frame was decoded before.
    is_latest = np.append(True, pts[1:] > np.maximum.accumulate(pts)[:-1])
    steps = np.diff(np.sort(pts))
    is_even = not is_mpeg4 or np.ptp(steps) <= 1
    return bool((dts < pts)[is_latest].all() and not is_latest.all() and steps.min() > 0 and is_even)


def _info(reference: MediaReference, video: _Video, times: _Times) -> VideoInfo:
    video.check_pages()
    num_frames = len(times.pts)
    if not num_frames:
        raise Damaged("has no frames")
    unit = float(video.time_base)
    fps = video.fps
    if times.by_time:
        pts = np.frombuffer(times.pts, dtype=np.int64)
        if (pts == _NO_TIME).any():
            raise Damaged("has frames without a time; convert it")
        if times.show_frames:
            pts = np.sort(pts)
        seconds = _seconds(pts - pts[0], video.time_base)
        unordered = np.flatnonzero(np.diff(pts) < 0)
        if len(unordered):
            before, time = seconds[unordered[0] : unordered[0] + 2]
            raise Damaged(f"has a frame at {time:.3f} s after a frame at {before:.3f} s; convert it")
    else:
        counted = _counted_times(video.time_base, fps or video.guessed_fps, times.dts)
        seconds = np.fromiter(counted, dtype=np.float64, count=num_frames)
    if not fps:
        span = float(seconds[-1])
        fps = (num_frames - 1) / span if span > 0 else video.guessed_fps or 1 / unit
    height, width = video.stored_size
    orientation = _first_orientation(reference) if video.header.may_be_rotated else _UPRIGHT
    if orientation.is_transposed:
        height, width = width, height
    return VideoInfo(
        num_frames=num_frames,
        timestamps=seconds,
        fps=fps,
        height=height,
        width=width,
        has_audio=bool(video.container.streams.audio),
        container=video.demuxer,
        codec=video.codec,
        num_bytes=video.num_bytes,
        decoded=not times.show_frames,
        by_time=times.by_time,
    )


def _seconds(ticks: Any, time_base: Fraction) -> Any:
    """Convert an integer, or an array of them."""
    return ticks * time_base.numerator / time_base.denominator


def _counted_times(time_base: Fraction, fps: float | None, dts: "array[int]") -> Iterator[float]:
    """Yield times of frames that have no time of presentation: the n-th time of decoding, or n / `fps`.

    Args:
        time_base: seconds of a unit.
        fps: frames per second.
        dts: times of decoding, to which times may be added until their frame is reached.

    Yields:
        Time of the next frame in seconds from frame 0, not before the frame before it.
    """
    last = 0.0
    for number in count():
        seconds = last
        if number < len(dts) and dts[number] != _NO_TIME and dts[0] != _NO_TIME:
            seconds = _seconds(dts[number] - dts[0], time_base)
        elif fps:
            seconds = number / fps
        last = max(last, seconds)
        yield last


@dataclass(frozen=True, slots=True)
class _Orientation:
    """Steps that make a stored frame upright: transpose it, then flip rows and columns.

    Attributes:
        is_transposed, flips_rows, flips_columns: the steps.
    """

    is_transposed: bool
    flips_rows: bool
    flips_columns: bool

    def apply(self, frame: Frame) -> Frame:
        if self == _UPRIGHT:
            return frame
        if self.is_transposed:
            frame = frame.transpose(1, 0, 2)
        frame = frame[:: -1 if self.flips_rows else 1, :: -1 if self.flips_columns else 1]
        return np.ascontiguousarray(frame)


_UPRIGHT = _Orientation(False, False, False)


def _orientation_of(frame: Any) -> _Orientation:
    """Read the display matrix of a decoded frame: x' = a x + c y, y' = b x + d y (libavutil/display.h).

    A matrix that is between two rotations by 90 degrees is rounded to the nearest.
    """
    data = frame.side_data.get(load_av().sidedata.sidedata.Type.DISPLAYMATRIX)
    if data is None:
        return _UPRIGHT
    a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
    if abs(b) + abs(c) > abs(a) + abs(d):
        return _Orientation(True, b < 0, c < 0)
    return _Orientation(False, d < 0, a < 0)


def _first_orientation(reference: MediaReference) -> _Orientation:
    with _opened(reference) as video:
        for frame in _all_frames(video):
            return _orientation_of(frame)
    return _UPRIGHT


class _Converter:
    """Converts decoded frames of a video to upright RGB."""

    def __init__(self, video: _Video) -> None:
        self._convert = load_av().video.reformatter.VideoReformatter().reformat
        self._orientation: _Orientation | None = None if video.header.may_be_rotated else _UPRIGHT

    def __call__(self, frame: Any) -> Frame:
        if self._orientation is None:
            self._orientation = _orientation_of(frame)
        return self._orientation.apply(self._convert(frame, format="rgb24", threads=1).to_ndarray())


def _all_frames(video: _Video, dts: "array[int] | None" = None) -> Iterator[Any]:
    """Decode all frames from the start.

    Args:
        video: the file.
        dts: the times of decoding of packets are added to it.

    Raises:
        Damaged: a frame is incomplete.
    """
    for packet in chain(video.packets(), (None,)):
        if dts is not None and packet is not None and not packet.is_discard:
            dts.append(video.decoding_time(packet))
        for frame in video.decode(packet):
            _check_frame(frame)
            yield frame


def _check_frame(frame: Any) -> None:
    if frame.is_corrupt:
        # The last frames of a truncated ts have no unit of time.
        at = f" at {frame.time:.3f} s" if frame.time is not None and np.isfinite(frame.time) else ""
        raise Damaged(f"has damaged data in a frame{at}")


def _decode(reference: MediaReference, selection: FrameSelection, kind: "type[_Decoder]") -> Iterator[Frame]:
    with _opened(reference) as video:
        # The choice depends on the file alone, as in `_packet_times`.
        if not video.has_times:
            kind = _Counting
        elif kind is _Jumping and not video.starts.is_known:
            kind = _Sequential
        decoder = kind(video, selection)
        to_pixels = _Converter(video)
        last, pixels = -1, None
        for position, index in enumerate(selection.indices):
            if pixels is None or index != last:
                pixels = to_pixels(decoder.get(position))
                if pixels.shape[:2] != (selection.height, selection.width):
                    found = f"{pixels.shape[1]} x {pixels.shape[0]} pixels, not {selection.width} x {selection.height}"
                    raise Damaged(f"has frames of {found}, {_AS_SELECTED}")
                last = index
            yield pixels


class _Decoder:
    """Returns the selected frames of a video, in their order."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        self._video, self._selection = video, selection

    def get(self, position: int) -> Any:
        """Return the frame of `selection.indices[position]`.

        Raises:
            Damaged: the file does not have it.
            _Retry: another decoder is necessary.
        """
        raise NotImplementedError

    def _missing(self, position: int) -> Exception:
        index, time = self._selection.indices[position], self._selection.timestamps[position]
        return Damaged(f"has no frame {index} at {time:.3f} s, {_AS_SELECTED}")


class _Counting(_Decoder):
    """Decodes all frames from the start, and counts them: for files without times of presentation."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        super().__init__(video, selection)
        dts = array("q")
        self._timed = zip(count(), _all_frames(video, dts), _counted_times(video.time_base, selection.fps, dts))

    def get(self, position: int) -> Any:
        for number, frame, time in self._timed:
            if number == self._selection.indices[position]:
                # Selections are stored as text: a time may be rounded to microseconds.
                if abs(time - self._selection.timestamps[position]) > 1e-5:
                    break
                return frame
        raise self._missing(position)


class _Sequential(_Decoder):
    """Decodes all frames from the start, and identifies them by their time."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        super().__init__(video, selection)
        self._packets = video.packets()
        self._waiting = deque[Any]()  # packets that were read, and are not decoded
        self._waiting_bytes = 0
        self._frames = deque[Any]()  # frames that were decoded, and are not used
        self._is_drained = False
        self._latest: int | None = None  # time of presentation of the packets that were read
        self._last: Any = None  # the last packet that was read
        self._delay = 0  # time from decoding to presentation of keyframes, in the index
        self._start: int | None = None  # time from which frames are complete, of the keyframe
        self._targets: list[int] = []
        self._wanted: set[int] = set()
        self._skips = False  # frames that no other frame needs
        self._skip_frame = "DEFAULT"

    def get(self, position: int) -> Any:
        if not self._targets:
            while not self._frames and self._decode_next():
                pass
            if not self._frames:
                raise Damaged("has no frame that can be decoded")
            first = self._time_of(self._frames[0])
            scale = self._video.time_base.denominator / self._video.time_base.numerator
            self._targets = [first + round(seconds * scale) for seconds in self._selection.timestamps]
            self._wanted = set(self._targets)
        target = self._targets[position]
        while True:
            while self._frames:
                frame = self._frames.popleft()
                time = self._time_of(frame)
                if self._start is None or time >= self._start:
                    _check_frame(frame)
                if time == target:
                    return frame
                if time > target:
                    raise self._missing(position)
            self._look_ahead(target)
            if not self._decode_next():
                raise self._missing(position)

    def _time_of(self, frame: Any) -> int:
        return _NO_TIME if frame.pts is None else int(frame.pts)

    def _look_ahead(self, target: int) -> None:
        """Read packets up to a time, as far as they help to decode less."""

    def _read(self) -> Any:
        """Read a packet; None at the end."""
        packet = next(self._packets, None)
        if packet is not None:
            time = packet.pts
            if self._last is None:
                if time is None:  # as in `_packet_times`
                    raise _Retry(_Counting)
                if self._video.demuxer == "mov" and packet.dts is not None:
                    self._delay = time - packet.dts
            self._waiting.append(packet)
            self._waiting_bytes += packet.size
            if time is not None:
                self._latest = time if self._latest is None else max(self._latest, time)
            self._last = packet
        return packet

    def _decode_next(self) -> bool:
        """Decode a packet, and return whether there was one, or frames were left in the decoder."""
        if not self._waiting and self._read() is None:
            if self._is_drained:
                return False
            self._is_drained = True
            self._frames.extend(self._video.decode(None))
            return bool(self._frames)
        packet = self._waiting.popleft()
        self._waiting_bytes -= packet.size
        if self._skips:
            wanted = "NONREF" if self._targets and packet.pts not in self._wanted else "DEFAULT"
            if wanted != self._skip_frame:
                self._video.context.skip_frame = self._skip_frame = wanted
        self._frames.extend(self._video.decode(packet))
        return True


class _Jumping(_Sequential):
    """Decodes from the last start before each frame: packets before it are read, or passed by a seek."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        super().__init__(video, selection)
        self._has_jumped = False
        self._sought: int | None = None  # time that was sought last: once is enough
        self._seeks = video.is_seekable
        self._is_start = False  # the last packet
        # Fields are skipped alone, so that only half of a frame would be decoded.
        self._skips = video.codec in _SKIPS_NONREFERENCE and not video.is_interlaced
        if self._seeks and video.demuxer == "matroska" and video.num_bytes > 4 * _WORTH_A_SEEK:
            video.container.seek(0)  # which reads the index

    def _missing(self, position: int) -> Exception:
        return _Retry(_Sequential) if self._has_jumped or self._skips else super()._missing(position)

    def _read(self) -> Any:
        packet = super()._read()
        self._is_start = packet is not None and packet.is_keyframe and self._video.starts.is_start(packet)
        return packet

    def _look_ahead(self, target: int) -> None:
        if self._seeks and target != self._sought:
            self._sought = target
            self._seek(target)
        while (self._latest is None or self._latest < target) and self._waiting_bytes < _MOST_WAITING:
            latest, packet = self._latest, self._read()
            if packet is None:
                return
            time = packet.pts
            # The first of the frames with the same time is the selected frame.
            if self._is_start and time is not None and time <= target and (latest is None or latest < time):
                self._restart(packet)

    def _restart(self, start: Any) -> None:
        """Forget all before a packet that was read last."""
        self._waiting.clear()
        self._waiting.append(start)
        self._waiting_bytes, self._start, self._latest = start.size, start.pts, start.pts
        self._has_jumped = True
        self._video.context.flush_buffers()

    def _seek(self, target: int) -> None:
        """Seek to the keyframe before a time, if it is so far away that reading is slower."""
        entries, last = self._video.stream.index_entries, self._last
        # Times of the index are those of decoding in mp4, which are earlier than those of presentation by as much as
        # those of the first keyframe.
        since = last.pts if last.dts is None else last.dts
        at = bisect_left(entries, target - self._delay, key=attrgetter("timestamp")) - 1
        for place in range(at, max(-1, at - _MOST_STEPS), -1):
            entry = entries[place]
            if entry.is_keyframe:
                if since is not None and entry.timestamp > since and entry.pos - (last.pos or 0) > _WORTH_A_SEEK:
                    self._video.container.seek(target - 1, stream=self._video.stream)
                    packet = self._read()
                    if not self._is_start or packet.pts is None or packet.pts >= target:
                        raise _Retry(_Sequential)
                    self._restart(packet)
                return
