"""Frames and times of video files: counted from the packets, equal to all frames that PyAV decodes from the start."""

import json
import os
import pickle
import random
import re
import socket
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import read_video_pyav

from energon_packed import ConfigError, FrameSelection, MediaReference, RecordError, ResourceError
from tests.internals import ImageRoot, av_file, call_in_child, check_video, decode_frames, read_video_info, video_file
from tests.processes import run_python
from tests.storage import Store
from tests.video_corpus import MUXERS, pictures
from tests.videos import (
    COMBINATIONS,
    Frame,
    Packet,
    damaged_videos,
    decoded,
    endless,
    make_video,
    number_of,
    numbered,
    remux,
    rewrite,
    set_matrix,
    write_video,
)

FUZZ = int(os.environ.get("ENERGON_PACKED_FUZZ", "200"))  # damaged files; `make hard` sets more
UNEVEN = [0, 1, 2, 5, 6, 9, 10, 11, 12, 20, *range(21, 41)]  # times of frames
DECODED_TIMES = {"avi", "mpg", "wmv"}  # containers without times of presentation


def at(path: Path) -> MediaReference:
    return MediaReference(path=str(path))


def select(info: Any, indices: list[int]) -> FrameSelection:
    return FrameSelection(
        indices=tuple(indices),
        timestamps=tuple(float(info.timestamps[index]) for index in indices),
        fps=info.fps,
        num_frames=info.num_frames,
        height=info.height,
        width=info.width,
    )


def choices(count: int, seed: int) -> list[list[int]]:
    """Indices of frames to decode: one, few, repeated, all."""
    rng = random.Random(seed)
    chosen = [[rng.randrange(count)], [0, count - 1], sorted(rng.choices(range(count), k=6)), list(range(count))]
    return [*chosen, sorted(rng.sample(range(count), k=min(count, 3)))]


def check_equal(path: Path, *, times: bool = True, upright: Callable[[Frame], Frame] = lambda frame: frame) -> Any:
    """Compare number, times and pixels of frames with a decoder that starts at the first packet."""
    expected = [(time, upright(frame)) for time, frame in decoded(path)]
    info = read_video_info(at(path))
    assert info.num_frames == len(expected) == len(info.timestamps)
    assert info.timestamps.dtype == np.float64
    assert (info.height, info.width) == expected[0][1].shape[:2]
    first = expected[0][0] or 0.0
    if times:
        np.testing.assert_allclose(info.timestamps, [(time or 0.0) - first for time, _ in expected], atol=1e-9)
    for indices in choices(info.num_frames, len(path.name)):
        frames = list(decode_frames(at(path), select(info, indices)))
        assert len(frames) == len(indices)
        for frame, index in zip(frames, indices, strict=True):
            np.testing.assert_array_equal(frame, expected[index][1])
    assert check_video(at(path)).num_frames == info.num_frames
    return info


@pytest.mark.parametrize(("codec", "extension"), COMBINATIONS)
def test_frames_of_all_containers_and_codecs(codec: str, extension: str, tmp_path: Path) -> None:
    path = make_video(tmp_path / f"a.{extension}", codec=codec)
    # FFmpeg's H.264 decoder returns the frames of an AVI in order, with times that are not.
    info = check_equal(path, times=(codec, extension) != ("libx264", "avi"))
    np.testing.assert_allclose(info.timestamps, np.arange(30) / 30, atol=0.0006)  # mkv has milliseconds
    assert [number_of(frame) for frame in decode_frames(at(path), select(info, [3, 17, 29]))] == [3, 17, 29]
    # AVI stores no times of presentation: frames that are reordered are counted by decoding.
    assert info.decoded == (extension == "avi" and codec in ("libx264", "mpeg4", "mpeg2video"))
    assert (info.fps, info.has_audio) == (30, False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fragmented.mp4", {"fragmented": True, "audio": True}),
        ("streamed.mkv", {"streamed": True, "audio": True}),
        ("streamed.webm", {"streamed": True, "codec": "libvpx-vp9"}),
        ("uneven.mp4", {"times": UNEVEN}),
        ("uneven.mkv", {"times": UNEVEN}),
        ("uneven.ts", {"times": UNEVEN}),
        ("uneven.avi", {"times": UNEVEN, "codec": "mpeg4", "b_frames": 0}),
        ("growing.mp4", {"times": [i * i for i in range(30)], "fps": 1000}),
        ("ntsc.mov", {"fps": Fraction(30000, 1001)}),
        ("one.mp4", {"frames": 1}),
        ("odd-sides.mp4", {"width": 66, "height": 50, "codec": "mpeg4"}),
        ("one-keyframe.mp4", {"gop": 1000, "frames": 60}),
        ("interlaced.ts", {"options": {"flags": "+ildct+ilme", "x264-params": "tff=1"}}),
        ("interlaced-mpeg2.ts", {"codec": "mpeg2video", "options": {"flags": "+ildct+ilme"}}),
        ("refreshed.ts", {"options": {"x264-params": "intra-refresh=1:keyint=10"}}),
        ("refreshed.mkv", {"options": {"x264-params": "intra-refresh=1:keyint=10"}}),
        ("open-gop.mp4", {"gop": 8, "options": {"x264-params": "open-gop=1:bframes=3", "flags": "-cgop"}}),
        ("open-gop.ts", {"gop": 8, "options": {"x264-params": "open-gop=1:bframes=3", "flags": "-cgop"}}),
        ("pyramid.mkv", {"options": {"x264-params": "b-pyramid=normal:bframes=6:b-adapt=0"}, "frames": 60}),
        ("open-gop.mkv", {"codec": "libx265", "options": {"x265-params": "log-level=none:open-gop=1:keyint=8"}}),
        ("a.mpg", {"codec": "mpeg2video", "fps": 25}),
        ("a.wmv", {"codec": "wmv2"}),
        ("divx.avi", {"codec": "msmpeg4"}),
        ("a.flv", {"codec": "flv"}),
    ],
)
def test_frames_of_unusual_files(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    info = check_equal(make_video(tmp_path / name, **options))
    # Fields cannot be counted as packets, nor frames that are reordered and have no times of presentation.
    assert info.decoded == (name.startswith("interlaced") or name == "a.mpg")
    assert info.has_audio == bool(options.get("audio"))


@pytest.mark.parametrize(("extension", "fps"), [("avi", 30), ("mpg", 25), ("wmv", 25)])
def test_times_of_containers_that_store_none(extension: str, fps: int, tmp_path: Path) -> None:
    """Frames are reordered, and their time is that of the packet that a decoder returns them for."""
    info = check_equal(make_video(tmp_path / f"a.{extension}", fps=fps), times=False)
    np.testing.assert_allclose(info.timestamps, np.arange(30) / fps, atol=0.0006)


@pytest.mark.parametrize("options", [{}, {"duration": 70, "loop": 0}, {"duration": [20, 50, 100] * 4, "loop": 3}])
def test_frames_of_gif(options: dict[str, Any], tmp_path: Path) -> None:
    first, *others = [Image.fromarray(numbered(number)) for number in range(12)]
    first.save(tmp_path / "a.gif", save_all=True, append_images=others, **{"duration": 40} | options)
    info = check_equal(tmp_path / "a.gif")
    assert (info.num_frames, info.container, info.codec, info.decoded) == (12, "gif", "gif", False)


@pytest.mark.parametrize("disposal", [0, 1, 2, 3])
def test_frames_of_gif_that_change_a_part_of_the_last(disposal: int, tmp_path: Path) -> None:
    drawn = np.zeros((8, 48, 64, 4), dtype=np.uint8)  # transparent
    for number in range(8):
        drawn[number, 5:20, 4 * number : 4 * number + 12] = (200, 20 * number, 90, 255)
    first, *others = [Image.fromarray(picture) for picture in drawn]
    first.save(tmp_path / "a.gif", save_all=True, append_images=others, disposal=disposal, duration=70)
    info = check_equal(tmp_path / "a.gif")
    [last] = decode_frames(at(tmp_path / "a.gif"), select(info, [7]))
    assert last[10, 35].tolist() == [200, 140, 90]
    assert last[40, 60].tolist() == [255, 255, 255]  # transparent pixels are white


def test_gaps_of_reordered_frames_in_avi(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.avi", times=UNEVEN)
    info = check_equal(path, times=False)
    with av.open(str(path)) as container:
        stored = [packet.dts for packet in container.demux(video=0) if packet.size]
    np.testing.assert_allclose(info.timestamps * 30, stored, atol=0.01)


def test_hidden_and_repeated_frames_are_counted_as_shown(tmp_path: Path) -> None:
    def hide(packets: list[Packet]) -> Iterator[Packet]:  # show_frame of RFC 6386, 9.1
        for number, (time, data, is_key) in enumerate(packets):
            yield time, bytes([data[0] & ~16]) + data[1:] if number in (3, 7, 20) else data, is_key

    def show_again(packets: list[Packet]) -> Iterator[Packet]:  # show_existing_frame of the VP9 specification, 6.2
        for number, packet in enumerate(packets):
            yield packet
            if number in (3, 7):
                yield packet[0] + 10, b"\x88", False

    def join(packets: list[Packet]) -> Iterator[Packet]:  # superframe of its Annex B
        for (time, data, is_key), (_, other, _) in zip(packets[::2], packets[1::2], strict=True):
            marker = bytes([0b11001001])
            sizes = b"".join(len(part).to_bytes(2, "little") for part in (data, other))
            yield time, data + other + marker + sizes + marker, is_key

    vp8 = make_video(tmp_path / "vp8.webm", codec="libvpx", gop=60)
    vp9 = make_video(tmp_path / "vp9.webm", codec="libvpx-vp9", gop=60)
    assert check_equal(rewrite(vp8, tmp_path / "hidden.webm", hide)).num_frames == 27
    assert check_equal(rewrite(vp9, tmp_path / "again.webm", show_again)).num_frames == 32
    joined = rewrite(vp9, tmp_path / "joined.webm", join)
    assert read_video_info(at(joined)).num_frames == check_video(at(joined)).num_frames == len(decoded(joined)) == 30


def test_frames_that_cannot_be_decoded_are_not_counted(tmp_path: Path) -> None:
    """An edit list hides frames; files that were cut start between keyframes, or with frames that need others."""
    path = make_video(tmp_path / "a.mp4", frames=40)
    edited = remux(path, tmp_path / "edited.mp4", shift=15, options={"avoid_negative_ts": "disabled"})
    assert check_equal(edited).num_frames == 25
    for extension in ("mp4", "mkv", "ts"):
        info = check_equal(remux(path, tmp_path / f"cut.{extension}", skipped=5))
        assert (info.num_frames, info.decoded) == (28, True)
    options = {"x265-params": "log-level=none:open-gop=1:keyint=8:bframes=3:scenecut=0"}
    path = make_video(tmp_path / "open.mp4", codec="libx265", frames=40, options=options)
    cut = check_equal(remux(path, tmp_path / "open.mkv", skipped=7))
    assert cut.decoded
    assert cut.num_frames < 33


@pytest.mark.parametrize("extension", ["mp4", "ts", "flv", "mkv"])
def test_decoding_starts_where_frames_are_complete(
    extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery points, at which an image is refreshed over several frames, are keyframes of FFmpeg, too."""
    monkeypatch.setattr(video_file, "_WORTH_A_SEEK", 0)
    options = {"preset": "medium", "x264-params": "intra-refresh=1:keyint=30"}
    path = write_video(
        tmp_path / f"a.{extension}", pictures(90, 64, 48, 1), options=options, muxer=MUXERS.get(extension)
    )
    info, expected = read_video_info(at(path)), [frame for _, frame in decoded(path)]
    for index in range(1, 90):
        for frame, wanted in zip(decode_frames(at(path), select(info, [0, index])), (0, index), strict=True):
            np.testing.assert_array_equal(frame, expected[wanted])


@pytest.mark.parametrize("name", ["h264.mp4", "h264.ts", "hevc.mkv", "mpeg2.ts"])
def test_decoding_starts_at_open_groups_of_pictures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that are shown before a keyframe and follow it in the file need the frames before it."""
    codec, options = {
        "h264": ("libx264", {"x264-params": "open-gop=1:bframes=3:b-adapt=0:keyint=8:scenecut=0", "preset": "medium"}),
        "hevc": ("libx265", {"x265-params": "log-level=none:open-gop=1:keyint=8:bframes=3:scenecut=0:pools=none"}),
        "mpeg2": ("mpeg2video", {"g": "8", "bf": "2"}),
    }[name.partition(".")[0]]
    path = write_video(
        tmp_path / name, pictures(80, 64, 48, 1), codec=codec, options=options, muxer=MUXERS.get(path_suffix(name))
    )
    info, expected = read_video_info(at(path)), [frame for _, frame in decoded(path)]
    sizes = decoded_packets(monkeypatch)
    for index in range(60, 72):
        [frame] = decode_frames(at(path), select(info, [index]))
        np.testing.assert_array_equal(frame, expected[index])
    assert len(sizes) < 12 * 30  # all have 60


def path_suffix(name: str) -> str:
    return name.rpartition(".")[2]


def test_parameters_that_change_are_not_passed(tmp_path: Path) -> None:
    """The second half has other parameters, which are stored at its first keyframe alone."""

    def without_parameters(packets: list[Packet]) -> Iterator[Packet]:
        for number, (time, data, is_key) in enumerate(packets):
            if is_key and number > 40:
                units = re.split(b"\0\0\0?\1", data)
                data = b"".join(b"\0\0\0\1" + unit for unit in units if unit and unit[0] & 31 not in (7, 8))
            yield time, data, is_key

    options = {"g": "10", "bf": "0", "preset": "medium", "x264-params": "scenecut=0:ref=3:repeat-headers=1"}
    first = write_video(tmp_path / "first.ts", pictures(40, 64, 48, 1), options=options, muxer="mpegts")
    options["x264-params"] = "scenecut=0:ref=1:cabac=0:qp=30:repeat-headers=1:deblock=3,3"
    second = write_video(tmp_path / "second.ts", pictures(40, 64, 48, 2), options=options, muxer="mpegts")
    later = [(time + 40 * 3000, *rest) for time, *rest in packets_of(second)]
    path = rewrite(first, tmp_path / "a.mkv", lambda packets: without_parameters([*packets, *later]), muxer="matroska")
    info, expected = read_video_info(at(path)), [frame for _, frame in decoded(path)]
    assert info.num_frames == 80
    for index in (5, 35, 45, 55, 75):
        [frame] = decode_frames(at(path), select(info, [index]))
        np.testing.assert_array_equal(frame, expected[index])


def packets_of(path: Path) -> list[Packet]:
    with av.open(str(path)) as container:
        return [
            (packet.pts or 0, bytes(packet), packet.is_keyframe) for packet in container.demux(video=0) if packet.size
        ]


@pytest.mark.parametrize("extension", ["ts", "mkv", "webm", "mpg"])
@pytest.mark.parametrize("b_frames", [0, 2])
def test_joined_files_have_all_frames(extension: str, b_frames: int, tmp_path: Path) -> None:
    """`cat a b` has the times of a, and then the times of b."""
    codec = {"webm": "libvpx-vp9", "mpg": "mpeg2video"}.get(extension, "libx264")
    halves = [
        make_video(tmp_path / f"{count}.{extension}", frames=count, codec=codec, b_frames=b_frames, fps=25)
        for count in (30, 17)
    ]
    path = tmp_path / f"a.{extension}"
    path.write_bytes(b"".join(half.read_bytes() for half in halves))
    info = check_equal(path, times=False)
    assert (info.num_frames, info.decoded) == (47, True)
    np.testing.assert_allclose(info.timestamps, np.arange(47) / 25, atol=0.002)
    numbers = [number_of(frame) for frame in decode_frames(at(path), select(info, list(range(47))))]
    assert numbers == [*range(30), *range(17)]


def test_joined_files_that_cannot_be_decoded_are_rejected(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", fragmented=True, codec="mjpeg")
    path.write_bytes(path.read_bytes() * 2)
    assert "has a frame at 0.033 s after a frame at" in why(lambda: read_video_info(at(path)))


@pytest.mark.parametrize("name", ["half.mp4", "all.mkv"])
def test_times_of_decoding_are_not_those_of_presentation(name: str, tmp_path: Path) -> None:
    """A stream copy of avi or mpg has times of decoding as times of presentation, of all frames or most."""
    source = make_video(tmp_path / "a.avi", frames=40)
    if name == "half.mp4":

        def late(packets: list[Packet]) -> Iterator[Packet]:
            for number, (time, data, is_key) in enumerate(packets):
                yield time + 2 * (number in (13, 17)), data, is_key

        path = rewrite(make_video(tmp_path / "b.mp4", frames=40), tmp_path / name, late, by_decoding=True)
    else:
        path = remux(source, tmp_path / name)
    assert "s after a frame at" in why(lambda: read_video_info(at(path)))


def test_frames_before_the_first_keyframe_are_not_counted(tmp_path: Path) -> None:
    """After `-ss 1 -c copy`, two B-frames of an open group need a frame that is missing, and have no time or that of
    the keyframe."""
    path = make_video(tmp_path / "a.mkv", codec="mpeg2video", frames=60)
    with av.open(str(path)) as container:
        keys = [number for number, packet in enumerate(container.demux(video=0)) if packet.is_keyframe]
    cut = remux(path, tmp_path / "cut.mkv", skipped=keys[1], by_decoding={1, 2})
    info = check_equal(cut)
    assert info.decoded
    assert info.num_frames == 60 - keys[1] - 2


def test_ogv(tmp_path: Path) -> None:
    """FFmpeg's theora.ogv is of libtheora, which PyAV does not have."""
    info = check_equal(Path(__file__).parent / "theora.ogv")
    assert (info.num_frames, info.fps, info.container, info.codec, info.decoded) == (12, 10, "ogg", "theora", True)
    path = write_video(tmp_path / "a.ogv", pictures(30, 64, 48, 1), codec="libvpx", options={"g": "10"}, muxer="ogg")
    assert not check_equal(path).decoded
    data = path.read_bytes()
    for place in range(len(data) // 2, len(data), len(data) // 10):
        path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        assert why(lambda: read_video_info(at(path))).endswith("has damaged data; copy it again")


def test_a_full_check_finds_frames_that_differ_after_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"preset": "medium", "x264-params": "intra-refresh=1:keyint=30"}
    path = write_video(tmp_path / "a.mp4", pictures(90, 64, 48, 1), options=options)
    info = read_video_info(at(path))
    every = [select(info, [0, index]) for index in range(1, 90)]
    for frames in every:
        check_video(at(path), frames)
    monkeypatch.setattr(video_file.Starts, "is_start", lambda self, packet: packet.is_keyframe)
    found = 0
    for frames in every:
        try:
            check_video(at(path), frames)
        except RecordError as error:
            assert f"has a frame {frames.indices[1]} that differs if decoding starts at a keyframe" in error.detail
            found += 1
    assert found >= 5


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_frames_are_upright(degrees: int, tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", rotation=degrees)
    for name in ("a.mp4", "a.mkv", "fragmented.mp4"):
        if name != path.name:
            remux(path, tmp_path / name, options={"movflags": "frag_keyframe+empty_moov"} if "mp4" in name else {})
        info = check_equal(tmp_path / name, upright=lambda frame: np.rot90(frame, -degrees // 90))
        assert (info.height, info.width) == (48, 64)
        assert [number_of(frame) for frame in decode_frames(at(tmp_path / name), select(info, [0, 21]))] == [0, 21]


MATRICES = {  # a, b, c, d -> what FFmpeg's `autorotate` does
    "mirrored": ((-1, 0, 0, 1), np.fliplr),
    "upside down": ((1, 0, 0, -1), np.flipud),
    "transposed": ((0, 1, 1, 0), lambda frame: frame.transpose(1, 0, 2)),
    "transverse": ((0, -1, -1, 0), lambda frame: np.rot90(frame, 2).transpose(1, 0, 2)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_mirrored_frames(name: str, tmp_path: Path) -> None:
    matrix, upright = MATRICES[name]
    path = make_video(tmp_path / "a.mp4", frames=3)
    set_matrix(path, *matrix, width=64, height=48)
    check_equal(path, upright=upright)


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.mp4", {}), ("ntsc.mov", {"fps": Fraction(30000, 1001)}), ("uneven.mp4", {"times": UNEVEN})],
)
def test_metadata_and_pixels_equal_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_video(tmp_path / name, **options)
    video, metadata = read_video_pyav(str(path), lambda **_: [0, 7, 29])
    info = read_video_info(at(path))
    assert (info.num_frames, info.fps, info.height, info.width) == (
        *(metadata.total_num_frames, metadata.fps),
        *(metadata.height, metadata.width),
    )
    np.testing.assert_array_equal(list(decode_frames(at(path), select(info, [0, 7, 29]))), video)


def test_cover_images_and_other_tracks_are_not_the_video(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as out:
        cover: Any = out.add_stream("mjpeg", 1)
        cover.width, cover.height, cover.pix_fmt = 640, 480, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        tracks: list[Any] = [out.add_stream("mpeg4", 30) for _ in range(2)]
        for track, width in zip(tracks, (64, 32), strict=True):
            track.width, track.height, track.pix_fmt = width, 48, "yuv420p"
        tracks[0].disposition = 0
        tracks[1].disposition = av.stream.Disposition.default
        for number in range(10):
            for track in tracks:
                frame = av.VideoFrame.from_ndarray(numbered(number, track.width, 48), format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 30)
                out.mux(track.encode(frame))
        for track in tracks:
            out.mux(track.encode())
        picture = av.VideoFrame.from_ndarray(np.zeros((480, 640, 3), dtype=np.uint8), format="rgb24")
        picture.pts = 0
        out.mux(cover.encode(picture))
        out.mux(cover.encode())
    with av.open(str(path)) as container:
        best = container.streams.best("video")
        assert len(container.streams.video) == 3
    assert best is not None
    info = read_video_info(at(path))
    assert (info.num_frames, info.width, info.height) == (10, best.width, 48)
    assert [number_of(frame) for frame in decode_frames(at(path), select(info, [2, 9]))] == [2, 9]


def test_references(tmp_path: Path, store: Store) -> None:
    """Files, members of tars, bytes and objects have the same frames."""
    path = make_video(tmp_path / "a.mp4", audio=True)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(path, "first.bin")
        tar.add(path, "a.mp4")
    with tarfile.open(tmp_path / "a.tar") as tar:
        offset = tar.getmember("a.mp4").offset_data
    size = path.stat().st_size
    store.put("videos/a.mp4", path.read_bytes())
    root = store.url("videos")
    info = read_video_info(at(path))
    expected = list(decode_frames(at(path), select(info, [0, 20, 20, 29])))
    for reference in (
        MediaReference(path="a.mp4", root=str(tmp_path)),
        MediaReference(path=str(tmp_path / "a.tar"), offset=offset, size=size),
        MediaReference(data=path.read_bytes()),
        MediaReference(path="a.mp4", root=root),
        MediaReference(path=f"{root}/a.mp4"),
    ):
        again = read_video_info(reference)
        assert (again.num_frames, again.num_bytes) == (30, size)
        np.testing.assert_array_equal(list(decode_frames(reference, select(again, [0, 20, 20, 29]))), expected)


def test_a_large_object_is_read_in_few_requests(tmp_path: Path, store: Store) -> None:
    path = write_video(tmp_path / "a.mp4", noise(80, 320, 240), codec="mjpeg", options={"q:v": "2"})
    store.put("large/a.mp4", path.read_bytes())
    reference = MediaReference(path=store.url("large/a.mp4"))
    with store.counted() as traffic:
        info = read_video_info(reference)
    megabytes = info.num_bytes / (1 << 20)
    assert megabytes > 1
    assert traffic.count("GET") <= 6 + 2 * megabytes


def noise(count: int, width: int, height: int) -> Iterator[Frame]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def decoded_packets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the packets that are decoded from now on."""
    sizes: list[int] = []
    decode = video_file._Video.decode

    def counting(self: Any, packet: Any) -> list[Any]:
        sizes.append(0 if packet is None else packet.size)
        return decode(self, packet)

    monkeypatch.setattr(video_file._Video, "decode", counting)
    return sizes


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm", "a.ts", "fragmented.mp4", "mpeg4.avi"])
def test_only_groups_of_pictures_of_selected_frames_are_decoded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = {"a.webm": "libvpx-vp9", "mpeg4.avi": "mpeg4"}.get(name, "libx264")
    path = make_video(
        tmp_path / name, frames=240, gop=12, b_frames=0, codec=codec, fragmented=name.startswith("fragmented")
    )
    info = read_video_info(at(path))
    sizes = decoded_packets(monkeypatch)
    frames = list(decode_frames(at(path), select(info, [0, 121, 122, 239])))
    assert [number_of(frame) for frame in frames] == [0, 121, 122, 239]
    assert len(sizes) <= 24


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_bytes_between_distant_frames_are_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / name, noise(60, 320, 240), options={"g": "6", "crf": "10"})
    info = read_video_info(at(path))
    read = bytes_read(monkeypatch)
    expected = [frame for _, frame in decoded(path)]
    frames = list(decode_frames(at(path), select(info, [0, 59])))
    np.testing.assert_array_equal(frames, [expected[0], expected[59]])
    assert sum(read) < info.num_bytes / 2


def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes that FFmpeg reads from now on."""
    sizes: list[int] = []
    original = av_file.LimitedStream.read

    def counting(self: Any, size: int) -> bytes:
        data = original(self, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(av_file.LimitedStream, "read", counting)
    return sizes


@pytest.mark.parametrize(("codec", "extension"), [c for c in COMBINATIONS if c[1] in ("mp4", "mov", "mkv", "webm")])
def test_seeking_returns_the_same_frames(
    codec: str, extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_file, "_WORTH_A_SEEK", 0)
    path = make_video(tmp_path / f"a.{extension}", codec=codec, frames=60, times=[*range(0, 90, 3), *range(90, 120)])
    info = check_equal(path)
    sizes = decoded_packets(monkeypatch)
    assert len(list(decode_frames(at(path), select(info, list(range(60)))))) == 60
    assert len(sizes) <= 61  # a seek never returns to packets that were decoded


def test_memory_is_that_of_one_frame(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", [numbered(0, 1280, 720), numbered(1, 1280, 720)] * 30, codec="mpeg4")
    done = run_python(MEASURED, path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60 << 10, f"{done.stdout} KiB; all frames have 162 MiB"


MEASURED = """
import resource, sys
from tests.encoding.test_video_file import at, select
from tests.internals import check_video, decode_frames, read_video_info
reference = at(sys.argv[1])
read_video_info(reference)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
info = check_video(reference)
assert sum(1 for _ in decode_frames(reference, select(info, list(range(60))))) == 60
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


def test_forked_workers_decode(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mkv")
    info = read_video_info(at(path))
    selection = select(info, [0, 15, 29])
    frames = list(decode_frames(at(path), selection))
    assert call_in_child(decoded_numbers, at(path), selection, seconds=30) == [number_of(frame) for frame in frames]
    assert pickle.loads(pickle.dumps(info)).num_frames == 30


def decoded_numbers(reference: MediaReference, selection: FrameSelection) -> list[int]:
    return [number_of(frame) for frame in decode_frames(reference, selection)]


def why(function: Callable[[], object], reason: str = "corrupt_video") -> str:
    with pytest.raises(RecordError) as caught:
        function()
    assert caught.value.reason.value == reason
    assert "\n" not in caught.value.detail
    assert ";" in caught.value.detail
    return caught.value.detail


LINES = {
    "empty.mp4": "is empty, 0 bytes",
    "text.mp4": "is not a video of the formats mp4, mov, mkv",
    "zeros.avi": "is not a video of the formats",
    "header-only.mp4": "or its header is damaged",
    "no-index.mp4": "or its header is damaged",
    "truncated.mkv": "bytes; copy it again",
    "truncated-index.mp4": "bytes; copy it again",
    "wrong-bytes.mp4": "has damaged data",
    "endless.mp4": "declares 2,000,000,000 frames, more than the limit of 4,194,304",
    "bomb.mp4": "frames of more than 67,108,864 pixels",
    "only-audio.mp4": "has no video track",
    "no-frames.mkv": "bytes; copy it again",
}


def test_damaged_files_are_rejected_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = list(damaged_videos(tmp_path))
    assert {path.name for path in paths} == set(LINES)
    for path in paths:
        line = why(lambda path=path: check_video(at(path)))  # type: ignore[misc]
        assert line.startswith(str(path))
        assert LINES[path.name] in line
    assert capfd.readouterr() == ("", "")  # FFmpeg prints nothing


@pytest.mark.parametrize(("codec", "extension"), [("libx264", "mp4"), ("mpeg4", "avi"), ("mpeg2video", "ts")])
def test_frames_that_a_decoder_repairs_are_rejected(codec: str, extension: str, tmp_path: Path) -> None:
    """Decoders replace damaged parts by others, and mark the frame."""
    whole = make_video(tmp_path / f"whole.{extension}", codec=codec).read_bytes()
    path, repaired = tmp_path / f"a.{extension}", 0
    for place in range(len(whole) // 4, len(whole) * 3 // 4, 60):
        path.write_bytes(whole[:place] + bytes(10) + whole[place + 10 :])
        try:
            with av.open(str(path)) as container:
                is_repaired = any(frame.is_corrupt for frame in container.decode(video=0))
        except av.FFmpegError:
            continue
        if is_repaired:
            repaired += 1
            with pytest.raises(RecordError, match="has damaged data|bytes of it are missing"):
                info = read_video_info(at(path))
                list(decode_frames(at(path), select(info, list(range(info.num_frames)))))
            why(lambda: check_video(at(path)))
    assert repaired > 3


def test_missing_bytes_inside_a_frame_are_noticed(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.ts", noise(6, 64, 48), codec="mpeg2video").read_bytes()
    path = tmp_path / "a.ts"
    lines = set()
    for place in range(188 * 20, 188 * 30, 188):  # packets of ISO/IEC 13818-1
        path.write_bytes(whole[:place] + whole[place + 188 :])
        with av.open(str(path)) as container:
            if any(packet.is_corrupt for packet in container.demux(video=0)):
                lines.add(why(lambda: read_video_info(at(path))))
    assert lines
    assert all("bytes of it are missing; copy the file again" in line for line in lines)


def test_a_size_that_changes_is_rejected(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.avi", codec="mjpeg")
    small = contents(make_video(tmp_path / "small.avi", codec="mjpeg", width=32, height=32))
    changed = rewrite(path, tmp_path / "b.avi", lambda packets: [*packets[:9], (9, small[0], True), *packets[10:]])
    assert "has a frame of 32 x 32 pixels among 64 x 48" in why(lambda: check_video(at(changed)))


def test_images_and_other_formats_are_not_videos(tmp_path: Path) -> None:
    frames = [numbered(number) for number in range(3)]
    Image.fromarray(frames[0]).save(tmp_path / "a.png")
    write_video(tmp_path / "a.y4m", frames, muxer="yuv4mpegpipe", codec="rawvideo")
    for name in ("a.png", "a.y4m"):
        with av.open(str(tmp_path / name)) as container:
            assert container.streams.video
        assert "is not a video of the formats" in why(lambda name=name: read_video_info(at(tmp_path / name)))  # type: ignore[misc]


@pytest.mark.parametrize("extension", ["mp4", "mkv", "avi", "ts", "webm", "flv"])
def test_truncated_files_are_rejected(extension: str, tmp_path: Path) -> None:
    codec = "libvpx-vp9" if extension == "webm" else "libx264"
    whole = make_video(tmp_path / f"whole.{extension}", codec=codec).read_bytes()
    path = tmp_path / f"a.{extension}"
    counts = set()
    for size in range(len(whole) // 2, len(whole) - 200, 97):
        path.write_bytes(whole[:size])
        try:
            counts.add(check_video(at(path)).num_frames)
        except RecordError as error:
            assert str(path) in error.detail
    # The last bytes of a stream without a size (RFC 9559: unknown) cannot be missed.
    assert counts == set() if extension in ("mp4", "mkv", "avi", "webm") else counts < set(range(30))


def test_fast_start_files_are_rejected_if_truncated(tmp_path: Path) -> None:
    path = remux(make_video(tmp_path / "whole.mp4"), tmp_path / "a.mp4", options={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[:-50])
    assert f"{path} ends after" in why(lambda: read_video_info(at(path)))


def test_a_bomb_in_the_data_of_a_small_video(tmp_path: Path) -> None:
    """The header declares 64 x 48 pixels, and a picture of the track 4096 x 4096."""
    path = make_video(tmp_path / "a.avi", codec="mjpeg")
    large = write_video(tmp_path / "large.avi", [np.zeros((4096, 4096, 3), dtype=np.uint8)], codec="mjpeg")
    with_bomb = rewrite(path, tmp_path / "b.avi", lambda packets: [*packets[:9], (9, contents(large)[0], True)])
    info = read_video_info(at(with_bomb))
    assert info.num_frames == 10
    assert str(with_bomb) in why(lambda: list(decode_frames(at(with_bomb), select(info, [9]))))
    done = run_python(BOMBED, with_bomb)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20 << 10, f"{done.stdout} KiB; the picture has 48 MiB"


BOMBED = """
import resource, sys
from tests.encoding.test_video_file import at, why
from tests.internals import check_video, read_video_info
read_video_info(at(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
why(lambda: check_video(at(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


def contents(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def test_limits_of_frames_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video(tmp_path / "a.mkv", frames=60)
    monkeypatch.setattr(video_file, "MAX_VIDEO_FRAMES", 50)
    assert "has more than 50 frames; split it" in why(lambda: read_video_info(at(path)))
    monkeypatch.setattr(av_file, "MAX_FILE_BYTES", 1000)
    assert "more than the limit of 1,000; split it" in why(lambda: read_video_info(at(path)))


@pytest.mark.parametrize("num_frames", [8, 350])
def test_a_small_file_has_few_pixels(num_frames: int, tmp_path: Path) -> None:
    """A GIF of 8 KB, of which each frame changes a single pixel, has 23 gigapixels."""
    pixel = b"\x21\xf9\x04\0\x04\0\0\0\x2c\0\0\0\0\1\0\1\0\0\x02\x02\x44\1\0"
    side = (8192).to_bytes(2, "little")
    path = tmp_path / "a.gif"
    path.write_bytes(b"GIF89a" + side * 2 + b"\x80\0\0\0\0\0\xff\xff\xff" + num_frames * pixel + b";")
    info = why(lambda: read_video_info(at(path)))
    assert f"has {num_frames} frames of 8192 x 8192" in info
    assert f"more than the limit of {max(1 << 28, path.stat().st_size << 16):,} for a file of" in info
    frames = FrameSelection(indices=(7,), timestamps=(0.28,), fps=25, num_frames=8, height=8192, width=8192)
    with pytest.raises(RecordError, match="more than the limit of"):
        list(decode_frames(at(path), frames))


def test_a_sparse_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av_file, "_MOST_BETWEEN_PACKETS", 1 << 20)
    for extension in ("mkv", "ts"):
        path = make_video(tmp_path / f"a.{extension}", streamed=extension == "mkv")
        with path.open("r+b") as stream:
            stream.truncate(8 << 30)
        assert "without a frame; convert it" in why(lambda: read_video_info(at(path)))  # noqa: B023
        path.unlink()


def test_an_index_of_many_frames_needs_bounded_memory(tmp_path: Path) -> None:
    """The index of 60 million frames of a byte each would need 2 GiB."""
    path = endless(tmp_path / "a.mp4", 60_000_000)
    done = run_python(LIMITED, path)
    assert done.returncode == 0, done.stderr
    line, used = done.stdout.splitlines()
    assert str(path) in line
    assert int(used) < 700 << 10


LIMITED = """
import resource, sys
from energon_packed import MediaReference, RecordError
from tests.internals import read_video_info
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_video_info(MediaReference(path=sys.argv[1]))
except RecordError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


def test_too_little_memory_is_not_a_damaged_file(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", (numbered(n, 2048, 1536) for n in range(2)), codec="mpeg4")
    done = run_python(SHORT_OF_MEMORY, path)
    assert done.stdout == "ResourceError\n", done.stderr


SHORT_OF_MEMORY = """
import sys
from energon_packed import ResourceError
from tests.encoding.test_video_file import at, select
from tests.internals import decode_frames, memory_limit, read_video_info
info = read_video_info(at(sys.argv[1]))
with memory_limit(8 << 20):
    try:
        list(decode_frames(at(sys.argv[1]), select(info, [0, 1])))
    except ResourceError as error:
        print(type(error).__name__)
"""


def test_missing_files_and_files_outside_the_root(tmp_path: Path) -> None:
    make_video(tmp_path / "a.mp4")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link.mp4").symlink_to(tmp_path / "a.mp4")
    read_video_info(MediaReference(path="link.mp4", root=str(tmp_path / "root")))
    strict = ImageRoot(str(tmp_path / "root"), links=False)
    for name, root in (("link.mp4", strict), ("../a.mp4", str(tmp_path / "root"))):
        reference = MediaReference(path=name, root=root)
        with pytest.raises(RecordError, match="image_outside_root"):
            read_video_info(reference)
    for path in (tmp_path / "none.mp4", tmp_path):
        with pytest.raises(RecordError, match=f"missing_video: {path}"):
            read_video_info(at(path))
    assert "of a video file" in why(lambda: read_video_info(at(tmp_path)), "missing_video")


def test_failing_storage_is_not_a_damaged_file(tmp_path: Path, store: Store) -> None:
    path = make_video(tmp_path / "a.mp4")
    store.put("failing/a.mp4", path.read_bytes())
    reference = MediaReference(path=store.url("failing/a.mp4"))
    assert read_video_info(reference).num_frames == 30
    store.put("failing/b.mp4", path.read_bytes())
    reference = MediaReference(path=store.url("failing/b.mp4"))
    with store.failing(503, "failing/b.mp4"), pytest.raises(ResourceError, match="503"):
        read_video_info(reference)


def test_playlists_open_no_other_file(tmp_path: Path) -> None:
    """FFmpeg alone follows each of these texts to the video, or to a server."""
    video = make_video(tmp_path / "a.ts")
    texts = {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{video}\n#EXT-X-ENDLIST\n",
        "a.ffconcat": "ffconcat version 1.0\nfile a.ts\n",
    }
    for name, text in texts.items():
        for path in (tmp_path / name, tmp_path / f"{name}.mp4"):
            path.write_text(text)
            assert "is not a video of the formats" in why(lambda path=path: read_video_info(at(path)))  # type: ignore[misc]
    with av.open(str(tmp_path / "a.ffconcat")) as container:
        assert len(list(container.decode(video=0))) == 30
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        (tmp_path / "b.m3u8").write_text(
            texts["a.m3u8"].replace(str(video), f"http://127.0.0.1:{server.getsockname()[1]}/a.ts")
        )
        why(lambda: read_video_info(at(tmp_path / "b.m3u8")))
        with pytest.raises(TimeoutError):
            server.accept()


def test_references_inside_a_quicktime_file_are_not_followed(tmp_path: Path) -> None:
    """The frames of a track may be in another file: an alias of the QuickTime file format."""
    data = make_video(tmp_path / "other.mov", codec="mjpeg").read_bytes()
    name = b"/x/other.mov"
    record = (
        bytes(130) + struct.pack(">HH", 1, 1) + bytes(16) + struct.pack(">HH", 2, len(name)) + name + b"\xff\xff\0\0"
    )
    alias = struct.pack(">I4sI", 12 + len(record), b"alis", 0) + record
    entry = data.index(b"url \0\0\0\1") - 4  # which refers to the file itself
    changed = bytearray(data[:entry] + alias + data[entry + 12 :])
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):  # the boxes around it
        at_box = changed.rindex(kind, 0, entry) - 4
        size = struct.unpack_from(">I", changed, at_box)[0] + len(alias) - 12
        struct.pack_into(">I", changed, at_box, size)
    path = tmp_path / "a.mov"
    path.write_bytes(changed)
    with av.open(str(path), container_options={"enable_drefs": "1"}) as container:
        assert len(list(container.decode(video=0))) == 30  # of the other file
    assert "has no frames" in why(lambda: read_video_info(at(path)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("times.mp4", {"fps": 24}),
        ("size.mp4", {"width": 96}),
        ("short.mp4", {"frames": 20}),
        ("short.avi", {"frames": 20}),
        ("times.avi", {"fps": 24}),
    ],
)
def test_another_file_is_not_decoded(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_video(tmp_path / name)
    selection = select(read_video_info(at(path)), [0, 29])
    make_video(path, **options)
    line = why(lambda: list(decode_frames(at(path), selection)))
    assert line.startswith(str(path))
    assert "as it had when its frames were selected; restore the file, or pack again" in line


def test_times_may_be_rounded_to_microseconds(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.mkv", "a.ts", "a.avi"):
        path = make_video(tmp_path / name, fps=Fraction(30000, 1001))
        info = read_video_info(at(path))
        info.timestamps[:] = info.timestamps.round(6)
        frames = decode_frames(at(path), select(info, [0, 13, 29]))
        assert [number_of(frame) for frame in frames] == [0, 13, 29]


def test_the_package_is_needed_for_videos_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'energon-packed\[video\]'"):
        read_video_info(at(tmp_path / "a.mp4"))


def test_fuzzed_files_are_read_or_rejected(tmp_path: Path) -> None:
    """Bytes are changed, added, removed and cut in another process, which has 300 MB and a time limit."""
    for name, options in {
        "a.mp4": {},
        "b.mkv": {},
        "c.avi": {"codec": "mpeg4"},
        "d.ts": {},
        "e.webm": {"codec": "libvpx-vp9"},
        "f.mp4": {"fragmented": True, "codec": "libx265"},
        "g.mp4": {"codec": "libsvtav1"},
    }.items():
        make_video(tmp_path / name, frames=16, **options)
    done = run_python(FUZZED, tmp_path, FUZZ)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["same"] > FUZZ // 10
    assert result["rejected"] > FUZZ // 10
    assert result["same"] + result["rejected"] == FUZZ
    assert result["kibibytes"] < 300 << 10
    assert result["slowest"] < 20


FUZZED = """
import sys
from tests.encoding.test_video_file import fuzz
fuzz(sys.argv[1], int(sys.argv[2]))
"""


def fuzz(folder: str, count: int) -> None:
    import resource
    import time

    wholes = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    rng = random.Random(count)
    result = {"same": 0, "rejected": 0}
    used, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    for number in range(count):
        reference = MediaReference(data=damaged(rng, wholes[number % len(wholes)]))
        start = time.monotonic()
        try:
            info = read_video_info(reference)
            frames = sum(1 for _ in decode_frames(reference, select(info, list(range(info.num_frames)))))
            assert frames == info.num_frames
            result["same"] += 1
        except RecordError as error:
            assert error.detail.startswith(reference.label), error
            assert "\n" not in error.detail
            result["rejected"] += 1
        slowest = max(slowest, time.monotonic() - start)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    print(json.dumps({**result, "kibibytes": used, "slowest": slowest}))


def damaged(rng: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    place = rng.randrange(len(data) if rng.random() < 0.6 else 1500)
    kind = rng.randrange(5)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        data[place : place + rng.choice((4, 50, 400))] = b""
    elif kind == 2:
        data[place:place] = rng.randbytes(rng.choice((1, 7, 300)))
    else:
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data)) if kind == 3 else place] = rng.randrange(256)
    return bytes(data)
