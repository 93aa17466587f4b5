"""Encoded conversations with video files: measured and encoded lengths, the order of media, and stored selections."""

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_families import write_folder

from energon_packed import (
    ChatEncoder,
    Conversation,
    EncodedSample,
    FrameSelection,
    MediaReference,
    Message,
    Reason,
    RecordError,
    VideoReference,
    normalize,
)
from tests.internals import decode_frames, read_video_info
from tests.videos import COMBINATIONS, decoded, make_video, number_of

FAMILIES = ("qwen2vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision2", "llava")
Encoders = dict[str, ChatEncoder]


@pytest.fixture(scope="session")
def encoders(tokenizer_dir: Path, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """An encoder of each family that keeps small frames small."""
    small = {"fps": 4, "min_pixels": 784}
    made = {
        family: ChatEncoder.from_pretrained(tokenizer_dir, vision_family=family, video_min_pixels=784, **small)
        for family in FAMILIES[:3]
    }
    made["llava_onevision2"] = ChatEncoder.from_pretrained(tokenizer_dir, vision_family="llava_onevision2", **small)
    folder = write_folder(tmp_path_factory.mktemp("llava"), "llava", text_tokenizer_dir)
    return made | {"llava": ChatEncoder.from_pretrained(folder, fps=4)}


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A video of each container and codec."""
    folder = tmp_path_factory.mktemp("clips")
    return [
        make_video(folder / f"{codec}.{extension}", codec=codec, frames=23, fps=10)
        for codec, extension in COMBINATIONS
    ]


@pytest.fixture(scope="session")
def clip(clips: list[Path]) -> Path:
    return clips[0]


def asked(text: str, videos: list[Any], images: int = 0) -> Conversation:
    stream = io.BytesIO()
    Image.new("RGB", (70, 50), (200, 10, 10)).save(stream, "PNG")
    record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A number."}]}
    return normalize({**record, "videos": videos, "images": [stream.getvalue()] * images})


def video_of(path: Path) -> VideoReference:
    return VideoReference(file=MediaReference(path=str(path)))


def media_runs(encoder: ChatEncoder, sample: EncodedSample) -> list[tuple[str, int]]:
    """(kind, tokens) of each run of image or video tokens."""
    names = {encoder.rules.image_token_id: "image", encoder.rules.video_token_id: "video", None: ""}
    return [(names[token], len(list(run))) for token, run in groupby(sample.input_ids.tolist()) if names.get(token)]


@pytest.mark.parametrize("family", FAMILIES)
def test_measured_lengths_are_encoded_lengths_for_all_containers_and_codecs(
    encoders: Encoders, clips: list[Path], family: str
) -> None:
    encoder = encoders[family]
    conversations = [asked(f"<video>What is in {clip.name}?", [str(clip)]) for clip in clips]
    measured = encoder.measure(conversations)
    encoded = encoder.encode_many(conversations)
    lengths = [len(sample) for sample in encoded if isinstance(sample, EncodedSample)]
    assert [one.length for one in measured] == lengths
    # All files have the same frames, so the same are selected, and the same number of tokens represents them.
    selected = {one.frames[0].indices for one in measured}
    assert len(selected) == 1
    text = encoder.encode_many([asked(f"What is in {clip.name}?", []) for clip in clips])
    extra = [length - len(sample) for length, sample in zip(lengths, text, strict=True)]  # type: ignore[arg-type]
    assert len(set(extra)) == 1


def test_media_have_the_order_of_the_text(encoders: Encoders, clip: Path) -> None:
    encoder = encoders["qwen2_5_vl"]
    longer = make_video(clip.parent / "longer.mp4", frames=40, fps=10)
    mixed = encoder.encode(asked("<video>one<image>two<video>three<image>", [str(clip), str(longer)], images=2))
    alone = [encoder.encode(asked("<video>", [str(path)])) for path in (clip, longer)]
    image = encoder.encode(asked("<image>", [], images=1))
    runs = [media_runs(encoder, sample)[0] for sample in (alone[0], image, alone[1], image)]
    assert media_runs(encoder, mixed) == runs
    assert torch.equal(mixed.pixel_values_videos, torch.cat([sample.pixel_values_videos for sample in alone]))
    assert torch.equal(mixed.video_grid_thw, torch.cat([sample.video_grid_thw for sample in alone]))
    assert mixed.second_per_grid_ts.tolist() == [sample.second_per_grid_ts[0] for sample in alone]
    assert torch.equal(mixed.pixel_values, torch.cat([image.pixel_values] * 2))
    assert (mixed.labels[np.isin(mixed.input_ids, [mixed.image_token_id, mixed.video_token_id])] == -100).all()


@pytest.mark.parametrize("family", ["llava_onevision2", "llava"])
def test_frames_of_other_families_are_images_in_the_order_of_the_text(
    encoders: Encoders, clip: Path, family: str
) -> None:
    encoder = encoders[family]
    conversation = asked("<image>one<video>two<image>", [str(clip)], images=2)
    [frames] = encoder.measure([conversation])[0].frames
    stored = [Image.fromarray(pixels) for _, pixels in decoded(clip)]
    images = [*conversation.images]
    # LLaVA-OneVision-2 resizes frames before they are preprocessed as images.
    images[1:1] = [png(encoder.vision.frame_image(frames, np.array(stored[index]))) for index in frames.indices]
    text = f"<image>one{encoder.vision.frames_text(frames)}two<image>"  # type: ignore[union-attr]
    expected = encoder.encode(
        Conversation(messages=(Message("user", text), Message("assistant", "A number.")), images=tuple(images))
    )
    assert_equal(encoder.encode(conversation), expected, but=("patch_positions",))


def png(image: Image.Image) -> MediaReference:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return MediaReference(data=stream.getvalue())


def assert_equal(sample: EncodedSample, expected: EncodedSample, but: tuple[str, ...] = ()) -> None:
    """Compare all tensors and arrays of two samples."""
    for name, value in vars(expected).items():
        found = getattr(sample, name)
        if name in (*but, "dummy", "id"):
            continue
        if name == "vision_inputs" and value is not None:
            assert all(torch.equal(found.values[key], tensor) for key, tensor in value.values.items())
        elif isinstance(value, torch.Tensor | np.ndarray):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(value), err_msg=name)
        else:
            assert found == value, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_selection_is_trained_whatever_the_settings_are(
    encoders: Encoders, clip: Path, family: str
) -> None:
    encoder, conversation = encoders[family], asked("<video>Why?", [{"path": str(clip), "fps": 2}])
    packed = encoder.encode(conversation)
    [frames] = encoder.measure([conversation])[0].frames
    assert frames.settings["fps"] == 2
    stored = replace(conversation, videos=(VideoReference(file=conversation.videos[0].file, frames=frames),))
    assert_equal(encoder.encode(stored), packed)
    assert len(encoder.encode(asked("<video>Why?", [str(clip)]))) != len(packed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_of_a_family_that_resizes_differently_is_rejected(
    encoders: Encoders, clip: Path, family: str
) -> None:
    encoder, conversation = encoders[family], asked("<video>Why?", [str(clip)])
    [frames] = encoder.measure([conversation])[0].frames
    other = None if frames.resized else (56, 56)
    for resized in (other, (100, 56)):
        stored = replace(conversation.videos[0], frames=replace(frames, resized=resized))
        with pytest.raises(RecordError, match="unsupported_media: the stored frames of a video are .*; pack the orig"):
            encoder.encode(replace(conversation, videos=(stored,)))


@pytest.mark.parametrize(
    ("family", "settings", "detail"),
    [
        ("qwen3_vl", {"num_frames": 10**12}, "`num_frames` must be at most 65,536, got 1,000,000,000,000"),
        ("qwen2vl", {"min_pixels": 10**12}, "frames resized to 1154720x866040 have more than 67,108,864 pixels"),
        ("llava_onevision2", {"min_pixels": 10**12}, "have more than 67,108,864 pixels. Lower `min_pixels`"),
    ],
)
def test_settings_of_a_record_need_bounded_memory(
    encoders: Encoders, clip: Path, family: str, settings: dict[str, int], detail: str
) -> None:
    [measured] = encoders[family].measure([asked("<video>Why?", [{"path": str(clip), **settings}])])
    assert measured.reject is not None
    assert detail in measured.reject.detail


def test_a_damaged_last_frame_is_named(tmp_path: Path) -> None:
    # Packets of a ts have no length, so that a truncated last frame is found when it is decoded.
    path = make_video(tmp_path / "whole.ts", frames=40, fps=10)
    content = path.read_bytes()
    reference = MediaReference(data=content[: len(content) * 7 // 20])
    info = read_video_info(reference)
    last = FrameSelection(
        indices=(info.num_frames - 1,),
        timestamps=(float(info.timestamps[-1]),),
        fps=info.fps,
        num_frames=info.num_frames,
        height=info.height,
        width=info.width,
    )
    with pytest.raises(RecordError, match="has damaged data in a frame( at 1.700 s)?; replace the video"):
        list(decode_frames(reference, last))


def test_a_frame_with_the_time_of_another_frame_is_not_selected(encoders: Encoders, tmp_path: Path) -> None:
    # Times of a mkv are milliseconds, so that three frames have the same.
    path = make_video(tmp_path / "fast.mkv", frames=36, fps=3000, b_frames=0)
    info = read_video_info(MediaReference(path=str(path)))
    assert len(set(info.timestamps.tolist())) < info.num_frames
    every, some = encoders["llava_onevision2"].measure(
        [asked("<video>Why?", [{"path": str(path), "num_frames": count}]) for count in (36, 5)]
    )
    pixels = decode_frames(MediaReference(path=str(path)), every.frames[0])
    assert [number_of(frame) for frame in pixels] == list(range(36))
    assert some.reject is not None
    expected = f"{path}: frames 8 and 9 have the same time, 0.003 s. Convert the video"
    assert some.reject.detail.startswith(expected)
    assert some.reject.reason is Reason.UNSUPPORTED_VIDEO


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_frames_equal_the_file(encoders: Encoders, clip: Path, family: str) -> None:
    encoder, conversation = encoders[family], asked("<video>Why?", [str(clip)])
    [frames] = encoder.measure([conversation])[0].frames
    file = conversation.videos[0].file
    assert file is not None
    images = tuple([png(Image.fromarray(frame)) for frame in decode_frames(file, frames)])
    stored = replace(conversation, videos=(VideoReference(file=None, frames=frames, images=images),))
    assert_equal(encoder.encode(stored), encoder.encode(conversation))
    assert encoder.length(stored) == encoder.length(conversation)


def test_decoded_frames_are_those_of_the_selection(encoders: Encoders, clips: list[Path]) -> None:
    for clip in clips:
        reference = MediaReference(path=str(clip))
        vision = encoders["qwen3_vl"].vision
        assert vision is not None
        frames = vision.select_frames(read_video_info(reference))
        assert [number_of(frame) for frame in decode_frames(reference, frames)] == list(frames.indices), clip.name


def stored_tokens(encoder: ChatEncoder, conversation: Conversation) -> Conversation:
    sample = encoder.encode(conversation)
    return Conversation(input_ids=sample.input_ids, labels=sample.labels, videos=conversation.videos)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_tokens_with_videos(encoders: Encoders, clip: Path, family: str) -> None:
    encoder, conversation = encoders[family], asked("<video>Why?", [str(clip)])
    tokens = stored_tokens(encoder, conversation)
    assert_equal(encoder.encode(tokens), encoder.encode(conversation))
    assert encoder.length(tokens) == len(tokens.input_ids)  # type: ignore[arg-type]


def test_tokens_of_another_video_are_rejected(encoders: Encoders, clip: Path) -> None:
    encoder = encoders["qwen2_5_vl"]
    tokens = stored_tokens(encoder, asked("<video>Why?", [str(clip)]))
    longer = make_video(clip.parent / "another.mp4", frames=60, fps=10)
    other = replace(tokens, videos=(video_of(longer),))
    calls: tuple[Callable[[Conversation], Any], ...] = (encoder.encode, encoder.length)
    for call in calls:
        with pytest.raises(
            RecordError, match=r"video_count_mismatch: \d+ <\|video_pad\|> tokens, but the videos need"
        ):
            call(other)


def test_weights_stay_at_their_tokens(encoders: Encoders, clip: Path) -> None:
    encoder = encoders["qwen3_vl"]
    turns = (Message("user", "<video>Why?"), Message("assistant", "Yes."), Message("user", "<video>And?"))
    plain = Conversation(messages=(*turns, Message("assistant", "No.")), videos=(video_of(clip),) * 2)
    weights = (1, 0.5, 1, 2)
    weighted = [message._replace(weight=w) for message, w in zip(plain.messages, weights, strict=True)]
    sample = encoder.encode(replace(plain, messages=tuple(weighted)))
    np.testing.assert_array_equal(sample.labels, encoder.encode(plain).labels)
    targets = sample.labels != -100
    assert sample.loss_weights is not None
    assert [weight for weight, _ in groupby(sample.loss_weights[targets].tolist())] == [0.5, 2.0]


def test_a_document_may_have_videos(encoders: Encoders, clip: Path) -> None:
    encoder = encoders["qwen2_5_vl"]
    document = Conversation(
        text="Before <video> after.", videos=(VideoReference(file=MediaReference(path=str(clip))),)
    )
    sample = encoder.encode(document)
    assert [kind for kind, _ in media_runs(encoder, sample)] == ["video"]
    assert encoder.length(document) == len(sample)


def test_a_video_that_was_replaced_after_the_selection_is_an_error(
    encoders: Encoders, clip: Path, tmp_path: Path
) -> None:
    encoder = encoders["qwen2_5_vl"]
    file = make_video(tmp_path / "a.mp4", frames=30, fps=10)
    conversation = asked("<video>Why?", [str(file)])
    frames: tuple[FrameSelection, ...] = tuple(encoder.measure([conversation])[0].frames)
    make_video(file, frames=30, fps=5)
    stored = replace(conversation, videos=(replace(conversation.videos[0], frames=frames[0]),))
    with pytest.raises(RecordError, match=r"corrupt_video: .*a\.mp4"):
        encoder.encode(stored)
