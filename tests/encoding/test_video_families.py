"""Video files of the Qwen families equal the processors and models of Transformers: golden files of 630 samples.

tests/golden/videos/README.md describes how they were generated. The processors need torchvision, the tests do not.
"""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from energon_packed import ChatEncoder, ConfigError, EncoderSettings, RecordError, VisionFamily, normalize
from tests.golden.videos.cases import FAMILIES, FILES, FOLDERS, MESSAGES, PATCH, Case, Video, cases, digest
from tests.internals import MediaTokens, VideoInfo, VideoSettings, load_vision
from tests.videos import decoded, make_video

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(GOLDEN / "tokenizer" / "tokenizer.json"))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[tuple[str, int], VisionFamily]:
    """The family of each folder, by family and index of the folder."""
    loaded = {}
    for family in FAMILIES:
        for index, settings in enumerate(FOLDERS[family]):
            folder = tmp_path_factory.mktemp(f"{family}-{index}")
            images = {"patch_size": PATCH[family], "merge_size": 2, "temporal_patch_size": 2}
            images |= {"min_pixels": 3136, "max_pixels": 10**6, "image_processor_type": "Qwen2VLImageProcessor"}
            if family == "qwen3_vl":
                images |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
            names = {"processor_class": NAMES[family]}
            (folder / "preprocessor_config.json").write_text(json.dumps(images | names))
            if settings is not None and index % 2:
                (folder / "processor_config.json").write_text(json.dumps({"video_processor": settings}))
            elif settings is not None:
                (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
            vision = load_vision(EncoderSettings(processor=folder))
            assert vision is not None
            vision.check_tokenizer(tokenizer)
            loaded[family, index] = vision
    return loaded


def info_of(video: Video) -> VideoInfo:
    times = np.arange(video.num_frames) / video.fps
    return VideoInfo(
        num_frames=video.num_frames,
        timestamps=times,
        fps=float(video.fps),
        height=video.height,
        width=video.width,
        has_audio=False,
        container="mov",
        codec="h264",
        num_bytes=1,
        decoded=False,
    )


def ids_of(case: Case, vision: VisionFamily, selections: list[Any], tokenizer: Tokenizer) -> np.ndarray:
    """Token ids of a case: its text with the run of each medium."""
    image, video = tokenizer.token_to_id(vision.image_token), tokenizer.token_to_id(vision.video_token)
    videos = iter([vision.video_token_run(selection) for selection in selections])
    ids: list[int] = []
    for token in tokenizer.encode(case.text, add_special_tokens=False).ids:
        if token not in (image, video):
            ids.append(token)
            continue
        assert token == video or case.image is not None
        run = next(videos) if token == video else vision.image_token_run(*case.image)
        made = [token] * run.length if run.make is None else run.make().tolist()
        assert len(made) == run.length
        ids += made
    return np.array(ids, dtype=np.int64)


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_equal_the_processor(family: str, families: dict[Any, VisionFamily], tokenizer: Tokenizer) -> None:
    lines = (GOLDEN / "videos" / f"{family}.jsonl").read_text().splitlines()
    equal = rejected = 0
    for case, line in zip(cases(family), lines, strict=True):
        expected, vision = json.loads(line), families[family, case.folder]
        if expected.get("error") in ("ValueError", "ZeroDivisionError"):
            with pytest.raises(RecordError):
                [vision.select_frames(info_of(video), case.settings) for video in case.videos]
            rejected += 1
            continue
        selections = [vision.select_frames(info_of(video), case.settings) for video in case.videos]
        ids = ids_of(case, vision, selections, tokenizer)
        parts = [
            vision.preprocess_video(selection, map(video.frame, selection.indices))
            for selection, video in zip(selections, case.videos, strict=True)
        ]
        image, video = tokenizer.token_to_id(vision.image_token), tokenizer.token_to_id(vision.video_token)
        images = [(1, *vision.grid(*case.image))] if case.image is not None else []
        seconds = vision.second_per_grid_ts(selections)
        video_grids = np.array([grid for _, grid in parts], dtype=np.int64)
        grids = np.array(images, dtype=np.int64).reshape(-1, 3)
        positions = vision.position_ids(ids, MediaTokens(image, grids, video, video_grids, seconds))
        assert positions is not None
        pixels = torch.cat([values for values, _ in parts]).numpy()
        found = {
            "indices": [list(selection.indices) for selection in selections],
            "grids": video_grids.tolist(),
            "tokens": len(ids),
            "ids": digest(ids),
            "positions": digest(positions),
            "last": positions[:, -1].tolist(),
            "pixels": digest(pixels),
            "values": [round(float(value), 5) for value in pixels.ravel()[:: max(1, pixels.size // 3)][:3]],
        }
        if seconds is not None:
            found["seconds"] = seconds.astype(np.float32).tolist()
        assert found == expected, f"case {case.number}"
        equal += 1
    assert (equal >= 190, rejected >= 7) == (True, True), (equal, rejected)


def test_frames_and_sizes_equal_qwen_vl_utils() -> None:
    """The number of frames of Qwen3-VL may be odd, as its processor selects them; qwen_vl_utils leaves one out."""
    families = {name: load_vision(EncoderSettings(vision_family=name)) for name in ("qwen2_5_vl", "qwen3_vl")}
    compared = dict.fromkeys(families, 0)
    for line in (GOLDEN / "videos" / "qwen_vl_utils.jsonl").read_text().splitlines():
        name, video, settings, frames, size = json.loads(line)
        vision = families[name]
        assert vision is not None
        selection = vision.select_frames(info_of(Video(0, **video)), settings)
        found = len(selection.indices)
        assert found == frames or (name == "qwen3_vl" and found == frames + 1), line
        if found == frames:
            assert selection.resized == tuple(size), line
            compared[name] += 1
    assert compared["qwen2_5_vl"] == 150
    assert compared["qwen3_vl"] > 100


def loaded(**settings: Any) -> VisionFamily:
    vision = load_vision(EncoderSettings(**settings))
    assert vision is not None
    return vision


@pytest.mark.parametrize("family", FAMILIES)
def test_one_frame_is_in_memory_at_a_time(family: str) -> None:
    video, alive = Video(1, 30, 30, 48, 64), []
    vision = loaded(vision_family=family, fps=30)
    selection = vision.select_frames(info_of(video))

    def frames() -> Iterator[np.ndarray]:
        for index in selection.indices:
            assert sum(reference() is not None for reference in alive) <= 1  # the loop variable of the caller
            frame = video.frame(index)
            alive.append(weakref.ref(frame))
            yield frame
            del frame

    values, grid = vision.preprocess_video(selection, frames())
    assert (len(alive), values.shape[0]) == (30, np.prod(grid))
    assert values.untyped_storage().nbytes() == values.nbytes


@pytest.mark.parametrize("missing", [1, -1])
def test_a_file_with_other_frames_is_an_error(missing: int) -> None:
    vision, video = loaded(vision_family="qwen2_5_vl"), Video(1, 9, 3, 48, 64)
    selection = vision.select_frames(info_of(video))
    frames = [video.frame(index) for index in (*selection.indices, 8)][: len(selection.indices) - missing]
    with pytest.raises(ValueError, match=rf"must yield {len(selection.indices)} frames, got "):
        vision.preprocess_video(selection, frames)


def test_resolved_settings_are_in_the_selection() -> None:
    info = info_of(Video(0, 100, 10, 48, 64))
    published = {"min_frames": 4, "max_frames": 768, "min_pixels": 100_352, "max_pixels": 602_112}
    published |= {"fps": 2.0, "total_pixels": 90_316_800}
    selection = loaded(vision_family="qwen2_5_vl").select_frames(info)
    assert selection.settings == published
    assert selection.resized == (280, 392)
    assert selection.timestamps == tuple(index / 10 for index in selection.indices)
    vision = loaded(vision_family="qwen2_5_vl", num_frames=6, video_max_pixels=50_176)
    of_option = {"num_frames": 6, "min_pixels": 50_176, "max_pixels": 50_176, "total_pixels": 90_316_800}
    assert vision.select_frames(info).settings == of_option
    # A record wins over an option, and a limit of the record moves the limit that contradicts it.
    of_record = {"fps": 1.0, "min_frames": 4, "max_frames": 768, "min_pixels": 60_000, "max_pixels": 60_000}
    selection = vision.select_frames(info, {"fps": 1.0, "min_pixels": 60_000})
    assert selection.settings == of_record | {"total_pixels": 90_316_800}
    assert len(selection.indices) == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fps": 0}, "`fps` must be a number above 0, got 0"),
        ({"fps": "2"}, "`fps` must be a number above 0, got '2'"),
        ({"fps": float("nan")}, "`fps` must be a number above 0, got nan"),
        ({"num_frames": 2.5}, "`num_frames` must be an integer of at least 1, got 2.5"),
        ({"num_frames": True}, "`num_frames` must be an integer of at least 1, got True"),
        ({"fps": 1, "num_frames": 4}, "Set either `fps` or `num_frames`, got 1 and 4"),
        ({"min_pixels": 900, "max_pixels": 800}, "`min_pixels` must be at most `max_pixels` 800, got 900"),
        ({"min_frames": 9, "max_frames": 8}, "`min_frames` must be at most `max_frames` 8, got 9"),
        ({"video_start": 3}, "Qwen25VLVision has no setting `video_start` for a video"),
        ({"max_total_pixels": 3}, "Qwen25VLVision has no setting `max_total_pixels` for a video"),
    ],
)
def test_invalid_settings_of_a_record_reject_it(settings: dict[str, Any], message: str) -> None:
    vision = loaded(vision_family="qwen2_5_vl")
    with pytest.raises(RecordError, match="^unsupported_field: .*" + message):
        vision.select_frames(info_of(Video(0, 30, 10, 48, 64)), settings)


def test_videos_that_a_family_cannot_use_are_rejected() -> None:
    vision = loaded(vision_family="qwen2_5_vl", num_frames=8)
    with pytest.raises(RecordError, match=r"unsupported_video: `num_frames` must be at most the 5 frames .*max_fr"):
        vision.select_frames(info_of(Video(0, 5, 10, 48, 64)))
    for family in FAMILIES:
        vision = loaded(vision_family=family)
        with pytest.raises(RecordError, match="unsupported_video: the file has 1 frame, and a temporal patch 2"):
            vision.select_frames(info_of(Video(0, 1, 10, 48, 64)))
        with pytest.raises(RecordError, match="unsupported_video: .* at most 200 times the other"):
            vision.select_frames(info_of(Video(0, 9, 10, 40, 9000)))


def test_frames_of_image_families_are_images(text_tokenizer_dir: Path) -> None:
    info = info_of(Video(0, 100, 10, 48, 64))
    vision = loaded(vision_family="llava_onevision15")
    assert vision.video_token is None
    selection = vision.select_frames(info)
    assert selection.indices == tuple(range(0, 100, 10))  # a frame per second
    assert (selection.resized, selection.settings) == (None, {"fps": 1.0, "min_frames": 1, "max_frames": 32})
    assert vision.frames_text(selection) == "<image>" * 10
    assert len(vision.select_frames(info_of(Video(0, 3000, 10, 48, 64))).indices) == 32
    assert vision.select_frames(info, {"num_frames": 4}).indices == (0, 25, 50, 75)
    assert vision.select_frames(info_of(Video(0, 3, 10, 4, 4)), {"num_frames": 4}).indices == (0, 1, 2)
    assert vision.select_frames(info_of(Video(0, 1, 10, 4, 4))).indices == (0,)
    with pytest.raises(RecordError, match="unsupported_field: .* has no setting `max_pixels`"):
        vision.select_frames(info, {"max_pixels": 400})
    with pytest.raises(ConfigError, match="`video_max_pixels` must not be set .* whose frames are images"):
        loaded(vision_family="llava_onevision15", video_max_pixels=400)
    with pytest.raises(ConfigError, match="`video_min_pixels` must be at most `video_max_pixels` 400, got 500"):
        loaded(vision_family="qwen2_vl", video_min_pixels=500, video_max_pixels=400)
    with pytest.raises(ConfigError, match="`fps` need an image processor"):
        ChatEncoder.from_pretrained(text_tokenizer_dir, fps=3)


def test_settings_of_videos_are_in_the_fingerprint_if_they_are_set(tokenizer_dir: Path) -> None:
    plain = ChatEncoder.from_pretrained(tokenizer_dir)
    of_family = ChatEncoder.from_pretrained(tokenizer_dir, fps=2, min_frames=4, total_pixels=90_316_800)
    assert of_family.fingerprint() == plain.fingerprint()
    other = ChatEncoder.from_pretrained(tokenizer_dir, fps=3)
    assert other.fingerprint() != plain.fingerprint()
    assert not other.has_fingerprint(plain.fingerprint())
    assert not plain.has_fingerprint(other.fingerprint())
    packed = {"loss_on": "assistant", "tokenizer": str(tokenizer_dir)}
    assert other.differences(packed, template="", fingerprint="", images={}) == ["`fps` was not set, now 3"]


def test_settings_of_a_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(names))
    vision = loaded(processor=tmp_path)
    assert vision.videos == type(vision).videos == loaded(vision_family="qwen2_5_vl").videos
    assert vision.tokens_per_second == 2  # type: ignore[attr-defined]
    seconds = vision.second_per_grid_ts([vision.select_frames(info_of(Video(0, 60, 30, 48, 64)))])
    assert seconds is not None
    assert seconds.tolist() == [1.0]  # two frames of four in two seconds
    ids, grids = np.array([6] * 4 + [9]), np.array([[2, 2, 4]])
    for vision_config, expected in (({"tokens_per_second": 3}, 3), ({"depth": 1}, 4)):
        config = {"model_type": "qwen2_5_vl", "vision_config": vision_config}
        (tmp_path / "config.json").write_text(json.dumps(config))
        media = MediaTokens(5, np.zeros((0, 3), int), 6, grids, seconds)
        positions = loaded(processor=tmp_path).position_ids(ids, media)
        assert positions is not None
        assert positions[0].tolist() == [0, 0, expected, expected, 2]
    # Settings that the family does not have are an error only for videos.
    of_videos = tmp_path / "video_preprocessor_config.json"
    for name, value, expected in (("resample", 2, 3), ("patch_size", 16, 14), ("temporal_patch_size", 4, 2)):
        of_videos.write_text(json.dumps({name: value}))
        vision = loaded(processor=tmp_path)
        message = f"`{name}` of the video processor must be {expected} for Qwen25VLVision, got {value}"
        with pytest.raises(ConfigError, match=message):
            vision.select_frames(info_of(Video(0, 60, 30, 48, 64)))
    for invalid in ({"size": "large"}, {"image_mean": 5}, [1]):
        of_videos.write_text(json.dumps(invalid))
        with pytest.raises(ConfigError, match="the processor folder has invalid settings of videos: "):
            loaded(processor=tmp_path)
    without = json.loads(tokenizer.to_str().replace("<|video_pad|>", "<|other|>"))
    vision = loaded(vision_family="qwen2_vl")
    vision.check_tokenizer(Tokenizer.from_str(json.dumps(without)))
    with pytest.raises(ConfigError, match="the tokenizer has no <|video_pad|> token, which videos need"):
        vision.video_token_run(vision.select_frames(info_of(Video(0, 60, 30, 48, 64))))


def test_settings_have_fps_or_num_frames() -> None:
    with pytest.raises(ConfigError, match="Set either `fps` or `num_frames`"):
        VideoSettings(fps=1, num_frames=2)


@pytest.fixture(scope="module")
def encoders(families: dict[tuple[str, int], VisionFamily]) -> dict[str, ChatEncoder]:
    tokenizer = AutoTokenizer.from_pretrained(str(GOLDEN / "tokenizer"))
    return {family: ChatEncoder(tokenizer, families[family, 0]) for family in FAMILIES}


def turns_with(media: str) -> list[dict[str, str]]:
    return [turn | {"content": turn["content"].replace("{media}", media)} for turn in MESSAGES]


@pytest.mark.parametrize("number", range(len(FILES)))
def test_real_files_equal_the_processor(number: int, encoders: dict[str, ChatEncoder], tmp_path: Path) -> None:
    settings = dict(FILES[number])
    path = make_video(tmp_path / f"video.{settings.pop('extension')}", **settings)
    all_frames = [np.rot90(frame, -settings.get("rotation", 0) // 90) for _, frame in decoded(path)]
    conversation = normalize({"messages": turns_with("<video>"), "videos": [str(path)]})
    expected = json.loads((GOLDEN / "videos" / "files.json").read_text())[number]
    for family, outputs in zip(FAMILIES, expected, strict=True):
        encoder = encoders[family]
        sample, measurement = encoder.encode(conversation), encoder.measure([conversation])[0]
        vision, (selection,) = encoder.vision, measurement.frames
        assert vision is not None
        assert sample.position_ids is not None
        assert sample.pixel_values_videos is not None
        assert sample.video_grid_thw is not None
        found = {
            "indices": [list(selection.indices)],
            "grids": sample.video_grid_thw.tolist(),
            "tokens": measurement.length,
            "ids": digest(sample.input_ids),
            "positions": digest(sample.position_ids),
            "last": sample.position_ids[:, -1].tolist(),
        }
        if sample.second_per_grid_ts is not None:
            found["seconds"] = sample.second_per_grid_ts.astype(np.float32).tolist()
        assert found == outputs
        # The preprocessing of frames equals the processor, as above; here it is compared on the frames of PyAV.
        values, _ = vision.preprocess_video(selection, [all_frames[index] for index in selection.indices])
        assert torch.equal(sample.pixel_values_videos, values)


def test_frames_are_the_steps_of_torch_without_its_index_after_the_last_frame() -> None:
    """`torch.arange` of the processor may return one step more, which is the number of frames."""
    vision, longer = loaded(vision_family="qwen2_vl"), 0
    for total in range(2, 300):
        for count in range(2, total + 1, 2):
            steps = torch.arange(0, total, total / count).int().tolist()
            longer += len(steps) > count
            assert vision.frame_indices(total, 30, VideoSettings(num_frames=count)).tolist() == steps[:count]
            assert steps[count:] in ([], [total])
    assert longer > 100


def test_a_video_of_an_image_family_equals_its_frames_as_images(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(GOLDEN / "tokenizer"))
    vision = loaded(vision_family="llava_onevision15")
    path = make_video(tmp_path / "video.mp4", frames=25, fps=5, rotation=90)
    frames = [Image.fromarray(np.rot90(frame, -1)) for _, frame in decoded(path)]
    images = []
    for number, frame in enumerate(frames[::5]):  # a frame per second
        frame.save(tmp_path / f"{number}.png")
        images.append(str(tmp_path / f"{number}.png"))
    records = [{"videos": [str(path)]}, {"images": images}]
    samples = [
        ChatEncoder(tokenizer, vision).encode(normalize({"messages": turns_with(media)} | files))
        for media, files in zip(["<video>", "<image>" * 5], records, strict=True)
    ]
    video, image = samples
    assert video.pixel_values_videos is None
    assert np.array_equal(video.input_ids, image.input_ids)
    assert torch.equal(video.pixel_values, image.pixel_values)
    assert torch.equal(video.image_grid_thw, image.image_grid_thw)
