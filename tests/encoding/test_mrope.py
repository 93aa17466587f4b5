"""M-RoPE positions equal those of Transformers' own models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from energon_packed import ChatEncoder, EncodedSample, Reject, normalize
from tests.internals import DemoDataset, mrope_positions

IMAGE = 9


def reference_positions(model_class: Any, config: Any, ids: np.ndarray, grids: np.ndarray) -> np.ndarray:
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    tokens = torch.from_numpy(ids)[None]
    positions, _ = model_class.get_rope_index(
        model,
        input_ids=tokens,
        mm_token_type_ids=(tokens == IMAGE).int(),
        image_grid_thw=torch.from_numpy(grids) if len(grids) else None,
    )
    return positions[:, 0].numpy()


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(Qwen2VLModel, Qwen2VLConfig()), (Qwen2_5_VLModel, Qwen2_5_VLConfig()), (Qwen3VLModel, Qwen3VLConfig())],
)
def test_random_samples_equal_get_rope_index(model_class: Any, config: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        grids = np.array(
            [[1, 2 * rng.integers(1, 9), 2 * rng.integers(1, 9)] for _ in range(rng.integers(0, 4))], dtype=np.int64
        ).reshape(-1, 3)
        parts = [np.ones(rng.integers(0, 5), dtype=np.int64)]
        for _, h, w in grids:
            parts += [np.full(h * w // 4, IMAGE), np.ones(rng.integers(1, 6), dtype=np.int64)]
        ids = np.concatenate(parts)
        if len(ids):
            expected = reference_positions(model_class, config, ids, grids)
            assert (mrope_positions(ids, IMAGE, grids, 2) == expected).all()


def test_golden() -> None:
    # Two words, an image of 2 x 3 merged tokens, one word: the drawing in the module's docstring.
    ids = np.array([1, 2, *[IMAGE] * 6, 3])
    positions = mrope_positions(ids, IMAGE, np.array([[1, 4, 6]]), 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_a_wrong_number_of_image_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="`input_ids` has 5 image tokens, but `grids` require 6"):
        mrope_positions(np.full(5, IMAGE), IMAGE, np.array([[1, 4, 6]]), 2)


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
