"""Positions by the class of a model, and what a model needs of a row."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_families import write_folder
from transformers import Glm4vConfig, LlavaConfig, MiniCPMV4_7Config, Qwen2VLConfig

from energon_packed import BatchError, ChatEncoder, EncodedSample, PaddingFreeCollator, RecordError
from tests.encoding.test_processor_vision import pictures, talk
from tests.internals import MediaTokens, ModelClass, ModelNeeds, VisionInputs, mrope_positions

IMAGE = 399


def folder_of(path: Path, config: object) -> Path:
    config.save_pretrained(path)  # type: ignore[attr-defined]
    return path


@pytest.mark.parametrize("config", [Qwen2VLConfig(), Glm4vConfig()], ids=["qwen2_vl", "glm4v"])
def test_positions_equal_the_rule_of_the_paper_for_random_layouts(tmp_path: Path, config: object) -> None:
    """Two implementations: the model's `get_rope_index`, and `mrope_positions`."""
    model = ModelClass.of(folder_of(tmp_path, config))
    assert model is not None
    assert model.position_axes == 3
    rng = np.random.default_rng(0)
    for _ in range(500):
        sides = rng.integers(1, 6, (int(rng.integers(0, 4)), 2))
        grids = np.array([[1, 2 * h, 2 * w] for h, w in sides], dtype=np.int64).reshape(-1, 3)
        parts = [np.arange(rng.integers(1, 9))]
        for h, w in sides:
            parts += [np.full(h * w, IMAGE), np.arange(rng.integers(1, 9))]
        ids = np.concatenate(parts).astype(np.int64)
        found = model.position_ids(ids, MediaTokens(IMAGE, grids))
        assert found is not None
        assert found.tolist() == mrope_positions(ids, MediaTokens(IMAGE, grids), 2).tolist()


def test_images_without_a_token_between_them_have_no_positions(tmp_path: Path) -> None:
    model = ModelClass.of(folder_of(tmp_path, Glm4vConfig()))
    assert model is not None
    ids = np.array([1, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 2], dtype=np.int64)
    with pytest.raises(RecordError, match="unsupported_media: Glm4vModel has no positions for this sample"):
        model.position_ids(ids, MediaTokens(IMAGE, np.array([[1, 2, 2], [1, 4, 4]])))


def test_other_models_have_positions_of_one_axis(tmp_path: Path) -> None:
    model = ModelClass.of(folder_of(tmp_path, LlavaConfig()))
    assert model is not None
    assert (model.position_axes, model.position_ids(np.arange(3), MediaTokens(IMAGE))) == (0, None)
    assert "pixel_values" in model.arguments
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert ModelClass.of(tmp_path) is None
    (tmp_path / "config.json").unlink()
    assert ModelClass.of(tmp_path) is None


@pytest.fixture(scope="module")
def llava(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder.from_pretrained(write_folder(tmp_path_factory.mktemp("llava"), "llava", text_tokenizer_dir))


def test_adjacent_images_are_rejected_alike_offline_and_in_training(
    llava: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [
        talk(text, pictures(1, text.count("<image>"))) for text in ("<image><image>", "<image> <image>", "<image>")
    ]
    monkeypatch.setattr(llava.vision, "adjacent_images", False)
    encoded, measured = llava.encode_many(records), llava.measure(records)
    assert str(encoded[0]).startswith("unsupported_media: two images without a token between them")
    assert measured[0].reject == encoded[0]
    assert [len(sample) for sample in encoded[1:]] == [one.length for one in measured[1:]]
    document = replace(records[2], text="<image>a b", messages=())
    ids = llava.encode(document).input_ids
    assert ids[0] == ids[1] == llava.image_token_id == max(ids)
    # Stored tokens have all tokens of their image, here at the end: beside the image of the next sample.
    stored = replace(document, text=None, input_ids=np.sort(ids))
    together = llava.encode_many([stored, document, records[1]])
    assert [len(sample) for sample in together] == [len(ids), len(ids), len(encoded[1])]
    monkeypatch.setattr(llava.vision, "adjacent_images", True)
    assert len(llava.encode_many(records)[0]) == llava.length(records[0])


def test_the_types_of_tokens_have_the_name_of_the_models_argument() -> None:
    needs = ModelNeeds("mm_token_type_ids")
    one = EncodedSample(input_ids=np.arange(3), labels=np.arange(3), token_type_ids=np.array([0, 1, 1]), needs=needs)
    batch = PaddingFreeCollator().collate([one, one])
    inputs = batch.transformers_inputs()
    assert inputs["mm_token_type_ids"].tolist() == [[0, 1, 1] * 2]
    assert "token_type_ids" not in inputs
    assert [sample.needs for sample in batch.split()] == [needs] * 2


def test_a_model_that_is_wrong_for_rows_with_images_gets_none() -> None:
    inputs = VisionInputs({"pixel_values": torch.zeros(1, 3)}, {"pixel_values": 0}, 1)
    needs = ModelNeeds(one_sample=True)
    one = EncodedSample(input_ids=np.arange(3), labels=np.arange(3), vision_inputs=inputs, needs=needs)
    text = EncodedSample(input_ids=np.arange(3), labels=np.arange(3), needs=needs)
    assert PaddingFreeCollator(dummy_images="never").collate([text, text]).transformers_inputs()
    assert PaddingFreeCollator().collate([one]).transformers_inputs()
    with pytest.raises(BatchError, match="must have 1 segment for this model family, got 2"):
        PaddingFreeCollator().collate([one, text]).transformers_inputs()


def test_tensors_of_some_samples_only_are_joined() -> None:
    dims = {"pixel_values": 0, "crops": 0}
    whole = VisionInputs({"pixel_values": torch.ones(1, 2)}, dims, 1)
    cropped = VisionInputs({"pixel_values": torch.ones(1, 2) * 2, "crops": torch.ones(3, 2) * 3}, dims, 1)
    joined, places = VisionInputs.joined([whole, cropped, whole])
    assert joined["crops"].tolist() == [[3, 3]] * 3
    assert [set(place) for place in places] == [{"pixel_values"}, {"pixel_values", "crops"}, {"pixel_values"}]
    assert VisionInputs.joined([whole])[0].keys() == {"pixel_values"}


def test_a_row_of_one_sample_has_no_text_positions_if_the_model_needs_such_rows() -> None:
    """Models of M-RoPE with four axes refuse the row of text positions."""
    ids = np.arange(3, dtype=np.int64)
    axes = np.stack([ids, ids + 1, ids + 2, ids + 3])
    sample = EncodedSample(id="a", input_ids=ids, labels=ids, position_ids=axes, needs=ModelNeeds(one_sample=True))
    collator = PaddingFreeCollator(dummy_images="never")
    assert collator.collate([sample]).transformers_inputs()["position_ids"][:, 0].tolist() == axes.tolist()
    assert collator.collate([sample, sample]).transformers_inputs()["position_ids"].shape == (5, 1, 6)


def test_positions_may_follow_from_grids_of_slices(tmp_path: Path) -> None:
    """MiniCPM-V 4.7 has the grid of each slice in place of one grid per image."""
    model = ModelClass.of(folder_of(tmp_path, MiniCPMV4_7Config()))
    assert model is not None
    assert (model.grids, model.position_axes) == ("target_sizes", 3)
    ids = np.array([1, 2, IMAGE, IMAGE, IMAGE, IMAGE, 3, 4], dtype=np.int64)
    found = model.position_ids(ids, MediaTokens(IMAGE, np.array([[8, 8]])))
    assert found is not None
    assert found[1, 2:6].tolist() == [found[1, 2], found[1, 2], found[1, 2] + 1, found[1, 2] + 1]
