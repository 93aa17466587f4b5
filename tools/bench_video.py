"""Benchmark reading of video files: lengths without decoding, and decoding of selected frames.

    python tools/bench_video.py [--seconds N] [--json video.json]

`read_video_info` is compared with demultiplexing of the same files by PyAV alone; `decode_frames` with the fastest of
three ways to get the same frames from PyAV alone, which are one thread from the start, one thread with a seek for each
frame, and all cores. CPU time and memory are compared with code that decodes whole videos:

    LLaMA-Factory   `_regularize_videos` of data/mm_plugin.py: decodes all frames with PyAV, keeps the sampled frames
    qwen_vl_utils   `_read_video_torchvision`, of ms-swift too: decodes all frames to RGB, stacks them, and samples

Their reading is repeated here with PyAV, which torchvision uses as well, so that resizing and other steps are not
measured. Frames are sampled at 2 per second, as Qwen2.5-VL does, or uniformly. All results have the same pixels.
Ratios are of CPU time, the least of several runs; wall times are in the JSON.
"""

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from benchlib import Report, arguments
from PIL import Image

from energon_packed import MediaReference
from energon_packed.demo.videos import write_video
from energon_packed.encoding.vision.video_file import VideoInfo, decode_frames, read_video_info
from energon_packed.records.media.video import FrameSelection

_FILES: dict[str, dict[str, Any]] = {  # name -> size and settings of the encoder
    "720p.mp4": {"size": (1280, 720), "options": {"preset": "veryfast", "bf": "3"}},
    "360p.mp4": {"size": (640, 360), "options": {"preset": "veryfast", "bf": "3"}, "audio": True},
    "360p-short-gop.mkv": {"size": (640, 360), "options": {"preset": "veryfast", "bf": "3", "g": "30"}},
    "360p.webm": {"size": (640, 360), "codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime"}},
    "360p.ts": {"size": (640, 360), "options": {"preset": "veryfast", "bf": "3"}},
    "480p-mpeg4.avi": {"size": (640, 480), "codec": "mpeg4", "options": {"g": "60", "b": "1500k"}},
}
_FPS = 30
_RUNS = 5

Pixels = list[np.ndarray[Any, Any]]


def scenes(count: int, width: int, height: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a picture that moves, with noise, for files of a realistic size."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 255, (height // 16, width // 16 + 40, 3), dtype=np.uint8))
    picture = np.asarray(coarse.resize((width + 640, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = rng.normal(0, 5, (height, width, 3)).astype(np.int16)
    for number in range(count):
        left = number * 3 % 640
        frame = picture[:, left : left + width] + np.roll(grain, number * 7, axis=1)
        yield frame.clip(0, 255).astype(np.uint8)


def write_files(folder: Path, seconds: int) -> list[Path]:
    """Write the files that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, settings in _FILES.items():
        path = folder / f"{seconds}s-{name}"
        if not path.exists():
            options = {key: value for key, value in settings.items() if key != "size"}
            temporary = path.with_name(f"part-{path.name}")
            write_video(temporary, scenes(seconds * _FPS, *settings["size"]), fps=_FPS, **options)
            temporary.rename(path)
        paths.append(path)
    return paths


def cost(function: Callable[[], object]) -> tuple[float, float]:
    """Return the least (wall seconds, CPU seconds) of several runs."""
    costs = []
    for _ in range(_RUNS):
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        costs.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in costs), min(cpu for _, cpu in costs)


def memory(function: Callable[[], object]) -> float:
    """Return the MiB by which a new process grows."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_growth, (function,)) / 1024


def _growth(function: Callable[[], object]) -> int:
    before = _peak()
    function()
    return _peak() - before


def _peak() -> int:
    """Return the KiB of the largest resident set of this process, without the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


def demultiplex(path: Path) -> list[int | None]:
    """Read the packets with PyAV alone."""
    with av.open(str(path)) as container:
        return [packet.pts for packet in container.demux(container.streams.video[0])]


def from_the_start(path: Path, selection: FrameSelection, *, threads: int = 1) -> Pixels:
    """Decode up to the last selected frame; 0 threads are one for each core."""
    wanted, pixels = set(selection.indices), []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = threads
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                pixels.append(frame.to_ndarray(format="rgb24"))
            if number == selection.indices[-1]:
                break
    return pixels


def with_seeks(path: Path, selection: FrameSelection) -> Pixels:
    """Seek to the keyframe before each selected frame."""
    pixels = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        first = next(container.decode(stream)).pts
        for seconds in selection.timestamps:
            target = first + round(seconds / stream.time_base)
            container.seek(target, stream=stream)
            for frame in container.decode(stream):
                if frame.pts >= target:
                    pixels.append(frame.to_ndarray(format="rgb24"))
                    break
    return pixels


def as_llama_factory(path: Path, selection: FrameSelection) -> list[Image.Image]:
    """Decode all frames, and convert the selected frames."""
    images = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        container.seek(0)
        for number, frame in enumerate(container.decode(stream)):
            if number in selection.indices:
                images.append(frame.to_image())
    return images


def as_qwen_vl_utils(path: Path, selection: FrameSelection) -> np.ndarray[Any, Any]:
    """Decode and convert all frames, and select afterwards."""
    with av.open(str(path)) as container:
        video = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    return video[list(selection.indices)]


def select(info: VideoInfo, count: int) -> FrameSelection:
    """Select frames at equal distances."""
    indices = np.linspace(0, info.num_frames - 1, count).round().astype(int).tolist()
    return FrameSelection(
        indices=tuple(indices),
        timestamps=tuple(info.timestamps[indices].tolist()),
        fps=info.fps,
        num_frames=info.num_frames,
        height=info.height,
        width=info.width,
    )


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, "video")
    parser.add_argument("--seconds", type=int, default=20, help="length of the videos")
    options = parser.parse_args()
    report = Report("Video files", options.json)
    totals: Counter[Any] = Counter()
    for path in write_files(options.work / "videos", options.seconds):
        totals += bench_file(report, path, options.seconds)
    report.add("all files: read_video_info / demux", totals["info"] / totals["demux"], "x", "<= 1.3")
    report.add("all files: decode_frames / fastest PyAV", totals["ours"] / totals["plain"], "x", "<= 1.2")
    for name in ("LLaMA-Factory", "qwen_vl_utils"):
        report.add(f"2 frames per second: {name} / decode_frames", totals[name] / totals["sampled"], "x")
    report.finish()


def bench_file(report: Report, path: Path, seconds: int) -> Counter[Any]:
    """Measure one file, and return CPU seconds."""
    reference = MediaReference(path=str(path))
    info = read_video_info(reference)
    assert info.num_frames == seconds * _FPS
    totals: Counter[Any] = Counter(demux=cost(lambda: demultiplex(path))[1])
    totals["info"] = cost(lambda: read_video_info(reference))[1]
    ratio = totals["info"] / totals["demux"]
    report.add(f"{path.name}: read_video_info / demux", ratio, "x", "<= 1.3", seconds=totals["info"])
    for name, count in (("2 frames per second", 2 * seconds), ("16 frames", 16), ("4 frames", 4)):
        selection = select(info, count)
        decode = partial(as_energon_packed, reference, selection)
        ways: dict[str, Callable[[], Pixels]] = {
            "one thread": partial(from_the_start, path, selection),
            "seeks": partial(with_seeks, path, selection),
            "all cores": partial(from_the_start, path, selection, threads=0),
        }
        pixels = decode()
        # A plain seek returns other frames of some containers; such a way is not compared.
        costs = {way: cost(run) for way, run in ways.items() if all(map(np.array_equal, pixels, run()))}
        assert {"one thread", "all cores"} <= set(costs), path
        ours, fastest = cost(decode), min(cpu for _, cpu in costs.values())
        walls = {way: ours[0] / wall for way, (wall, _) in costs.items()}
        report.add(f"{path.name}: {name} / fastest PyAV", ours[1] / fastest, "x", "<= 1.2", cpu=ours[1], wall=walls)
        totals.update(ours=ours[1], plain=fastest)
        if count == 2 * seconds:
            others = {"LLaMA-Factory": as_llama_factory, "qwen_vl_utils": as_qwen_vl_utils}
            totals.update(sampled=ours[1])
            totals.update({key: cost(partial(way, path, selection))[1] for key, way in others.items()})
            if path.name.endswith("720p.mp4"):
                report.add("peak memory, one at a time", memory(partial(one_at_a_time, reference, selection)), "MiB")
                report.add("peak memory, all selected frames", memory(decode), "MiB")
                for key, way in others.items():
                    report.add(f"peak memory, as {key}", memory(partial(way, path, selection)), "MiB")
    return totals


def as_energon_packed(reference: MediaReference, selection: FrameSelection) -> Pixels:
    """Decode the selected frames with `decode_frames`."""
    return list(decode_frames(reference, selection))


def one_at_a_time(reference: MediaReference, selection: FrameSelection) -> int:
    """Decode the selected frames, and keep none of them."""
    return sum(1 for _ in decode_frames(reference, selection))


if __name__ == "__main__":
    sys.exit(main())
