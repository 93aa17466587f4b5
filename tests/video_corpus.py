"""Videos of all encoders, containers and settings that the installed FFmpeg has, as files of people have them.

make_case(folder, number)      a file, the same for the same number; None if FFmpeg does not write this combination
compare(path, rng)             its frames with those of a decoder that starts at the first packet
"""

import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.codec import Codec, codecs_available
from numpy.typing import NDArray
from PIL import Image

from energon_packed import FrameSelection, MediaReference, RecordError
from tests.internals import ROTATIONS, decode_frames, read_video_info, set_matrix, video_file, write_video

Frame = NDArray[np.uint8]
_HARDWARE = ("_nvenc", "_qsv", "_amf", "_v4l2m2m", "_vaapi", "_vulkan", "_mf", "_videotoolbox", "_d3d12va")
MUXERS = {
    "mkv": "matroska",
    "ts": "mpegts",
    "m2ts": "mpegts",
    "wmv": "asf",
    "mpg": "mpeg",
    "m4v": "mp4",
    "ogv": "ogg",
}
_SIZES = {  # encoders that have a list of sizes
    **{"h261": (176, 144), "h263": (128, 96)},
    **{"dvvideo": (720, 576), "dnxhd": (256, 128), "flashsv": (256, 192)},
}
# Images, and encoders whose packets no container of `_CONTAINERS` stores.
_NOT_STORED = (
    *("a64multi", "a64multi5", "alias_pix", "apng", "bitpacked", "bmp", "fits", "flashsv2", "hdr", "libwebp"),
    *("libwebp_anim", "msrle", "pam", "pbm", "pcx", "pfm", "pgm", "pgmyuv", "phm", "ppm", "qoi", "roqvideo", "rv10"),
    *("rv20", "smc", "sunrast", "vbn", "vc2", "vnull", "wbmp", "wrapped_avframe", "xbm", "xface", "xwd"),
)
_COMMON = ("libx264", "libx264", "libx265", "libx265", "libvpx", "libvpx-vp9", "libsvtav1", "mpeg4", "mpeg2video")
_CONTAINERS = ("mp4", "mkv", "ts", "avi", "mov", "flv", "webm", "mpg", "wmv", "3gp", "m2ts", "ogv", "f4v", "gif")
_CHANGES = ("none", "none", "cut", "cut", "cut", "joined", "joined", "ended", "edit", "uneven", "rotated", "moved")


def encoders() -> list[str]:
    """Return the names of the encoders of videos that need no device and can be stored."""
    names = []
    for name in sorted(codecs_available):
        if name.endswith(_HARDWARE) or name in _NOT_STORED:
            continue
        try:
            codec = Codec(name, "w")
        except (ValueError, av.FFmpegError):
            continue
        if codec.type == "video" and codec.name == name:
            names.append(name)
    return names


def pictures(count: int, width: int, height: int, seed: int) -> Iterator[Frame]:
    """Yield pictures that move over a texture, with cuts: no two are alike."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(texture).resize((width + 160, height + 160), Image.Resampling.BICUBIC))
    cuts = set(rng.integers(5, max(6, count), 2).tolist())
    x = y = 0
    for number in range(count):
        if number in cuts:
            large = large[::-1, ::-1, ::-1]
        x, y = (x + 3) % 160, (y + 2) % 160
        frame = large[y : y + height, x : x + width].copy()
        frame[: height // 4, : width // 4] = (number * 37 % 256, number * 91 % 256, number * 151 % 256)
        yield frame


def settings_of(rng: random.Random, encoder: str) -> dict[str, str]:
    """Choose options of an encoder."""
    gop, b_frames = rng.choice((1, 3, 6, 8, 12, 25, 250)), rng.choice((0, 1, 2, 3, 5))
    options = {"g": str(gop)}
    if encoder.startswith("libx264"):
        options |= {"bf": str(b_frames), "preset": rng.choice(("ultrafast", "medium"))}
        parts = []
        kind = rng.choice(("closed", "closed", "open", "intra-refresh", "pyramid", "refs", "interlaced", "bluray"))
        parts += {
            "open": ["open-gop=1"],
            "intra-refresh": ["intra-refresh=1", "bframes=0"] if rng.random() < 0.3 else ["intra-refresh=1"],
            "pyramid": ["b-pyramid=normal", "b-adapt=0", "open-gop=1"],
            "refs": ["ref=4", f"scenecut={rng.choice((0, 40))}", f"min-keyint={gop}"],
            "interlaced": [rng.choice(("tff=1", "bff=1", "fake-interlaced=1"))],
            "bluray": ["bluray-compat=1", "open-gop=1", "b-pyramid=strict", "slices=4", "aud=1"],
        }.get(kind, [])
        if kind in ("open", "bluray") or rng.random() < 0.2:
            options["flags"] = "-cgop"
        if rng.random() < 0.2:
            parts.append("repeat-headers=1")
        if parts:
            options["x264-params"] = ":".join(parts)
        if rng.random() < 0.2:
            options["forced-idr"] = "1"
    elif encoder == "libx265":
        parts = ["log-level=none", "pools=none", "frame-threads=1", f"keyint={gop}", f"bframes={b_frames}"]
        parts += [f"open-gop={rng.randrange(2)}", f"repeat-headers={rng.randrange(2)}"]
        more = ["radl=2", "temporal-layers=2", "scenecut=0", "b-adapt=0", "hist-scenecut=1", "idr-recovery-sei=1"]
        # libx265 divides by zero if the distance of keyframes is short.
        parts.append(rng.choice([*more, "intra-refresh=1"] if gop >= 12 else more))
        options = {"x265-params": ":".join(parts), "preset": rng.choice(("ultrafast", "medium"))}
    elif encoder.startswith("libvpx"):
        options |= {
            "cpu-used": "8",
            "deadline": rng.choice(("realtime", "good")),
            "lag-in-frames": rng.choice(("0", "12")),
        }
        options |= {"auto-alt-ref": rng.choice(("0", "1")), "error-resilient": rng.choice(("0", "default"))}
        if encoder == "libvpx-vp9":
            options |= {"row-mt": "0", "frame-parallel": rng.choice(("0", "1"))}
    elif encoder == "libsvtav1":
        params = [f"irefresh-type={rng.choice((1, 2))}", f"pred-struct={rng.choice((1, 2))}", "lp=1"]
        if rng.random() < 0.3:
            params.append("enable-overlays=1")
        options = {"preset": rng.choice(("8", "12")), "g": str(max(gop, 8)), "svtav1-params": ":".join(params)}
    elif encoder == "dnxhd":
        options = {"profile": "dnxhr_lb"}
    elif encoder in ("mpeg4", "mpeg2video", "mpeg1video"):
        options["bf"] = str(b_frames)
        flags = rng.sample(["+cgop", "+qpel", "+mv4", "+ildct+ilme", "+aic", "+low_delay", "+global_header"], 1)
        if flags == ["+cgop"]:
            options["sc_threshold"] = "1000000000"
        if not (encoder != "mpeg4" and flags[0] in ("+qpel", "+mv4", "+aic")):
            options["flags"] = flags[0]
        if encoder != "mpeg4" and rng.random() < 0.3:
            options["intra_vlc"] = "1"
    return options


def make_case(folder: Path, number: int) -> tuple[Path, str] | None:
    """Write a video, and return its path and a description; None if no container stores this encoder."""
    rng = random.Random(number)
    names = encoders()
    encoder = rng.choice(_COMMON) if number % 4 else names[number // 4 % len(names)]
    for _ in range(12):
        if case := _attempt(folder, number, encoder, rng):
            return case
    return None


def _attempt(folder: Path, number: int, encoder: str, rng: random.Random) -> tuple[Path, str] | None:
    extension = rng.choice(_CONTAINERS)
    change = rng.choice(_CHANGES)
    width, height = _SIZES.get(encoder, rng.choice(((64, 48), (80, 64))))
    formats = [one.name for one in Codec(encoder, "w").video_formats or []] or ["yuv420p", "rgb24"]
    formats = [name for name in formats if not name.startswith(("gray", "pal"))] or formats  # libx264 crashes
    pixel_format = formats[0] if rng.random() < 0.8 else rng.choice(formats)
    options = settings_of(rng, encoder)
    count = rng.choice((12, 30, 48))
    fps = rng.choice((Fraction(25), Fraction(30), Fraction(30000, 1001)))
    muxer_options: dict[str, str] = {}
    if extension in ("mp4", "mov") and rng.random() < 0.3:
        muxer_options = {"movflags": rng.choice(("frag_keyframe+empty_moov", "faststart", "negative_cts_offsets"))}
    if extension in ("mkv", "webm") and rng.random() < 0.3:
        muxer_options = {"live": "1"}
    times = None
    if change == "uneven":
        times = np.cumsum([rng.choice((1, 1, 1, 2, 7)) for _ in range(count)]).tolist()
    text = f"{number} {encoder} {extension} {change} {width}x{height} {pixel_format} {count} {options} {muxer_options}"
    path = folder / f"{number}.{extension}"

    def write(target: Path, seed: int, frames: int = count) -> Path:
        return write_video(
            target,
            pictures(frames, width, height, seed),
            fps=fps,
            codec=encoder,
            options=options | {"strict": "-2"},
            muxer=MUXERS.get(extension, extension),
            muxer_options=muxer_options,
            pixel_format=pixel_format,
            times=times,
        )

    try:
        if change in ("none", "uneven"):
            write(path, number)
        elif change == "rotated":
            write(path, number)
            if extension in ("mp4", "mov", "3gp"):
                set_matrix(path, *ROTATIONS[rng.choice((90, 180, 270))], width, height)
        elif change == "joined":
            first = write(folder / f"first.{extension}", number)
            second = (
                first if rng.random() < 0.5 else write(folder / f"second.{extension}", number + 1, rng.choice((7, 20)))
            )
            path.write_bytes(first.read_bytes() + second.read_bytes())
            text += f" same={first == second}"
        else:
            whole = write(folder / f"whole.{extension}", number)
            target = extension
            if change == "moved":
                target = rng.choice(("mp4", "mkv", "ts", "flv", "avi", "mov", "webm", "mpg"))
                path = path.with_suffix(f".{target}")
            skipped = rng.randrange(1, count) if change == "cut" else 0
            ended = rng.randrange(1, count) if change == "ended" or rng.random() < 0.2 else 0
            shift = rng.randrange(1, count) if change == "edit" else 0
            from_key = rng.random() < 0.7
            text += f" -> {target} skipped={skipped} from_key={from_key} ended={ended} shift={shift}"
            copy(whole, path, MUXERS.get(target, target), skipped=skipped, from_key=from_key, ended=ended, shift=shift)
    except (av.FFmpegError, ValueError, TypeError, IndexError, NotImplementedError, OverflowError, FileNotFoundError):
        return None
    finally:
        for name in ("first", "second", "whole"):
            (folder / f"{name}.{extension}").unlink(missing_ok=True)
    return (path, text) if _is_readable(path) else None


def copy(source: Path, target: Path, muxer: str, *, skipped: int, from_key: bool, ended: int, shift: int) -> None:
    """Copy packets as `ffmpeg -ss .. -i .. -c copy` does.

    Args:
        source, target: the files.
        muxer: name of a muxer of FFmpeg.
        skipped: packets at the start that are left out, or the packets before the next keyframe if `from_key`.
        from_key: start with a keyframe.
        ended: packets at the end that are left out.
        shift: packets that have a time before 0, which edit lists hide.
    """
    with (
        av.open(str(source)) as container,
        av.open(str(target), "w", format=muxer, container_options={"fflags": "+bitexact"}) as out,
    ):
        track = container.streams.video[0]
        stream = out.add_stream_from_template(track)
        packets = [packet for packet in container.demux(track) if packet.size]
        if skipped and from_key:
            keys = [number for number, packet in enumerate(packets) if packet.is_keyframe and number >= skipped // 2]
            skipped = keys[0] if keys else skipped
        kept = packets[skipped : len(packets) - ended if ended else None]
        start = 0
        start = 0
        if (skipped or shift) and kept:
            known = [packet.dts if packet.dts is not None else packet.pts for packet in kept]
            start = known[min(shift, len(known) - 1)] or 0
        for packet in kept:
            if packet.pts is not None:
                packet.pts -= start
            if packet.dts is not None:
                packet.dts -= start
            packet.stream = stream
            out.mux(packet)


def _is_readable(path: Path) -> bool:
    """Whether FFmpeg finds a video track and its decoder: some muxers write what no demuxer reads."""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.best("video")
            return stream is not None and stream.codec_context is not None and stream.codec_context.width > 0
    except (av.FFmpegError, FileNotFoundError):
        return False


def sequential(path: Path) -> list[Frame] | None:
    """Return all frames as PyAV decodes them from the start, as stored; None if it fails."""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.best("video")
            stream.codec_context.thread_count = 1
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    except (av.FFmpegError, ValueError, EOFError):
        return None


def selections(rng: random.Random, count: int) -> Iterable[list[int]]:
    """Yield indices to decode."""
    yield [rng.randrange(count)]
    yield [rng.randrange(count)]
    yield [rng.randrange(count * 3 // 4, count)]
    yield sorted({0, count // 2, count - 1})
    yield sorted(rng.sample(range(count), k=min(count, 4)))
    yield sorted(rng.choices(range(count), k=5))


def compare(path: Path, rng: random.Random) -> tuple[str, int, list[str]]:
    """Return the reason of a rejection or "", the number of compared selections, and what is wrong."""
    reference = MediaReference(path=str(path))
    try:
        info = read_video_info(reference)
    except RecordError as error:
        return error.detail.removeprefix(str(path)).strip(), 0, []
    expected = sequential(path)
    if expected is None:
        return "", 0, ["accepted, and cannot be decoded"]
    if len(expected) != info.num_frames:
        return "", 0, [f"has {info.num_frames} frames, {len(expected)} decoded (counted by decoding: {info.decoded})"]
    done, wrong, orientation = 0, [], video_file._first_orientation(reference)
    # A frame with the time of the frame before it is not selected: `VisionFamily.select_frames` rejects the video.
    is_found = np.append(True, np.diff(info.timestamps) > 0)
    for chosen in selections(rng, info.num_frames):
        if not (indices := [index for index in chosen if is_found[index]]):
            continue
        done += 1
        selection = FrameSelection(
            indices=tuple(indices),
            timestamps=tuple(float(info.timestamps[index]) for index in indices),
            **{name: getattr(info, name) for name in ("fps", "num_frames", "height", "width")},
        )
        try:
            frames = list(decode_frames(reference, selection))
        except RecordError as error:
            wrong.append(f"{indices} refused: {error.detail.removeprefix(str(path)).strip()}")
            continue
        bad = [
            index
            for index, frame in zip(indices, frames, strict=True)
            if not np.array_equal(frame, orientation.apply(expected[index]))
        ]
        if bad:
            wrong.append(f"{indices}: other pixels at {bad}")
    return "", done, wrong
