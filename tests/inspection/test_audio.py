"""Packs with audio files in the report: Chromium plays them, waveforms are of their samples, and damage is shown."""

import base64
import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_packed import ChatEncoder, pack
from tests.audio import KINDS, qwen2_audio, signal, write
from tests.browser import Browser
from tests.internals import PackedFolder, ReportData, render_report, write_audio

EVIL = "<script>document.title='run'</script><img src=x>"
PLAYED = {"wav16": "wav", "wav8": "wav", "wav24": "wav", "float": "wav", "flac": "flac", "mp3": "mpeg", "m4a": "mp4"}
PLAYED |= {"aac": "aac", "opus": "ogg", "webm": "webm", "mp4": "mp4"}
"""Type of the data URL of the kinds that browsers play; others become WAV."""
DURATIONS = """Promise.all([...document.querySelectorAll("audio")].map((player) => new Promise((done) => {
  const name = player.closest("figure").querySelector("figcaption").textContent;
  player.onloadedmetadata = () => done([name, player.duration]);
  player.onerror = () => done([name, player.error.message]);
  player.preload = "metadata";
  player.load();
})))"""


def half_silent(samples: int) -> Any:
    return np.where(np.arange(samples) < samples // 2, np.float32(0), signal(samples, 16_000))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Report of a pack of an audio file of each kind, of a part, of a long file and of two damaged files."""
    folder = tmp_path_factory.mktemp("audio")
    records: list[dict[str, Any]] = []
    for number, kind in enumerate(KINDS):
        path = write(folder / kind, kind, half_silent(8000 + 400 * number), 16_000)
        records.append({"id": kind, "audio": path.name, "text": "hello"})
    stereo = write_audio(folder / "wide.wav", signal(200_000, 48_000), 48_000, codec="pcm_s24le", channels=2)
    whole = write(folder / "whole", "opus", signal(96_000, 48_000), 48_000)
    long = write(folder / "long", "wav16", signal(200_000, 16_000), 16_000)
    hour = write(folder / "hour", "flac", np.zeros(9_640_000, dtype=np.float32), 16_000)
    records += [
        {"id": f"part {EVIL}", "audio": {"path": whole.name, "offset": 0.5, "duration": 1.25}, "text": "hello"},
        {"id": "wide", "audio": stereo.name, "text": "hello"},
        {"id": "long", "audio": long.name, "text": "hello"},
        {"id": "far", "audio": {"path": hour.name, "offset": 600, "duration": 2}, "text": "hello"},
    ]
    damaged = bytearray(write(folder / "damaged", "flac", signal(16_000, 16_000), 16_000).read_bytes())
    damaged[9000:9040] = bytes(40)  # found by decoding
    (folder / "damaged.flac").write_bytes(damaged)
    records.append({"id": "damaged", "audio": "damaged.flac", "text": "hello"})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = qwen2_audio(folder / "tokenizer")
    pack(folder / "data.jsonl", output_dir=folder / "out", tokenizer=tokenizer, seq_len=512, workers=1,
         max_samples_per_pack=4)  # fmt: skip
    return ReportData(PackedFolder.open(folder / "out"), ChatEncoder.from_pretrained(tokenizer))


@pytest.fixture(scope="module")
def page(data: Any) -> str:
    return str(render_report("audio", data))


def by_id(data: Any) -> dict[str, tuple[Any, Any]]:
    """View and player of the audio file of each sample."""
    found = {}
    for shown in data.shown:
        for sample in shown.samples:
            (audio,) = sample.audios
            found[str(sample.id)] = (audio, shown.files[audio.name])
    return found


def test_a_browser_plays_every_format(data: Any, page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        assert not browser.log
        assert browser.run("document.title") == "audio"
        found = browser.run(DURATIONS)
        boxes = browser.run(
            "[...document.querySelectorAll('details.pack')].map((pack) => { pack.open = true; return "
            "[...pack.querySelectorAll('svg.wave')].map((wave) => wave.querySelector('path').getBBox().width); })"
        )
    assert len(found) == len(KINDS) + 2  # all but the long and the damaged file
    for caption, duration in found:
        seconds = float(re.search(r": ([\d.]+) s", caption)[1])  # type: ignore[index]
        # Players count the delay and the padding of encoders in other ways: frames of MP3, AAC and Opus.
        assert isinstance(duration, int | float), (caption, duration)
        assert duration == pytest.approx(seconds, abs=0.13), (caption, duration)
    widths = [width for pack in boxes for width in pack]
    assert len(widths) == len(KINDS) + 3  # with the long file
    assert min(widths) == pytest.approx(max(widths)) == pytest.approx(240, abs=1)


def test_formats_that_browsers_do_not_play_are_converted(data: Any) -> None:
    players = by_id(data)
    for kind in KINDS:
        url = players[kind][1].url
        assert url.startswith(f"data:audio/{PLAYED.get(kind, 'wav')};base64,"), kind
        content = base64.b64decode(url.partition(",")[2])
        if kind not in PLAYED:
            with wave.open(io.BytesIO(content)) as file:
                assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
                assert file.getnframes() == round(players[kind][0].clip.seconds * 16_000)


def test_parts_and_large_files_are_converted_and_long_files_only_drawn(data: Any) -> None:
    players = by_id(data)
    for name, seconds in ((f"part {EVIL}", 1.25), ("wide", 200_000 / 48_000)):
        with wave.open(io.BytesIO(base64.b64decode(players[name][1].url.partition(",")[2]))) as file:
            assert file.getnframes() == pytest.approx(seconds * 16_000, abs=1)
    long = players["long"][1]
    assert (long.url, bool(long.wave), long.problem) == ("", True, None)
    far = players["far"][1]
    assert (far.url, far.wave, far.problem) == ("", "", None)


def test_a_waveform_is_of_the_samples(data: Any) -> None:
    for kind in ("wav16", "flac", "alac"):
        bars = re.findall(r"M([\d.]+) ([\d.]+)h[\d.]+v([\d.]+)h", by_id(data)[kind][1].wave)
        assert len(bars) == 240
        heights = np.array([float(height) for _, _, height in bars])
        samples = half_silent(8000 + 400 * list(KINDS).index(kind))
        parts = [samples[i * len(samples) // 240 : (i + 1) * len(samples) // 240] for i in range(240)]
        assert heights == pytest.approx([16 * (part.max() - part.min()) + 0.5 for part in parts], abs=0.06)
        assert heights[:119].max() == 0.5 < 3 < heights[122:].min()


def test_counts_and_damage(data: Any, page: str) -> None:
    files = len(KINDS) + 5
    assert f"<dt>audio files</dt><dd>{files}</dd>" in page
    assert f"Seconds per audio file, from {files} of {files} audio files</figcaption><svg" in page
    assert f"0.5 to 12.5 s, 16,000 to 48,000 Hz, from {files} audio files" in page
    assert "name Qwen2AudioProcessor, rate 16000, truncates False" in page
    assert f"of the {files} that were read cannot be used or played" in page
    assert re.search(r"1 audio file \(aud\d_0.flac of [^)]*has damaged data", page)
    assert page.count("<audio controls") == len(KINDS) + 2
    assert page.count("; not played") == 2
    assert "<script>document" not in page
    assert "part &lt;script&gt;" in page
