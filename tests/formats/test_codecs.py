"""Every codec reads back the samples that it writes: `read(write(samples)) == samples`."""

import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from energon_packed import (
    ConfigError,
    Conversation,
    FormatError,
    FrameSelection,
    MediaReference,
    Message,
    RecordError,
    StoredSample,
    VideoReference,
    normalize,
)
from tests.internals import CODECS, codec_for, codec_of, load_pack

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not any(placeholder in text for placeholder in ("<image>", "<video>", "<audio>"))
)
NUMBER = st.integers(-5, 200)


def npy(rows: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(3 * rows).reshape(-1, 3))
    return out.getvalue()


@st.composite
def stored_videos(draw: Any) -> VideoReference:
    """A video file, or the images of its frames."""
    indices = tuple(sorted(draw(st.lists(st.integers(0, 500), min_size=1, max_size=5))))
    frames = FrameSelection(
        indices=indices,
        timestamps=tuple(index / 29.97 for index in indices),
        fps=draw(st.sampled_from([29.97, 25.0])),
        num_frames=501,
        height=draw(st.integers(1, 99)),
        width=draw(st.integers(1, 99)),
        resized=draw(st.none() | st.just((28, 56))),
        settings=draw(st.sampled_from([{}, {"fps": 2.0, "max_frames": 768}])),
    )
    if draw(st.booleans()):
        extension = draw(st.sampled_from(["mp4", "webm"]))
        file = MediaReference(data=draw(st.binary(max_size=30)), extension=extension)
        return VideoReference(file=file, frames=frames)
    images = tuple(MediaReference(data=bytes([index % 256]), extension="jpg") for index in indices)
    return VideoReference(file=None, frames=frames, images=images)


@st.composite
def conversations(draw: Any, kind: str, marks: str) -> dict[str, Any]:
    """Fields of a conversation that says something, with the placeholders `marks`."""
    if kind == "tokens":
        ids = np.array(draw(st.lists(st.integers(0, 200), min_size=1, max_size=12)), dtype=np.int64)
        if draw(st.booleans()):
            return {"input_ids": ids, "labels": np.where(draw(st.booleans()), ids, -100)}
        return {"input_ids": ids, "labels": np.array(draw(st.lists(NUMBER, min_size=len(ids), max_size=len(ids))))}
    if kind == "text":
        return {"text": marks + draw(TEXT) + "."}
    messages = []
    if draw(st.booleans()):
        messages.append(Message("system", draw(TEXT)))
    for turn in range(draw(st.integers(1, 3))):
        messages += [
            Message("user", marks * (turn == 0) + draw(TEXT), weight=draw(st.sampled_from([0.0, 1.0]))),
            Message("assistant", draw(TEXT) + "!", weight=draw(st.sampled_from([0.0, 1.0]))),
        ]
    if kind == "tools":
        call = {"function": {"name": "f", "arguments": {"x": draw(NUMBER)}}}
        messages += [Message("assistant", "", {"tool_calls": [call]}), Message("tool", draw(TEXT), {"name": "f"})]
        return {"messages": tuple(messages), "tools": [{"name": "f", "parameters": {}}]}
    return {"messages": tuple(messages)}


@st.composite
def stored_samples(draw: Any, kinds: tuple[str, ...], truncate: int | None, with_extras: bool) -> StoredSample:
    """A sample as the write stage hands it to a codec."""
    data = draw(st.lists(st.binary(min_size=1, max_size=30), max_size=3))
    extensions = st.sampled_from(["jpg", "png", "webp"])
    images = tuple(MediaReference(data=content, extension=draw(extensions)) for content in data)
    positions = tuple(npy(n + 1) for n in range(len(images))) if draw(st.booleans()) else ()
    videos = tuple(draw(st.lists(stored_videos(), max_size=2)))
    marks = "<image>" * len(images) + "<video>" * len(videos)
    fields = draw(conversations(draw(st.sampled_from(kinds)), marks))
    if with_extras:
        fields |= {"video": draw(st.booleans()), "fps": draw(st.none() | st.sampled_from([2.0, 29.97]))}
        fields["timestamp_decimal"] = draw(st.none() | st.integers(0, 3))
    conversation = Conversation(
        id=draw(TEXT),
        images=images,
        patch_positions=tuple(MediaReference(data=content) for content in positions),
        videos=videos,
        **fields,
    )
    length = len(conversation.input_ids) if conversation.input_ids is not None else draw(st.integers(1, 99))
    return StoredSample(
        conversation=conversation,
        length=length,
        truncate=truncate,
        is_truncated=truncate is not None and draw(st.booleans()),
    )


@given(data=st.data(), name=st.sampled_from(sorted(CODECS)))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_read_returns_the_written_samples(data: Any, name: str) -> None:
    codec = codec_for(name)
    truncate = None if codec.stores_tokens else data.draw(st.none() | st.integers(1, 50))
    kinds = ("tokens",) if codec.stores_tokens else ("messages", "text", "tools", "tokens")
    strategy = stored_samples(kinds, truncate, not codec.stores_tokens)
    samples = data.draw(st.lists(strategy, min_size=1, max_size=4 if codec.packed else 1))
    try:
        for sample in samples:
            codec.check(sample.conversation)
    except RecordError:
        assume(False)
    raw = {"__key__": "k", **dict(codec.write(samples))}
    assert codec_of(raw) is codec
    loaded = load_pack(codec, raw).stored_samples()  # as Energon does
    assert [s.conversation for s in loaded] == [s.conversation for s in samples]
    read = codec.read(raw)
    assert read == samples
    extensions, expected = (
        [[file.extension for file in s.conversation.media_files] for s in x] for x in (read, samples)
    )
    assert extensions == expected
    assert codec.lengths({"__key__": "k", codec.lengths_part: raw[codec.lengths_part]}) == [s.length for s in samples]
    assert all(codec.part_filter(part) for part in raw if part != "__key__")


def test_equality_notices_every_field() -> None:
    def made(**changes: Any) -> StoredSample:
        conversation = Conversation(id="a", input_ids=np.array([1, 2]), labels=np.array([1, changes.pop("label", 2)]))
        return StoredSample(**{"conversation": conversation, "length": 2, **changes})

    assert made() == made()
    assert made() != made(label=-100)
    assert made() != made(length=3)
    assert made(is_truncated=True) != made()


def test_a_file_without_an_extension_is_not_written() -> None:
    sample = StoredSample(normalize({"text": "<image>.", "images": [b"x"]}), length=3)
    with pytest.raises(ConfigError, match="img0_0 has no extension. Set `extension` of the MediaReference"):
        codec_for("PackedMultiMixQASample").write([sample])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_missing_member_is_named(name: str) -> None:
    codec = codec_for(name)
    ids = np.array([1, 2, 3])
    fields: dict[str, Any] = {"input_ids": ids, "labels": ids} if codec.stores_tokens else {"text": "<image>."}
    image = MediaReference(data=b"x", extension="jpg")
    sample = StoredSample(Conversation(id="a", images=(image,), **fields), length=3)
    raw = {"__key__": "k", **dict(codec.write([sample]))}
    raw.pop("img0_0.jpg")
    with pytest.raises(FormatError, match="k names img0_0.jpg, which is not in the tar"):
        codec.read(raw)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": [0, 5]}, "frames are"),  # of 5
        ({"frames": [3, 1]}, "frames are"),
        ({"frames": [], "timestamps": []}, "frames are"),
        ({"frames": [0, True]}, "True is not an integer"),
        ({"timestamps": [0.0]}, "timestamps of 2 frames"),
        ({"timestamps": [0.0, None]}, "a number is NoneType, not float"),
        ({"size": [0, 4]}, "0 x 4 pixels"),
        ({"size": [4]}, "not enough values"),
        ({"resized": [1 << 20, 1 << 20]}, "1048576 x 1048576 pixels"),
        ({"fps": -1}, "fps is -1"),
        ({"fps": 0}, "fps is 0"),
        ({"settings": []}, "settings are"),
        ({"num_frames": None}, "None is not an integer"),
        ({"part": "vid0_1.mp4"}, "k names vid0_1.mp4, which is not in the tar"),
        ({"part": None}, "k names None, which is not in the tar"),
    ],
)
def test_damaged_frames_of_a_video_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    codec = codec_for(name)
    frames = FrameSelection(indices=(0, 4), timestamps=(0.0, 0.4), fps=10.0, num_frames=5, height=4, width=4)
    ids = np.array([1, 2, 3])
    fields: dict[str, Any] = {"input_ids": ids, "labels": ids} if codec.stores_tokens else {"text": "<video>."}
    video = VideoReference(file=MediaReference(data=b"x", extension="mp4"), frames=frames)
    sample = StoredSample(Conversation(id="a", videos=(video,), **fields), length=3)
    raw = {"__key__": "k", **dict(codec.write([sample]))}
    assert set(raw) > {"vid0_0.mp4", "json"}
    value = json.loads(raw["json"])
    listed = value["samples"][0] if "samples" in value else value
    entry = listed["video_files"][0]
    while isinstance(entry, list):
        entry = entry[0]
    entry |= changes
    with pytest.raises(FormatError, match=message):
        codec.read(raw | {"json": json.dumps(value).encode()})


def test_third_party_arrays_are_read_and_pickles_are_refused() -> None:
    """int64 and other byte orders, as `np.save` of another tool leaves them; a pickle is never opened."""
    arrays = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "cu_seqlens": [0, 3]}
    value = json.dumps({"ids": ["a"], "images": [[]], "sample_count": 1}).encode()
    for kind in ("<i4", "<i8", ">i4", "<i2"):
        raw: dict[str, Any] = {"__key__": "k", "json": value}
        raw |= {f"{name}.npy": saved(np.array(one, dtype=kind)) for name, one in arrays.items()}
        pack: Any = load_pack(CODECS["PackedTokensSample"], raw)
        for name, one in arrays.items():
            assert (getattr(pack, name).tolist(), getattr(pack, name).dtype) == (one, np.int32)
    raw["input_ids.npy"] = saved(np.array([5, "x"], dtype=object))
    with pytest.raises(FormatError, match=r"k\.input_ids\.npy: Object arrays cannot be loaded"):
        CODECS["PackedTokensSample"].read(raw)
    del raw["input_ids.npy"]
    with pytest.raises(FormatError, match=r"k has no input_ids\.npy"):
        CODECS["PackedTokensSample"].read(raw)


def saved(array: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_json_with_other_types_is_a_format_error(name: str) -> None:
    """A key that is missing, or holds something else, as one flipped bit makes it."""
    codec = codec_for(name)
    ids = np.array([1, 2, 3])
    turns = (Message("user", "<image>What?"), Message("assistant", "That."))
    fields: dict[str, Any] = {"input_ids": ids, "labels": ids} if codec.stores_tokens else {"messages": turns}
    conversation = Conversation(id="a", images=(MediaReference(data=b"x", extension="jpg"),), **fields)
    raw = dict(codec.write([StoredSample(conversation, length=3)]))
    value, named = json.loads(raw["json"]), 0
    for key in value:
        for other in (..., None, 5, "x", [], {}, [5], [None], [[]], [{}]):
            others = {name: one for name, one in value.items() if name != key}
            parts = {"__key__": "k", **raw, "json": json.dumps(others if other is ... else {**others, key: other})}
            for read in (codec.read, codec.lengths):
                try:
                    assert isinstance(read(parts), list)
                except FormatError as error:
                    named += 1
                    assert "\n" not in str(error)
    assert named > len(value)
