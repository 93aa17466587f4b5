"""Packs with video files in inspect and report: the values shown are those of PyAV and of the batch of the loader."""

import base64
import io
import json
import re
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_packed import ChatEncoder, pack
from tests.internals import PackedFolder, ReportData, render_report
from tests.printed import invoke
from tests.videos import decoded, make_video, number_of

FILES: dict[str, dict[str, Any]] = {
    "plain.mp4": {"frames": 40, "fps": 10},
    "rotated.mov": {"frames": 30, "fps": Fraction(30000, 1001), "rotation": 90},
    "variable.mkv": {"frames": 12, "fps": 8, "times": [0, 1, 2, 5, 6, 9, 10, 11, 14, 20, 21, 30]},
    "vp9.webm": {"frames": 24, "fps": 12, "codec": "libvpx-vp9"},
}
PIXELS = {"video_min_pixels": 3136, "video_max_pixels": 12544}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with videos and a record of each."""
    folder = tmp_path_factory.mktemp("videos")
    lines = []
    for name, settings in FILES.items():
        make_video(folder / name, width=64, height=48, **settings)
        turns = [{"role": "user", "content": "<video>What is it?"}, {"role": "assistant", "content": f"It is {name}."}]
        lines.append(json.dumps({"id": name, "messages": turns, "videos": [name]}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


def _pack(source: Path, out: Path, tokenizer: Path, **options: Any) -> Path:
    pack(
        str(source / "data.jsonl"), output_dir=out, seq_len=2048, tokenizer=tokenizer, workers=1, **(PIXELS | options),
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def packed(source: Path, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _pack(source, tmp_path_factory.mktemp("packed") / "out", tokenizer_dir)


def _videos(out: Path, *options: str) -> dict[str, dict[str, Any]]:
    """The video of each sample in the JSON of inspect, by the id of the sample."""
    shown = invoke("inspect", out, "--limit", 99, "--json", *options)
    assert shown.exit_code == 0, shown.output
    packs = [json.loads(line) for line in shown.output.splitlines() if '"samples"' in line]
    return {sample["id"]: sample["videos"][0] for pack in packs for sample in pack["samples"]}


def test_inspect_shows_the_frames_of_each_video_as_pyav_decodes_them(packed: Path, source: Path) -> None:
    videos = _videos(packed)
    assert videos.keys() == FILES.keys()
    for name, video in videos.items():
        frames = decoded(source / name)
        assert video["num_frames"] == len(frames)
        start = frames[0][0]
        assert video["timestamps"] == pytest.approx([frames[index][0] - start for index in video["frames"]], abs=1e-3)
        sides = frames[0][1].shape[:2]  # as stored
        upright = sides if "rotation" in FILES[name] else sides[::-1]
        assert (video["width"], video["height"]) == tuple(upright)
        assert (video["problem"], video["file"], video["bytes"]) == (None, None, (source / name).stat().st_size)


def test_tokens_of_a_video_are_its_video_tokens_in_the_batch(packed: Path, encoder: ChatEncoder) -> None:
    expected = {name: video["tokens"] for name, video in _videos(packed).items()}
    shown = invoke("inspect", packed, "--limit", 99, "--tokens", "--json")
    rows = [json.loads(line) for line in shown.output.splitlines() if '"token"' in line]
    counts = Counter(row["segment"] for row in rows if row["text"] == "<|video_pad|>")
    assert sorted(counts.values()) == sorted(expected.values())
    kinds = ReportData(PackedFolder.open(packed), encoder).token_kinds
    assert kinds["video"] == sum(expected.values())
    assert sum(kinds.values()) == len(rows)


def test_timestamps_of_qwen3_vl_are_tokens_of_the_video(source: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    out = _pack(source, tmp_path / "out", tokenizer_dir, image_processor="Qwen3VLProcessor", total_pixels=10**6)
    shown = invoke("inspect", out, "--limit", 99, "--tokens", "--json")
    rows = [json.loads(line) for line in shown.output.splitlines() if '"token"' in line]
    videos = _videos(out)
    for segment, (name, video) in enumerate(videos.items()):
        texts = [row["text"] for row in rows if row["segment"] == segment]
        first = texts.index("<|vision_start|>") + 1
        inner = texts[first : first + video["tokens"]]
        assert texts[first + video["tokens"]] == "<|vision_end|>"
        times = [index / video["fps"] for index in video["frames"]]
        expected = [f"<{(a + b) / 2:.1f} seconds>" for a, b in zip(times[::2], times[1::2], strict=True)]
        assert (
            re.findall("<.*?>", "".join(inner).replace("Ġ", " ").replace("<|", "[").replace("|>", "]")) == expected
        ), name


def test_extracted_videos_are_the_files_of_the_records(packed: Path, source: Path, tmp_path: Path) -> None:
    invoke("inspect", packed, "--extract", tmp_path)
    files = {file.read_bytes() for file in tmp_path.glob("*/vid*")}
    assert files == {(source / name).read_bytes() for name in FILES}


def test_a_report_shows_the_frames_at_their_times(packed: Path, encoder: ChatEncoder) -> None:
    data = ReportData(PackedFolder.open(packed), encoder)
    assert data.manifest.videos == len(data.videos) == len(FILES)
    (shown,) = data.shown
    videos = [video for sample in shown.samples for video in sample.videos]
    assert len(shown.files) == 2  # of four
    for video in videos:
        if (strip := shown.files.get(video.name)) is None:
            continue
        index = dict(zip(video.selection.timestamps, video.selection.indices, strict=True))
        assert strip.frames
        for time, url in strip.frames:
            assert number_of(_image(url)) == index[time]
    page = render_report("videos", data)
    assert page.count('class="strip"') == page.count("; frames not shown") == 2
    assert "Frames are shown of the first 2 videos of each pack." in page
    assert f"{len(FILES)}</dd>" in page
    for video in videos:
        assert video.text in page


def _image(url: str) -> Any:
    content = base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))
    return np.asarray(Image.open(io.BytesIO(content)))


def test_missing_and_replaced_videos_are_shown_as_such(
    source: Path, tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    out = _pack(folder, tmp_path / "out", tokenizer_dir, media="reference")
    assert _videos(out)["plain.mp4"]["file"] == str(folder / "plain.mp4")
    (folder / "plain.mp4").unlink()
    (folder / "vp9.webm").write_bytes((folder / "variable.mkv").read_bytes())
    problems = {name: video["problem"] for name, video in _videos(out).items() if video["problem"]}
    assert problems == dict.fromkeys(("plain.mp4", "vp9.webm"), "missing, or not the packed video")
    text = invoke("inspect", out).output
    assert "missing, or not the packed video; 8 of 40 frames at 0, 0.5, 1, ... 3.5 s, 10 fps, 64 x 48" in text
    data = ReportData(PackedFolder.open(out), encoder)
    page = render_report("videos", data)
    problem = r"vid\S+ of \S+: missing, or not the packed video"
    assert re.search(rf"2 videos \({problem}, {problem}\) of the 4 that were read cannot be used or shown", page)


def test_a_damaged_video_of_a_tar_is_shown_with_its_damage(packed: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    (tar,) = (packed / "webdataset").glob("*.tar")
    content = bytearray(tar.read_bytes())
    start = content.index(b"\x1a\x45\xdf\xa3")  # the first Matroska or WebM file
    content[start : start + 400] = bytes(400)
    copy = tmp_path / tar.name
    copy.write_bytes(content)
    shown = invoke("inspect", copy)
    assert shown.exit_code == 0, shown.output
    assert re.search(
        r"vid\d_0\.(mkv|webm)  .*is not a video of the formats .*; \d+ of \d+ frames at 0, ", shown.output
    )
    shutil.copytree(packed / "webdataset", tmp_path / "all", ignore=shutil.ignore_patterns("*.tar"))
    copy.rename(tmp_path / "all" / tar.name)
    page = render_report("videos", ReportData(PackedFolder.open(tmp_path / "all"), encoder))
    assert re.search(
        r"1 video \(vid\d_0\.(mkv|webm) of \S+: .*\) of the \d+ that were read cannot be used or shown", page
    )


def test_frames_of_extracted_videos_are_shown_as_those_of_the_files(
    packed: Path, source: Path, tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    out = _pack(source, tmp_path / "out", tokenizer_dir, extract_frames=True)
    files, frames = _videos(packed), _videos(out)
    for name, video in frames.items():
        assert len(video["names"]) == len(video["frames"])
        same = ("frames", "timestamps", "num_frames", "fps", "width", "height", "resized", "settings", "tokens")
        assert {key: video[key] for key in same} == {key: files[name][key] for key in same}
    data = ReportData(PackedFolder.open(out), encoder)
    for video in [video for sample in data.shown[0].samples for video in sample.videos]:
        for time, url in data.shown[0].files[video.name].frames if video.name in data.shown[0].files else ():
            assert number_of(_image(url)) == video.selection.indices[video.selection.timestamps.index(time)]
