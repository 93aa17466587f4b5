"""Video files -> VideoInfo (frames and their times, from the packets), or upright RGB frames; the only user of PyAV.

    read_video_info    demultiplexes: the frames are counted, and not decoded
    decode_frames      decodes the selected frames, from the last keyframe before each of them
    check_video        decodes all frames

A packet of the containers and codecs below is one frame, except for hidden frames (VP8, VP9, edit lists of mp4), which
are recognized by their header. Frames that packets do not show are counted by decoding: fields of interlaced video,
codecs that are not listed, MPEG-4 frames without content, and files that do not start with a keyframe.

The pixels equal `frame.to_ndarray(format="rgb24")` of PyAV, which `transformers.video_utils.read_video_pyav` calls,
and are then rotated upright, which that function does not do. As there, the aspect ratio of pixels is ignored.

Files are untrusted: FFmpeg reads through `MediaReference.open` and can open nothing else, its containers are limited
to the formats below, and frames, pixels and bytes have limits.
"""

import struct
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import chain, islice
from operator import attrgetter
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from energon_packed.encoding.vision.video_container import ContainerHeader, read_container_header
from energon_packed.errors import ConfigError, Reason, RecordError, ResourceError
from energon_packed.libraries import calls
from energon_packed.records import MediaReference
from energon_packed.records.video import FrameSelection
from energon_packed.storage import is_remote
from energon_packed.system import memory_limit, raise_resource_error

MAX_VIDEO_BYTES = 1 << 34
"""Bytes of the largest video file, 16 GiB: more than 3 hours at 10 Mbit/s. All are read to count the frames."""
MAX_VIDEO_FRAMES = 1 << 22
"""Frames of the longest video: 38 hours at 30 frames per second, of which the index of an mp4 needs 100 MB."""
MAX_FRAME_PIXELS = 1 << 26
"""Pixels of the largest frame, 8192 * 8192: a decoder keeps up to 17 frames."""
_MOST_BETWEEN_PACKETS = 1 << 28  # bytes that are read for one packet, as large as a frame of 8192 * 8192 at 4 bytes
_OPEN_MEMORY = 1 << 29  # bytes that reading of header and index may allocate
_MOST_WAITING = 1 << 26  # bytes of packets that are kept until the next keyframe is known
_WORTH_A_SEEK = 1 << 20  # bytes of packets; reading them is as slow as a seek
_BLOCK, _REMOTE_BLOCK = 1 << 15, 1 << 20  # bytes per read: a request of an object is slower than reading 1 MiB
# Names of the demuxers; other formats of FFmpeg read other files (playlists), devices, or images.
_DEMUXERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,gif"
_CONTAINERS = "mp4, mov, mkv, webm, avi, ts, mpg, flv, wmv or gif"
_TIMED = ("mov", "matroska", "mpegts", "flv", "gif")  # store times of presentation; the others, times of decoding only
_DECODING_TIMES = ("avi", "asf")  # store the time of decoding of every packet; mpg, of some
_SEEKABLE = ("mov", "matroska")  # whose index has exact places of keyframes
_CODEC_NAMES = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}  # decoders -> codecs
_ONE_FRAME_PER_PACKET = (
    *("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores", "dnxhd", "ffv1"),
    *("huffyuv", "ffvhuff", "rawvideo", "h263", "flv1", "flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "png", "gif"),
)
_FIELD_CODECS = ("h264", "mpeg2video")  # a packet may be a field, of which two are a frame
_EMPTY_VOP = 9  # bytes of the largest MPEG-4 frame without content (ISO/IEC 14496-2, 6.2.5: vop_coded is 0)
# Codecs whose decoder skips frames that no other frame needs. HEVC is missing: a frame that its own temporal layer
# does not need may be needed by a higher layer.
_SKIPS_NONREFERENCE = ("h264", "mpeg4", "mpeg2video", "mpeg1video")
# PyAV 18 decodes titles and comments strictly by default; later releases keep other bytes, and have no such argument.
_METADATA: dict[str, dict[str, Any]] = {"18": {"metadata_errors": "replace"}}
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
        duration: `num_frames` / `fps` in seconds, as in that metadata.
        height, width: pixels of an upright frame.
        rotation: degrees (0, 90, 180, 270) by which stored frames are rotated clockwise to be upright.
        mirrored: stored frames are also mirrored.
        has_audio: the file has an audio track, which is ignored.
        container, codec: names of FFmpeg, such as `mov` and `h264`.
        num_bytes: size of the file.
        decoded: the frames were counted by decoding, as packets do not show their number.
        by_time: decoders find a frame by its time; otherwise, the file lacks times, and they count the frames.
    """

    num_frames: int
    timestamps: NDArray[np.float64]
    fps: float
    duration: float
    height: int
    width: int
    rotation: int
    mirrored: bool
    has_audio: bool
    container: str
    codec: str
    num_bytes: int
    decoded: bool
    by_time: bool = True


def read_video_info(reference: MediaReference) -> VideoInfo:
    """Count the frames of a video file and read their times without decoding them.

    Raises:
        RecordError: `missing_video`, `image_outside_root` or `corrupt_video`.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    with _opened(reference) as video:
        times = _packet_times(video)
        if times.show_frames:
            return _info(reference, video, times)
    with _opened(reference) as video:
        times.pts = array("q")
        for frame in _all_frames(video):
            times.is_complete = times.is_complete and frame.pts is not None
            times.pts.append(frame.pts or 0)
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


def check_video(reference: MediaReference) -> VideoInfo:
    """Decode all frames of a video file in bounded memory, and compare their number with `read_video_info`.

    Returns:
        The result of `read_video_info`.

    Raises:
        RecordError: `missing_video`, `image_outside_root` or `corrupt_video`.
        ResourceError: memory, open files or the disk fail.
        ConfigError: PyAV is not installed.
    """
    info = read_video_info(reference)
    with _opened(reference) as video:
        count = sum(1 for _ in _all_frames(video))
        if count != info.num_frames:
            raise _Damaged(f"has {info.num_frames} frames, of which {count} can be decoded; convert it")
    return info


class _Damaged(Exception):
    """A file cannot be used; the message is what it is or has, after its name."""


class _Retry(Exception):
    """Frames cannot be found by this decoder; another decoder must be used from the start."""

    def __init__(self, decoder: "type[_Decoder]") -> None:
        super().__init__()
        self.decoder = decoder


@cache
def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError("`av` is needed for video files; pip install 'energon-packed[video]'") from error
    return av


class _Stream:
    """A file for FFmpeg, which may read a limited number of bytes until the next packet."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.spent = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.spent += len(data)
        if self.spent > _MOST_BETWEEN_PACKETS:
            raise _Damaged(f"has more than {_MOST_BETWEEN_PACKETS:,} bytes without a frame; convert it")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset < 0:
            raise _Damaged("has a negative place in its index")
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


class _Video:
    """An open video file.

    Attributes:
        stream: the video track, as FFmpeg chooses it: cover images and small versions are not it.
        header: of the container.
    """

    def __init__(self, av: Any, container: Any, file: _Stream, header: ContainerHeader, num_bytes: int) -> None:
        self.container, self.header, self.num_bytes = container, header, num_bytes
        self._file = file
        stream = container.streams.best("video")
        if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
            raise _Damaged("has no video track")
        self.stream: Any = stream
        self.context: Any = stream.codec_context
        if self.context is None:
            raise _Damaged("has a codec that this build of FFmpeg cannot decode; convert it to H.264")
        if stream.frames > MAX_VIDEO_FRAMES:
            raise _Damaged(f"declares {stream.frames:,} frames, more than the limit of {MAX_VIDEO_FRAMES:,}; split it")
        self.demuxer = container.format.name.partition(",")[0]
        self.codec = _CODEC_NAMES.get(self.context.name, self.context.name)
        width, height = self.context.width, self.context.height
        if width <= 0 or height <= 0:
            # FFmpeg also reports a size of 0 for frames above `max_pixels`, which it does not open.
            raise _Damaged(f"has no frame size, or frames of more than {MAX_FRAME_PIXELS:,} pixels; resize it")
        _check_pixels(width, height)
        self.stored_size = (height, width)
        self.time_base: Fraction = stream.time_base
        for other in container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all
        self.is_interlaced = self.context.field_order > 1  # 0 is unknown, 1 progressive
        # AVI and others store times of decoding, which differ from times of presentation if frames are reordered.
        self.has_times = self.demuxer in _TIMED or not self.context.has_b_frames
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

        Raises:
            _Damaged: a packet is incomplete, or there are too many.
        """
        file, most = self._file, MAX_VIDEO_FRAMES
        for number, packet in enumerate(self.container.demux(self.stream)):
            if not packet.size:  # a repeated frame of AVI, which decoders would treat as the end; or the end
                continue
            if packet.is_corrupt:
                raise _Damaged(f"ends inside frame {number}, or bytes of it are missing; copy the file again")
            if number >= most:
                raise _Damaged(f"has more than {MAX_VIDEO_FRAMES:,} frames; split it")
            file.spent = 0
            yield packet

    def decoding_time(self, packet: Any) -> int:
        """Return the time of decoding that the file stores; `_NO_TIME` if it has none, or FFmpeg computes it."""
        time = packet.dts if self.demuxer in _DECODING_TIMES else None
        return _NO_TIME if time is None else int(time)

    def decode(self, packet: Any) -> list[Any]:
        """Decode a packet, or the frames that are left if it is None."""
        frames: list[Any] = self.context.decode(packet)
        for frame in frames:
            if (frame.height, frame.width) != self.stored_size:
                height, width = self.stored_size
                raise _Damaged(f"has a frame of {frame.width} x {frame.height} pixels among {width} x {height}")
        return frames


@contextmanager
def _opened(reference: MediaReference) -> Iterator[_Video]:
    """Open a video file; errors inside the block that its content causes become a `corrupt_video`."""
    av = _av()
    needed = _BLOCK
    with calls("av"), _open_reference(reference) as stream:
        container = None
        try:
            num_bytes = stream.seek(0, 2)
            if not num_bytes:
                raise _Damaged("is empty, 0 bytes")
            if num_bytes > MAX_VIDEO_BYTES:
                raise _Damaged(f"has {num_bytes:,} bytes, more than the limit of {MAX_VIDEO_BYTES:,}; split it")
            header = read_container_header(stream, num_bytes)
            if header.end > num_bytes:
                raise _Damaged(f"ends after {num_bytes:,} of {header.end:,} bytes; copy it again")
            stream.seek(0)
            file = _Stream(stream)
            with memory_limit(_OPEN_MEMORY):
                container = av.open(
                    file,
                    options={"max_pixels": str(MAX_FRAME_PIXELS), "threads": "1"},
                    container_options={"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"},
                    buffer_size=_REMOTE_BLOCK if is_remote(reference.file or "") else _BLOCK,
                    io_open=_refuse,
                    **_METADATA.get(av.__version__.partition(".")[0], {}),
                )
            video = _Video(av, container, file, header, num_bytes)
            needed = 32 * video.stored_size[0] * video.stored_size[1]
            yield video
        except (RecordError, ResourceError, _Retry):
            raise
        except _Damaged as error:
            raise _corrupt(reference, str(error)) from error
        except MemoryError as error:
            # FFmpeg reports sizes in damaged data as a lack of memory. It is one if an intact file has too little.
            try:
                np.empty(needed, dtype=np.uint8)
            except MemoryError as shortage:
                raise_resource_error(shortage, reference.label)
            raise _corrupt(reference, "needs more memory than its frames have, as damaged sizes do") from error
        except av.error.FFmpegError as error:
            raise _corrupt(reference, _described(error, is_open=container is not None)) from error
        except OSError as error:
            raise_resource_error(error, reference.label)
            raise _corrupt(reference, error.strerror or str(error)) from error
        # Of PyAV: a name that is not in the header, or a value that it does not know.
        except (ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            raise _corrupt(reference, f"cannot be read: {error}") from error
        finally:
            if container is not None:
                container.close()


def _open_reference(reference: MediaReference) -> BinaryIO:
    try:
        return reference.open()
    except RecordError as error:
        if error.reason is not Reason.MISSING_IMAGE:
            raise
        detail = error.detail.replace("of an image file", "of a video file")
        raise RecordError(Reason.MISSING_VIDEO, detail) from error


def _refuse(name: str, flags: int, options: object) -> NoReturn:
    raise _Damaged(f"refers to another file, {name[:80]!r}, which is not opened; store the video in one file")


def _described(error: Exception, *, is_open: bool) -> str:
    if not is_open:
        return f"is not a video of the formats {_CONTAINERS}, or its header is damaged"
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return f"has damaged data ({reason})"


def _corrupt(reference: MediaReference, detail: str) -> RecordError:
    detail = " ".join(detail.split())
    remedy = "" if ";" in detail else "; replace the video"
    return RecordError(Reason.CORRUPT_VIDEO, f"{reference.label} {detail}{remedy}")


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS:
        pixels = f"{width * height:,} pixels, more than the limit of {MAX_FRAME_PIXELS:,}"
        raise _Damaged(f"has frames of {pixels}; resize it")


@dataclass(slots=True)
class _Times:
    """Times of the frames of a file, in units of its time base and in the order of the file.

    Attributes:
        pts: times of presentation.
        dts: times of decoding of packets; `_NO_TIME` if the file does not have them.
        is_complete: `pts` has all frames.
        show_frames: a packet is a frame; otherwise, frames must be counted by decoding.
    """

    pts: "array[int]"
    dts: "array[int]"
    is_complete: bool
    show_frames: bool


def _packet_times(video: _Video) -> _Times:
    """Read the times of all packets whose frames are shown."""
    pts, dts = array("q"), array("q")
    is_complete = video.has_times
    shows = video.codec in _ONE_FRAME_PER_PACKET and not (video.is_interlaced and video.codec in _FIELD_CODECS)
    # Each value of a packet takes as long to read as the packet itself, so that most are read only if they matter.
    hides, is_mpeg4 = video.codec in ("vp8", "vp9"), video.codec == "mpeg4"
    has_edits, needs_dts = video.demuxer == "mov", not video.has_times
    first: int | None = None
    count = 1
    for number, packet in enumerate(video.packets()):
        time = packet.pts
        if number == 0:
            first, shows = time, shows and packet.is_keyframe
        if is_mpeg4 and packet.size <= _EMPTY_VOP:
            shows = False
        if has_edits and packet.is_discard:
            continue
        if hides and (count := _num_shown(video.codec, memoryview(packet))) == 0:
            continue
        if time is None:
            time, is_complete = 0, False
        elif first is not None and time < first:
            # Decoders may drop frames before the first keyframe: they need frames that are not in the file.
            shows = False
        pts.append(time)
        if needs_dts:
            dts.append(video.decoding_time(packet))
        for _ in range(1, count):
            pts.append(time)
    return _Times(pts, dts, is_complete, shows)


def _info(reference: MediaReference, video: _Video, times: _Times) -> VideoInfo:
    num_frames = len(times.pts)
    if not num_frames:
        raise _Damaged("has no frames")
    unit = float(video.time_base)
    fps = video.fps
    if times.is_complete:
        pts = np.sort(np.frombuffer(times.pts, dtype=np.int64))
        seconds = _seconds(pts - pts[0], video.time_base)
    else:
        counted = _CountedTimes(video.time_base, fps or video.guessed_fps)
        seconds = np.array([counted.add(number, times.dts) for number in range(num_frames)])
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
        duration=num_frames / fps,
        height=height,
        width=width,
        rotation=orientation.rotation,
        mirrored=orientation.is_mirrored,
        has_audio=bool(video.container.streams.audio),
        container=video.demuxer,
        codec=video.codec,
        num_bytes=video.num_bytes,
        decoded=not times.show_frames,
        by_time=times.is_complete,
    )


def _seconds(ticks: Any, time_base: Fraction) -> Any:
    """Convert an integer, or an array of them."""
    return ticks * time_base.numerator / time_base.denominator


class _CountedTimes:
    """Times of frames that have no time of presentation: the n-th time of decoding, or n / `fps`.

    Args:
        time_base: seconds of a unit.
        fps: frames per second.
    """

    def __init__(self, time_base: Fraction, fps: float | None) -> None:
        self._time_base, self._fps = time_base, fps
        self._last = 0.0

    def add(self, number: int, dts: "array[int]") -> float:
        """Return the time of the next frame in seconds from frame 0, not before the frame before it."""
        seconds = self._last
        if number < len(dts) and dts[number] != _NO_TIME and dts[0] != _NO_TIME:
            seconds = _seconds(dts[number] - dts[0], self._time_base)
        elif self._fps:
            seconds = number / self._fps
        self._last = max(self._last, seconds)
        return self._last


@dataclass(frozen=True, slots=True)
class _Orientation:
    """Steps that make a stored frame upright: transpose it, then flip rows and columns.

    Attributes:
        is_transposed, flips_rows, flips_columns: the steps.
    """

    is_transposed: bool
    flips_rows: bool
    flips_columns: bool

    @property
    def is_mirrored(self) -> bool:
        return (self.is_transposed + self.flips_rows + self.flips_columns) % 2 == 1

    @property
    def rotation(self) -> int:
        """Degrees clockwise, after a horizontal flip if it is mirrored."""
        if self.is_transposed:
            return 90 if self.flips_columns else 270
        return 180 if self.flips_rows else 0

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
    data = frame.side_data.get(_av().sidedata.sidedata.Type.DISPLAYMATRIX)
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


def _all_frames(video: _Video) -> Iterator[Any]:
    """Decode all frames from the start.

    Raises:
        _Damaged: a frame is incomplete.
    """
    for packet in chain(video.packets(), (None,)):
        for frame in video.decode(packet):
            _check_frame(frame)
            yield frame


def _check_frame(frame: Any) -> None:
    if frame.is_corrupt:
        # The last frames of a truncated ts have no unit of time.
        at = f" at {frame.time:.3f} s" if frame.time is not None and np.isfinite(frame.time) else ""
        raise _Damaged(f"has damaged data in a frame{at}")


def _decode(reference: MediaReference, selection: FrameSelection, kind: "type[_Decoder]") -> Iterator[Frame]:
    with _opened(reference) as video:
        # The choice depends on the file alone, as in `_packet_times`.
        decoder: _Decoder = (kind if video.has_times else _Counting)(video, selection)
        convert = _av().video.reformatter.VideoReformatter().reformat
        orientation: _Orientation | None = None if video.header.may_be_rotated else _UPRIGHT
        last, pixels = -1, None
        for position, index in enumerate(selection.indices):
            if pixels is None or index != last:
                frame = decoder.get(position)
                if orientation is None:
                    orientation = _orientation_of(frame)
                pixels = orientation.apply(convert(frame, format="rgb24", threads=1).to_ndarray())
                if pixels.shape[:2] != (selection.height, selection.width):
                    found = f"{pixels.shape[1]} x {pixels.shape[0]} pixels, not {selection.width} x {selection.height}"
                    raise _Damaged(f"has frames of {found}, {_AS_SELECTED}")
                last = index
            yield pixels


class _Decoder:
    """Returns the selected frames of a video, in their order."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        self._video, self._selection = video, selection

    def get(self, position: int) -> Any:
        """Return the frame of `selection.indices[position]`.

        Raises:
            _Damaged: the file does not have it.
            _Retry: another decoder is necessary.
        """
        raise NotImplementedError

    def _missing(self, position: int) -> Exception:
        index, time = self._selection.indices[position], self._selection.timestamps[position]
        return _Damaged(f"has no frame {index} at {time:.3f} s, {_AS_SELECTED}")


class _Counting(_Decoder):
    """Decodes all frames from the start, and counts them: for files without times of presentation."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        super().__init__(video, selection)
        self._dts = array("q")
        self._numbered = enumerate(self._decoded())
        self._times = _CountedTimes(video.time_base, selection.fps)

    def _decoded(self) -> Iterator[Any]:
        for packet in chain(self._video.packets(), (None,)):
            if packet is not None and not packet.is_discard:
                self._dts.append(self._video.decoding_time(packet))
            for frame in self._video.decode(packet):
                _check_frame(frame)
                yield frame

    def get(self, position: int) -> Any:
        for number, frame in self._numbered:
            time = self._times.add(number, self._dts)
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
        # Fields are skipped alone, so that only half of a frame would be decoded.
        self._skips = video.codec in _SKIPS_NONREFERENCE and not video.is_interlaced
        self._skip_frame = "DEFAULT"

    def get(self, position: int) -> Any:
        if not self._targets:
            while not self._frames and self._decode_next():
                pass
            if not self._frames:
                raise _Damaged("has no frame that can be decoded")
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
        if frame.pts is None:
            raise _Retry(_Counting)
        return int(frame.pts)

    def _look_ahead(self, target: int) -> None:
        """Read packets up to a time, as far as they help to decode less."""

    def _read(self) -> Any:
        """Read a packet; None at the end."""
        packet = next(self._packets, None)
        if packet is not None:
            if packet.pts is None:
                raise _Retry(_Counting)
            self._waiting.append(packet)
            self._waiting_bytes += packet.size
            if self._last is None and self._video.demuxer == "mov" and packet.dts is not None:
                self._delay = packet.pts - packet.dts
            self._latest = packet.pts if self._latest is None else max(self._latest, packet.pts)
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
    """Decodes from the last keyframe before each frame: packets before it are read, or passed by a seek."""

    def __init__(self, video: _Video, selection: FrameSelection) -> None:
        super().__init__(video, selection)
        self._has_jumped = False
        self._sought: int | None = None  # time that was sought last: once is enough
        self._seeks = video.demuxer in _SEEKABLE
        if self._seeks and video.demuxer == "matroska" and video.num_bytes > 4 * _WORTH_A_SEEK:
            video.container.seek(0)  # which reads the index

    def _missing(self, position: int) -> Exception:
        # Decoding cannot start at some keyframes: images that are refreshed over several frames, wrong marks.
        return _Retry(_Sequential) if self._has_jumped else super()._missing(position)

    def _look_ahead(self, target: int) -> None:
        if self._seeks and target != self._sought:
            self._sought = target
            self._seek(target)
        while (self._latest is None or self._latest < target) and self._waiting_bytes < _MOST_WAITING:
            packet = self._read()
            if packet is None:
                return
            if packet.is_keyframe and packet.pts <= target:
                self._restart(packet)

    def _restart(self, keyframe: Any) -> None:
        """Forget all before a packet that was read last."""
        self._waiting.clear()
        self._waiting.append(keyframe)
        self._waiting_bytes, self._start, self._latest = keyframe.size, keyframe.pts, keyframe.pts
        self._has_jumped = True
        self._video.context.flush_buffers()

    def _seek(self, target: int) -> None:
        """Seek to the keyframe of a time, if it is so far away that reading is slower."""
        entries, last = self._video.stream.index_entries, self._last
        # Times of the index are those of decoding in mp4, which are earlier than those of presentation by as much as
        # those of the first keyframe.
        since = last.pts if last.dts is None else last.dts
        at = bisect_right(entries, target - self._delay, key=attrgetter("timestamp")) - 1
        for place in range(at, max(-1, at - _MOST_STEPS), -1):
            entry = entries[place]
            if entry.is_keyframe:
                if entry.timestamp > since and entry.pos - (last.pos or 0) > _WORTH_A_SEEK:
                    self._video.container.seek(target, stream=self._video.stream)
                    packet = self._read()
                    if packet is None or not packet.is_keyframe or packet.pts > target:
                        raise _Retry(_Sequential)
                    self._restart(packet)
                return


def _num_shown(codec: str, data: memoryview) -> int:
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
    if first >> 4 & 3 == 3:  # profile 3 has one more bit
        first <<= 1
    return bool(first & 0b1000 or first & 0b10)
