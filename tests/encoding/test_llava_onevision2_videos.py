"""LLaVA-OneVision-2 with videos and with records of frames: equal to its processor and its trainer."""

import io
import json
import re
import tarfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from energon_packed import (
    ChatEncoder,
    Conversation,
    EncodedSample,
    MediaReference,
    PackedDataset,
    PackOptions,
    Reason,
    RecordError,
    StoredSample,
    VideoReference,
    normalize,
    pack,
)
from tests.golden.videos.cases import digest
from tests.golden.videos.ov2_inputs import collapsed, frame, image_settings, positions_of, write_tokenizer
from tests.internals import TIMESTAMPS_WRITTEN, VideoInfo, codec_for
from tests.outside import read_packs
from tests.videos import decoded, make_video

GOLDEN = Path(__file__).parent.parent / "golden" / "videos"
ANSWER = {"role": "assistant", "content": "A word."}
_NAMES = {"target_fps": "fps"}  # of the processor -> of this package


class Encoders:
    """Encoders by image settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, dict[tuple[Any, ...], ChatEncoder]()

    def get(self, patch: int, merge: int, least: int, most: int, **options: Any) -> ChatEncoder:
        key = (patch, merge, least, most, *options.items())
        if key not in self.made:
            folder = self.folder / "-".join(map(str, key[:4]))
            write_tokenizer(folder, image_settings(patch, merge, least, most))
            self.made[key] = ChatEncoder.from_pretrained(folder, **options)
        return self.made[key]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    return Encoders(tmp_path_factory.mktemp("onevision2"))


def image(pixels: np.ndarray[Any, Any]) -> MediaReference:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "BMP")
    return MediaReference(data=stream.getvalue())


def info(video: dict[str, Any]) -> VideoInfo:
    (height, width), fps, count = video["size"], float(Fraction(video["fps"])), video["frames"]
    upright: Any = {"height": height, "width": width}
    file: Any = {"has_audio": False, "container": "mp4", "codec": "h264", "num_bytes": 1, "decoded": False}
    times = np.arange(count) / fps
    return VideoInfo(num_frames=count, timestamps=times, fps=fps, **upright, **file)


VIDEOS = json.loads((GOLDEN / "llava_onevision2.json").read_text(encoding="utf-8"))
RECORDS = json.loads((GOLDEN / "llava_onevision2_records.json").read_text(encoding="utf-8"))


def spelled(encoder: ChatEncoder, sample: EncodedSample) -> str:
    return collapsed(encoder.tokenizer.decode(sample.input_ids))


def test_videos_equal_the_processor(encoders: Encoders) -> None:
    for number, case in enumerate(VIDEOS):
        options = {_NAMES.get(name, name): value for name, value in case["options"].items()}
        options = {"max_frames": 384, **options}  # the default of the processor, where ours is that of training
        encoder = encoders.get(*case["layout"], *case["limits"], **options)
        vision = encoder.vision
        assert vision is not None
        if "error" in case:
            with pytest.raises(RecordError, match="200x20 pixels: too narrow for 1600 pixels in steps"):
                vision.select_frames(info(case["videos"][0]))
            continue
        videos, indices = [], []
        for video in case["videos"]:
            selection = vision.select_frames(info(video))
            images = [image(frame(video["seed"], index, *video["size"])) for index in selection.indices]
            videos.append(VideoReference(file=None, frames=selection, images=tuple(images)))
            indices += selection.indices
        assert indices == case["indices"], (number, case["options"])
        record = normalize({"messages": [{"role": "user", "content": "?"}, ANSWER]})
        messages = (record.messages[0]._replace(content=case["text"]), record.messages[1])
        conversation = Conversation(messages=messages, videos=tuple(videos))
        sample = encoder.encode(conversation)
        assert spelled(encoder, sample)[:400] == case["rendered"], number
        assert len(sample.input_ids) == case["length"] == encoder.length(conversation)
        assert digest(sample.input_ids) == case["ids"]
        assert sample.image_grid_thw is not None
        grids = sample.image_grid_thw.tolist()
        assert all(grid[0] == 1 for grid in grids)
        changes = [g[1:] for g, before in zip(grids, [None, *grids], strict=False) if g != before]
        assert changes == case["grids"]
        assert digest(sample.patch_positions) == case["positions"]
        assert sample.pixel_values is not None
        flat = sample.pixel_values.reshape(-1)
        values = flat[:: max(len(flat) // 5, 1)][:5].tolist()
        assert values == pytest.approx(case["values"], abs=1e-5), number
        assert digest(sample.pixel_values) == case["pixels"], number


def conversation_of(case: dict[str, Any]) -> Conversation:
    side = case["layout"][0] * case["layout"][1]
    rows, columns = case["blocks"]
    files = []
    for positions in positions_of(case):
        stream = io.BytesIO()
        np.save(stream, positions)
        files.append(stream.getvalue())
    turns = [{"role": "user", "content": case["text"]}, ANSWER]
    turns += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}] * (case["turns"] - 1)
    count = len(case["times"])
    pictures = [frame(case["seed"], i, rows * side, columns * side) for i in range(count)]
    return normalize(
        {
            "messages": turns,
            "images": [image(pixels) for pixels in pictures],
            "patch_positions": files,
            "fps": case["fps"],
            "timestamp_decimal": case["timestamp_decimal"],
        }
    )


def test_records_of_frames_equal_the_trainer(encoders: Encoders) -> None:
    for number, case in enumerate(RECORDS):
        encoder = encoders.get(*case["layout"], 1, 10**6)
        conversation = conversation_of(case)
        sample = encoder.encode(conversation)
        # The chat template ends the last turn with a line break, the trainer does not.
        ids, labels = sample.input_ids[:-1], sample.labels[:-1]
        assert collapsed(encoder.tokenizer.decode(ids))[:400] == case["rendered"], number
        assert len(ids) == case["length"] == encoder.length(conversation) - 1
        assert (digest(ids), digest(labels)) == (case["ids"], case["labels"])
        assert digest(sample.patch_positions) == case["positions"], number
        assert sample.image_grid_thw is not None
        assert sample.image_grid_thw.tolist() == case["grids"], number


def timed(text: str, count: int = 2, **fields: Any) -> Conversation:
    """A record with the images of `count` frames of 2 x 1 tokens, at the indices 0, 15, 30, ..., of 30 per second."""
    grid = np.stack([np.zeros((6, 3), dtype=np.int64), *np.indices((6, 3))], axis=-1).reshape(-1, 3)
    files = []
    for index in range(count):
        stream = io.BytesIO()
        np.save(stream, grid + np.array([15 * index, 0, 0]))
        files.append(stream.getvalue())
    return normalize(
        {
            "messages": [{"role": "user", "content": text}, ANSWER],
            "images": [image(frame(1, index, 96, 48)) for index in range(count)],
            **{"patch_positions": files, "fps": 30},
            **fields,
        }
    )


BLOCK = "<|vision_start|>[2]<|vision_end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The trainer would replace the text between the images as well, and give the frames of both turns twice.
        ("First <image> then <image>?", f"First <0.0 seconds>{BLOCK}\n then <0.5 seconds>{BLOCK}\n?"),
        ("<image><image>", f"<0.0 seconds>{BLOCK}\n<0.5 seconds>{BLOCK}\n"),
        ("<image>\n \n<image>\n\nWhat?", f"<0.0 seconds>{BLOCK}\n<0.5 seconds>{BLOCK}\n\nWhat?"),
    ],
)
def test_text_between_frames_stays(encoders: Encoders, text: str, expected: str) -> None:
    encoder = encoders.get(16, 3, 1, 10**6)
    conversation = timed(text)
    sample = encoder.encode(conversation)
    assert spelled(encoder, sample).split("user\n")[1].split("<|im_end|>")[0] == expected
    assert encoder.length(conversation) == len(sample.input_ids)
    assert sample.image_grid_thw is not None
    assert sample.image_grid_thw.tolist() == [[2, 6, 3]]


def test_each_frame_of_two_videos_has_its_own_time(encoders: Encoders) -> None:
    encoder = encoders.get(16, 3, 1, 10**6)
    one = timed("<image>\n<image>\nA?")
    both = timed("<image>\n<image>\n<image>\n<image>\nB?", 4)
    # The second video starts again at frame 0, as files of two videos do.
    both = replace(both, patch_positions=one.patch_positions * 2)
    times = re.findall(r"<[\d.]+ seconds>", spelled(encoder, encoder.encode(both)))
    assert times == ["<0.0 seconds>", "<0.5 seconds>"] * 2


@pytest.mark.parametrize("decimals", [-1, 10, 10**9])
def test_a_number_of_decimals_that_is_not_possible(encoders: Encoders, decimals: int) -> None:
    encoder = encoders.get(16, 3, 1, 10**6)
    conversation = timed("<image><image>?", timestamp_decimal=decimals)
    for call in (encoder.encode, encoder.length):
        with pytest.raises(RecordError, match=rf"`timestamp_decimal` must be 1 to 9, got {decimals}") as error:
            call(conversation)
        assert error.value.reason is Reason.UNSUPPORTED_FIELD


def test_without_fps_there_are_no_timestamps(encoders: Encoders) -> None:
    encoder = encoders.get(16, 3, 1, 10**6)
    for fps in (None, 0, -2):
        assert "seconds" not in spelled(encoder, encoder.encode(timed("<image>\n<image>", fps=fps)))


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedMultiMixQASample", "MultiMixQASample"])
def test_packs_of_earlier_releases_have_no_timestamps(encoders: Encoders, flavor: str) -> None:
    """They have `fps` without a mark of timestamps, and lengths without them."""
    encoder = encoders.get(16, 3, 1, 10**6)
    new = timed("<image>\n<image>\nWhat?")
    old = replace(new, timestamps=False)
    assert encoder.length(new) > encoder.length(old) == encoder.length(replace(new, fps=None))
    codec = codec_for(flavor)
    for conversation in (replace(new, timestamps=True), old):
        images = tuple(replace(image, extension="bmp") for image in conversation.images)
        stored = StoredSample(replace(conversation, images=images), length=1)
        parts = dict(codec.write([stored]))
        assert (b'"timestamps"' in parts["json"]) == conversation.timestamps  # without it, bytes are as they were
        (read,) = codec.read({"__key__": "k", **parts})
        assert read.conversation == conversation
        assert read.conversation.timestamps == conversation.timestamps
        assert encoder.length(read.conversation) == encoder.length(conversation)


def test_lengths_of_the_layout_are_those_of_the_trainer(encoders: Encoders, tmp_path: Path) -> None:
    cases = [case for case in RECORDS if case["layout"] == [16, 3]]
    records = []
    for number, case in enumerate(cases):
        conversation, (files, images) = conversation_of(case), ([], [])
        for i, reference in enumerate(conversation.patch_positions):
            files.append(f"{number}_{i}.npy")
            (tmp_path / files[-1]).write_bytes(reference.read())
        for i, reference in enumerate(conversation.images):
            images.append(f"{number}_{i}.bmp")
            (tmp_path / images[-1]).write_bytes(reference.read())
        turns = [{"role": message.role, "content": message.content} for message in conversation.messages]
        fields = {"fps": case["fps"], "timestamp_decimal": case["timestamp_decimal"]}
        records.append({"id": str(number), "messages": turns, "images": images, "patch_positions": files, **fields})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = pack(
        PackOptions(
            inputs=[tmp_path / "data.jsonl"],
            output_dir=tmp_path / "out",
            encoder=encoders.get(16, 3, 1, 10**6),
            layout="llava-onevision2",
            seq_len=1024,
            workers=1,
        )
    )
    lengths: dict[str, int] = {}
    for parts in read_packs(result.shards).values():
        lengths |= dict(zip(parts["json"]["ids"], parts["json"]["lengths"], strict=True))
    # The chat template ends the last turn with a line break, the trainer does not.
    assert lengths == {str(number): case["length"] + 1 for number, case in enumerate(cases)}
    timestamps = sum(bool(case["fps"]) for case in cases)
    assert result.manifest.notes == {TIMESTAMPS_WRITTEN: timestamps}
    loaded = PackedDataset(result.shards, encoders.get(16, 3, 1, 10**6))
    assert sum(len(loaded[index]) for index in range(len(loaded))) == len(cases)


def test_unpacked_samples_of_the_other_project(encoders: Encoders, tmp_path: Path) -> None:
    """Its `convert_jsonl_to_webdataset_simple.py` lists the members of a sample by `image_keys` and the like."""
    expected = timed("<image>\n<image>\nWhat?", timestamp_decimal=2)
    images = {f"img_{i:03d}.bmp": reference.read() for i, reference in enumerate(expected.images)}
    files = {f"patch_positions_{i:03d}.npy": file.read() for i, file in enumerate(expected.patch_positions)}
    turns = [{"role": message.role, "content": message.content} for message in expected.messages]
    value = {"messages": turns, "image_keys": [*images], "fps": 30, "timestamp_decimal": 2}
    parts = images | files | {"json": json.dumps(value | {"patch_positions_keys": [*files]}).encode()}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in parts.items():
            member = tarfile.TarInfo(f"s0.{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    encoder = encoders.get(16, 3, 1, 10**6)
    result = pack(
        PackOptions(inputs=[tmp_path / "a.tar"], output_dir=tmp_path / "out", encoder=encoder, seq_len=512, workers=1)
    )
    assert (result.manifest.notes, result.manifest.unused_fields) == ({TIMESTAMPS_WRITTEN: 1}, {})
    ((sample,),) = PackedDataset(result.shards, encoder)
    wanted = encoder.encode(expected)
    assert sample.input_ids.tolist() == wanted.input_ids.tolist()
    assert sample.patch_positions is not None
    assert sample.patch_positions.tolist() == wanted.patch_positions.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(("extension", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")])
def test_a_video_file_is_its_decoded_frames(encoders: Encoders, tmp_path: Path, extension: str, codec: str) -> None:
    encoder = encoders.get(16, 3, 1, 10**6)
    path = make_video(tmp_path / f"a.{extension}", codec=codec, frames=45, fps=10)
    record = {"messages": [{"role": "user", "content": "<video>\nWhat?"}, ANSWER], "videos": [str(path)]}
    conversation = normalize(record)
    (frames,) = encoder.measure([conversation])[0].frames
    assert frames.indices == (0, 6, 13, 19, 25, 31, 38, 44)  # 8 of 4.5 seconds
    sample = encoder.encode(conversation)
    stored = [pixels for _, pixels in decoded(path)]
    as_images = tuple(image(np.array(stored[index])) for index in frames.indices)
    same = encoder.encode(replace(conversation, videos=(VideoReference(file=None, frames=frames, images=as_images),)))
    times = "".join(f"<{index / 10:.1f} seconds>[1]" for index in frames.indices)
    text = spelled(encoder, sample).replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    assert text.startswith(f"<|im_start|>user\n{times}\nWhat?")
    assert sample.input_ids.tolist() == same.input_ids.tolist()
    assert sample.pixel_values is not None
    assert same.pixel_values is not None
    assert sample.pixel_values.numpy().tobytes() == same.pixel_values.numpy().tobytes()
    assert sample.patch_positions is not None
    assert sorted(set(sample.patch_positions[:, 0].tolist())) == list(frames.indices)


def test_frames_of_onevision_1_5_are_images_without_times(encoders: Encoders, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, image_settings(14, 2, 1, 10**6))
    encoder = ChatEncoder.from_pretrained(folder, vision_family="llava_onevision1_5")
    path = make_video(tmp_path / "a.mp4", frames=45, fps=10)
    turns = [{"role": "user", "content": "<video>\nWhat?"}, ANSWER]
    conversation = normalize({"messages": turns, "videos": [str(path)]})
    sample = encoder.encode(conversation)
    (frames,) = encoder.measure([conversation])[0].frames
    assert len(frames.indices) == 4  # one per second
    assert "seconds" not in spelled(encoder, sample)
    assert sample.image_grid_thw is not None
    assert len(sample.image_grid_thw) == 4
