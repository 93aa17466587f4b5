"""M-RoPE positions equal those of Transformers' own models."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from energon_packed import ChatEncoder, ConfigError, EncodedSample, EncoderSettings, Reject, VisionFamily, normalize
from tests.internals import DemoDataset, MediaTokens, load_vision, mrope_positions

TEXT, IMAGE, VIDEO = 1, 9, 8
FAMILIES = {
    "qwen2_vl": "Qwen2VLVision",
    "qwen2_5_vl": "Qwen25VLVision",
    "qwen3_vl": "Qwen3VLVision",
    "qwen3_vl_moe": "Qwen3VLVision",
    "qwen3_5": "Qwen3VLVision",
    "qwen3_5_moe": "Qwen3VLVision",
}


def reference_positions(model_type: str, ids: np.ndarray, grids: Any, video_grids: Any, seconds: Any) -> np.ndarray:
    config = CONFIG_MAPPING[model_type]()
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    model_class = getattr(module, MODEL_MAPPING_NAMES[model_type])
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    tokens = torch.from_numpy(ids)[None]
    positions, _ = model_class.get_rope_index(
        model,
        input_ids=tokens,
        mm_token_type_ids=(tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
        image_grid_thw=torch.from_numpy(grids) if len(grids) else None,
        video_grid_thw=torch.from_numpy(video_grids) if len(video_grids) else None,
        second_per_grid_ts=torch.from_numpy(seconds).float() if len(seconds) else None,
    )
    return np.asarray(positions[:, 0])


def layout(rng: np.random.Generator, *, splits_videos: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Text, images and videos in random order: ids (L,), image grids (images, 3), video grids (videos, 3)."""
    parts, images, videos = [np.full(rng.integers(0, 5), TEXT)], [], []
    for is_video in rng.random(rng.integers(0, 6)) < 0.5:
        t, h, w = [rng.integers(1, 6) if is_video else 1, *(2 * rng.integers(1, 9, 2))]
        (videos if is_video else images).append([t, h, w])
        token, count = (VIDEO, h * w // 4) if is_video else (IMAGE, h * w // 4)
        between = np.full(rng.integers(1, 4), TEXT)
        # Qwen3-VL has the time of each temporal patch as text before its tokens.
        runs = [np.full(count, token), between] * t if splits_videos else [np.full(count * t, token), between]
        parts += runs
    ids = np.concatenate(parts).astype(np.int64)
    return ids, *(np.array(grids, dtype=np.int64).reshape(-1, 3) for grids in (images, videos))


def family_of(model_type: str, tmp_path: Path) -> VisionFamily | None:
    vision_config = CONFIG_MAPPING[model_type]().vision_config
    seconds = {"tokens_per_second": vision_config.tokens_per_second} if model_type == "qwen2_5_vl" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": seconds}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    return load_vision(EncoderSettings(processor=tmp_path))


@pytest.mark.parametrize(("model_type", "name"), FAMILIES.items())
def test_generated_layouts_equal_get_rope_index(model_type: str, name: str, tmp_path: Path) -> None:
    rng, vision = np.random.default_rng(0), family_of(model_type, tmp_path)
    assert type(vision).__name__ == name
    assert vision is not None
    videos = 0
    for _ in range(40):
        ids, grids, video_grids = layout(rng, splits_videos=name == "Qwen3VLVision")
        seconds = rng.uniform(0.1, 4, len(video_grids)) if name == "Qwen25VLVision" else np.zeros(0)
        if not len(ids):
            continue
        expected = reference_positions(model_type, ids, grids, video_grids, seconds)
        media = MediaTokens(IMAGE, grids, VIDEO, video_grids, seconds if len(seconds) else None)
        found = vision.position_ids(ids, media)
        assert found is not None
        assert found.tolist() == expected.tolist()
        videos += len(video_grids)
    assert videos > 40


def test_every_model_type_of_a_family_is_compared() -> None:
    """Model types of the families with M-RoPE have `get_rope_index`, and the test above has each of them."""
    has_rope_index = {
        path.parent.name
        for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        if re.search(r"def get_rope_index", path.read_text(encoding="utf-8"))
    }
    of_families = {name for name in CONFIG_MAPPING if has_mrope(name)}
    assert of_families == set(FAMILIES)
    assert of_families <= has_rope_index


def has_mrope(name: str) -> bool:
    try:
        vision = load_vision(EncoderSettings(vision_family=name))
    except ConfigError:
        return False
    return vision is not None and vision.position_ids(np.zeros(1, dtype=np.int64), MediaTokens(IMAGE)) is not None


def test_golden() -> None:
    # Two words, an image of 2 x 3 merged tokens, one word: the drawing in the module's docstring.
    ids = np.array([1, 2, *[IMAGE] * 6, 3])
    positions = mrope_positions(ids, MediaTokens(IMAGE, np.array([[1, 4, 6]])), 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_a_wrong_number_of_image_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="`input_ids` has 5 image tokens, but `grids` require 6"):
        mrope_positions(np.full(5, IMAGE), MediaTokens(IMAGE, np.array([[1, 4, 6]])), 2)


def test_texts_in_a_batch_are_as_beside_an_image(demo: DemoDataset, tokenizer_dir: Path) -> None:
    """A batch without images takes a shorter way: the same tokens, labels and positions."""
    encoder = ChatEncoder.from_pretrained(tokenizer_dir)
    records = [json.loads(line) for line in demo.jsonl.open() if "demo-" in line]
    talks = [normalize(record, image_root=str(demo.jsonl.parent)) for record in records]
    texts = [talk for talk in talks if not talk.images][:8]
    silent = normalize({"messages": [{"role": "user", "content": "No answer."}]})
    image = next(talk for talk in talks if talk.images)
    alone = encoder.encode_many([*texts[:4], silent, *texts[4:]])
    beside = encoder.encode_many([*texts[:4], silent, *texts[4:], image])[:-1]
    for one, other in zip(alone, beside, strict=True):
        if isinstance(one, Reject):
            assert one == other
            continue
        assert isinstance(other, EncodedSample)
        assert one.id == other.id
        for name in ("input_ids", "labels", "position_ids"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert ours.dtype == theirs.dtype
            assert (ours == theirs).all(), name
    assert sum(isinstance(one, Reject) for one in alone) == 1
