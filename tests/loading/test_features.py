"""Ordinary features in, sub-samples out: as Transformers flattens them, and the inverse of collating."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from energon_packed import (
    BatchError,
    ChatEncoder,
    DataflowLoader,
    EncodedSample,
    MapDistributor,
    MixtureDistributor,
    PackedDataset,
    PaddingFreeCollator,
    get_packed_loader,
)
from tests.loading.test_dataset import same

PLAIN = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
LABELED = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]


@pytest.mark.parametrize("features", [PLAIN, LABELED])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_features_give_what_transformers_gives(features: list[dict[str, Any]], kind: Any) -> None:
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([dict(one) for one in features])
    ours = PaddingFreeCollator()([{name: kind(value) for name, value in one.items()} for one in features])
    for name in ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"):
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["max_length_q"] == theirs["max_length_q"]


def test_padding_of_features_is_removed_and_bad_ones_are_named() -> None:
    padded = {"id": "a", "input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}
    assert PaddingFreeCollator()([padded])["input_ids"].tolist() == [[5, 6]]
    for feature, message in (
        ({"id": "b", "input_ids": [1, 2], "labels": [1]}, "Feature b: `labels` must have 2 values, .* got 1"),
        ({"id": "c", "input_ids": []}, "Feature c: `input_ids` is empty"),
        ({"id": "c", "input_ids": [1, 2], "attention_mask": [0, 0]}, "Feature c: `input_ids` is empty"),
        ({"id": "d", "input_ids": [0.5]}, "must be integers of shape .* got dtype float64"),
        ({"id": "d", "input_ids": [[1, 2], [3, 4]]}, r"got dtype int64 and shape \(2, 2\)"),
    ):
        with pytest.raises(BatchError, match=message):
            PaddingFreeCollator()([feature])
    with pytest.raises(BatchError, match="`loss_weighting` must be 'token' .* got 'sqrt'"):
        PaddingFreeCollator(loss_weighting="sqrt")(PLAIN)


def test_a_token_of_weight_0_is_no_target_and_padding_has_no_weight() -> None:
    feature = {"input_ids": [4, 5, 6, 7, 0], "attention_mask": [1, 1, 1, 1, 0], "loss_weights": [1, 0, 0.5, 2, 3]}
    batch = next(iter(DataflowLoader(MapDistributor([feature]))))
    assert batch.labels.tolist() == [[-100, -100, 6, 7]]
    assert batch.loss_mask.tolist() == [[0, 0, 0.5, 2]]


@pytest.mark.parametrize("options", [{}, {"pad_multiple": 8}, {"pad_multiple": 4, "pad_to": 4096}])
def test_split_is_the_inverse_of_collating(pack_demo: Any, encoder: ChatEncoder, options: dict[str, Any]) -> None:
    dataset = PackedDataset(pack_demo().shards, encoder)
    samples = [sample for index in range(3) for sample in dataset[index]]
    assert any(one.pixel_values is not None for one in samples)
    found = PaddingFreeCollator(**options).collate(samples).split()
    assert same(samples, found)
    assert all(
        (one.image_grid_thw is None) == (other.image_grid_thw is None)
        and (one.image_grid_thw is None or torch.equal(one.image_grid_thw, other.image_grid_thw))
        for one, other in zip(samples, found, strict=True)
    )


def test_features_have_videos() -> None:
    media = {"pixel_values_videos": torch.rand(8, 3), "video_grid_thw": torch.tensor([[2, 2, 2]])}
    row = [*PLAIN, PLAIN[0] | media | {"second_per_grid_ts": [0.5]}]
    inputs = PaddingFreeCollator()(row)
    assert all(torch.equal(inputs[name], value) for name, value in media.items())
    assert inputs["second_per_grid_ts"].tolist() == [0.5]
    assert not media.keys() & PaddingFreeCollator()(PLAIN).keys()


def test_sources_name_data_set_and_subflavors(pack_demo: Any, encoder: ChatEncoder, tmp_path: Path) -> None:
    shards = pack_demo().shards
    recipe = tmp_path / "blend.yaml"
    recipe.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        f"splits: {{train: {{path: {shards}, subflavors: {{part: demo}}}}}}\n"
    )
    batch = next(iter(get_packed_loader(recipe, encoder, num_workers=0, epochs=1)))
    assert len(batch.sources) == batch.num_samples
    assert {source.dataset for source in batch.sources} == {str(shards)}
    assert all(source.subflavors["part"] == "demo" for source in batch.sources)
    plain = PaddingFreeCollator().collate(PackedDataset(shards, encoder)[0])
    assert {source.dataset for source in plain.sources} == {str(shards)}


def test_loss_by_source_is_the_loss_of_each_alone() -> None:
    torch.manual_seed(0)
    samples = []
    for number in range(6):
        ids = np.arange(3 + number)
        source = None if number == 5 else ("a", "b")[number % 2]
        samples.append(
            EncodedSample(id=str(number), input_ids=ids, labels=ids).of(None if source is None else _of(source))
        )
    batch = PaddingFreeCollator(pad_multiple=4, pad_to=64).collate(samples)
    logits = torch.randn(1, 64, 16)
    found = batch.loss_by_source(logits)
    assert sorted(found) == ["a", "b", "unknown"]
    start = 0
    for name, loss in found.items():
        total, count = 0.0, 0
        for number, sample in enumerate(samples):
            if (sample.source.dataset if sample.source else "unknown") != name:
                continue
            start = int(batch.cu_seqlens_padded[number])
            rows = logits[0, start : start + len(sample) - 1]
            total += float(torch.nn.functional.cross_entropy(rows, torch.tensor(sample.labels[1:]), reduction="sum"))
            count += len(sample) - 1
        assert loss == pytest.approx(total / count, rel=1e-5)


def _of(name: str) -> Any:
    from energon_packed import SampleSource

    return SampleSource(name, {})


def test_sources_of_a_mixture(pack_demo: Any, encoder: ChatEncoder) -> None:
    shards = pack_demo().shards
    data = [{"id": "plain", "input_ids": [1, 2, 3]}]
    mixture = MixtureDistributor([MapDistributor(data), MapDistributor(PackedDataset(shards, encoder))], [1, 1])
    found = {s.dataset if s else None for batch in DataflowLoader(mixture) for s in batch.sources}
    assert found == {None, str(shards)}
