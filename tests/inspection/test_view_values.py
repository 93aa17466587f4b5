"""Samples, media and turns of a pack as values, text and JSON."""

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from energon_packed import (
    AudioClip,
    Conversation,
    FrameSelection,
    MediaReference,
    Message,
    StoredSample,
    VideoReference,
)
from tests.internals import AudioView, ImageView, SampleView, Turn, VideoView, view_samples
from tests.videos import make_video

TURNS = (Message("user", "Hi"), Message("assistant", "Hello."))


def frames(count: int, **more: Any) -> FrameSelection:
    times = tuple(map(float, range(count)))
    size: dict[str, Any] = {"height": 48, "width": 64, "num_frames": 10, "fps": 1.0}
    return FrameSelection(indices=tuple(range(count)), timestamps=times, **{**size, **more})


def video(selection: FrameSelection) -> VideoView:
    return VideoView(names=["vid0_0.mp4"], is_file=True, selection=selection, bytes=1)


def test_a_video_has_its_times_and_its_sizes_as_width_and_height() -> None:
    assert video(frames(4)).text == "4 of 10 frames at 0, 1, 2, 3 s, 1 fps, 64 x 48"
    resized = video(frames(5, resized=(28, 56)))
    assert resized.text == "5 of 10 frames at 0, 1, 2, ... 4 s, 1 fps, 64 x 48 resized to 56 x 28"
    sample = SampleView(id=None, start=0, length=1, videos=(resized,))
    assert sample.as_dict()["videos"][0]["resized"] == (56, 28)


def test_a_part_of_an_audio_file_has_its_seconds() -> None:
    whole = AudioClip(rate=8000, start=0, samples=16_000, total=16_000)
    assert AudioView(name="aud0_0.wav", bytes=1, clip=whole).text == "2.00 s, 8,000 Hz"
    part = AudioView(name="a", bytes=1, clip=AudioClip(rate=8000, start=4000, samples=8000, total=16_000), tokens=9)
    assert part.text == "1.00 s from 0.50 s of 2.00 s, 8,000 Hz, 9 tokens"
    [value] = SampleView(id=None, start=0, length=1, audios=(part,)).as_dict()["audios"]
    assert [value[name] for name in ("rate", "start", "seconds", "total_seconds")] == [8000, 0.5, 1, 2]


def test_values_that_a_sample_does_not_have_are_none_or_left_out() -> None:
    sample = SampleView(id=None, start=0, length=9)
    assert sample.supervised_spans is None
    assert not {"videos", "audios", "group", "role", "label", "kind", "runs", "problem"} & sample.as_dict().keys()
    known = SampleView(id=None, start=0, length=9, runs=(("other", 0, 2), ("supervised", 2, 7)))
    assert known.supervised_spans == [(2, 9)]


def test_media_without_a_placeholder_each_are_before_the_first_turn() -> None:
    images = tuple(ImageView(name=name, bytes=1) for name in "ab")
    turns = (Turn("user", "<image> What?", None), Turn("assistant", "It.", True))
    placed = [content for _, content in SampleView(id=None, start=0, length=9, turns=turns, images=images).placed]
    assert placed == [[*images, "<image> What?"], ["It."]]
    placed = [content for _, content in SampleView(id=None, start=0, length=9, turns=turns, images=images[:1]).placed]
    assert placed == [[images[0], " What?"], ["It."]]


def test_the_start_is_unknown_after_a_sample_without_a_length() -> None:
    lengths = (3, None, 5, 2)
    views = view_samples([StoredSample(Conversation(messages=TURNS), length) for length in lengths], None)
    assert [view.start for view in views] == [0, 3, None, None]
    aligned = view_samples([StoredSample(Conversation(messages=TURNS), 3) for _ in range(3)], None, multiple=4)
    assert [view.start for view in aligned] == [0, 4, 8]


def test_only_truncated_samples_show_where_they_end() -> None:
    conversation = Conversation(messages=TURNS, tools=({"name": "f"},))
    cut, whole = view_samples(
        [StoredSample(conversation, 8, truncate=8, is_truncated=True), StoredSample(conversation, 5, truncate=8)], None
    )
    assert (cut.truncated_to, whole.truncated_to) == (8, None)
    assert [turn.supervised for turn in whole.turns] == [False, None, None]  # schemas are never supervised


def problem_of(reference: VideoReference) -> str | None:
    turns = (Message("user", "<video>"), TURNS[1])
    [sample] = view_samples([StoredSample(Conversation(messages=turns, videos=(reference,)), 5)], None)
    return str(sample.videos[0].problem) if sample.videos[0].problem else None


def test_a_video_of_another_size_is_not_the_packed_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_video(tmp_path / "a.mp4", width=64, height=48, frames=10, fps=1)
    file = MediaReference(path=str(tmp_path / "a.mp4"))
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    images = (MediaReference(path=str(tmp_path / "a.png")),) * 2
    other = "not the packed video: it has another number of frames, or another size"
    for selection, problem in ((frames(2), None), (frames(2, width=65), other), (frames(2, height=47), other)):
        assert problem_of(VideoReference(file=file, frames=selection)) == problem
        assert problem_of(VideoReference(file=None, images=images, frames=selection)) == problem
    assert problem_of(VideoReference(file=file, frames=frames(2, num_frames=11))) == other
    assert problem_of(VideoReference(file=file)) == "its frames are not known"
    monkeypatch.setitem(sys.modules, "av", None)  # without PyAV, nothing is checked
    assert problem_of(VideoReference(file=file, frames=frames(2, width=65))) is None
