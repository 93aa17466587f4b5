"""Video files of the Qwen families equal the processors and models of Transformers: golden files of 630 samples.

tests/golden/videos/README.md describes how they were generated. The processors need torchvision, the tests do not.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from energon_packed import ConfigError, RecordError, VisionFamily
from energon_packed.records import FrameSelection
from tests.golden.videos.cases import FAMILIES, FOLDERS, PATCH, Case, Video, cases, digest
from tests.internals import EncoderSettings, VideoInfo, load_vision

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
        duration=video.num_frames / video.fps,
        height=video.height,
        width=video.width,
        rotation=0,
        mirrored=False,
        has_audio=False,
        container="mov",
        codec="h264",
        num_bytes=1,
        decoded=False,
    )


def ids_of(case: Case, vision: VisionFamily, selections: list[FrameSelection], tokenizer: Tokenizer) -> np.ndarray:
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
        positions = vision.position_ids(
            ids, image, np.array(images, dtype=np.int64).reshape(-1, 3), video, video_grids, seconds
        )
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
