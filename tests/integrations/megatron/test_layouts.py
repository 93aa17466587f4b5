"""Batches in the words of Megatron's steps, with real megatron-core objects."""

import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from energon_packed import ChatEncoder, ConfigError, EncodedSample, PaddingFreeCollator, get_packed_loader
from tests.conftest import Packer
from tests.internals import megatron_batch
from tests.loading.clips import Clips
from tests.loading.models import tiny_model


def random_samples(rng: np.random.Generator) -> list[EncodedSample]:
    samples = []
    for number in range(rng.integers(1, 7)):
        ids = rng.integers(0, 1000, rng.integers(1, 30))
        labels = np.where(rng.random(len(ids)) < 0.6, ids, -100)
        samples.append(EncodedSample(id=str(number), input_ids=ids, labels=labels))
    return samples if any(sample.num_supervised for sample in samples) else random_samples(rng)


def reference(sample: EncodedSample) -> tuple[list[int], list[int]]:
    """Tokens and next-token labels of one sample alone."""
    return sample.input_ids.tolist(), [*sample.labels[1:].tolist(), -100]


@pytest.mark.parametrize("multiple", [1, 8])
def test_labels_of_500_random_packs_equal_the_reference(multiple: int) -> None:
    rng = np.random.default_rng(multiple)
    for _ in range(500):
        samples = random_samples(rng)
        width = sum(-(-len(sample) // multiple) * multiple for sample in samples) + int(rng.integers(0, 9))
        batch = PaddingFreeCollator(pad_multiple=multiple, pad_to=width).collate(samples)
        inputs = megatron_batch(batch, "bridge")
        real = torch.ones(1, width, dtype=torch.bool) if batch.padding_mask is None else ~batch.padding_mask
        expected = [reference(sample) for sample in samples]
        assert inputs["tokens"][real].tolist() == [t for tokens, _ in expected for t in tokens]
        assert inputs["labels"][real].tolist() == [t for _, labels in expected for t in labels]
        assert (inputs["labels"][~real] == -100).all()
        assert ((inputs["loss_mask"] > 0) == (inputs["labels"] != -100)).all()
        bounds = inputs.get("cu_seqlens_q_padded", inputs["cu_seqlens_q"]).tolist()
        lengths = (inputs["cu_seqlens_q"][1:] - inputs["cu_seqlens_q"][:-1]).tolist()
        assert bounds[-1] == width == inputs["total_tokens"]
        for start, length, (tokens, _) in zip(bounds, lengths, expected, strict=False):
            assert inputs["tokens"][0, start : start + length].tolist() == tokens


def test_bridge_layout(pack_demo: Packer, encoder: ChatEncoder) -> None:
    batch = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0, micro_batch_size=2)))
    inputs = megatron_batch(batch, "bridge")
    tokens = batch.input_ids.shape[1]
    assert inputs["position_ids"].shape == (3, 1, tokens)
    assert inputs["max_seqlen_q"].cpu() == batch.max_seqlen  # the step moves it, so it must be a tensor
    assert set(inputs["visual_inputs"].normalized_for_model()) == {"pixel_values", "image_grid_thw"}
    assert not {"pixel_values", "cu_seqlens_q_padded"} & set(inputs)


def test_bridge_layout_for_releases_before_0_6(
    pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = random_samples(np.random.default_rng(1))
    batch = PaddingFreeCollator(pad_multiple=8).collate(samples)
    inputs = megatron_batch(batch, "bridge")
    assert batch.cu_seqlens_padded is not None
    # get_packed_seq_params cuts the boundaries at `argmin`
    assert torch.equal(inputs["cu_seqlens"][: inputs["cu_seqlens_argmin"].item()], batch.cu_seqlens_padded)
    unpadded = inputs["cu_seqlens_unpadded"][: inputs["cu_seqlens_unpadded_argmin"].item()]
    assert torch.equal(unpadded, batch.cu_seqlens)
    assert int(inputs["max_seqlen"]) == batch.max_seqlen
    plain = megatron_batch(PaddingFreeCollator().collate(samples), "bridge")
    assert torch.equal(plain["cu_seqlens"], plain["cu_seqlens_q"])
    assert not {"cu_seqlens_unpadded", "cu_seqlens_unpadded_argmin"} & set(plain)
    images = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0)))
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(__version__="0.5.1"))
    megatron_batch(batch, "bridge")
    with pytest.raises(ConfigError, match="images needs Megatron-Bridge 0.6 or later, got 0.5.1, whose vlm_step"):
        megatron_batch(images, "bridge")


def test_every_stage_gets_every_key_and_middle_stages_no_pixels(pack_demo: Packer, encoder: ChatEncoder) -> None:
    batch = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0)))
    full, middle = megatron_batch(batch, "bridge"), megatron_batch(batch, "bridge", with_pixels=False)
    assert set(middle) == set(full)  # gpt_step reads `tokens`, VL models `input_ids`, on every stage
    assert middle["input_ids"] is middle["tokens"]
    assert middle["visual_inputs"].pixel_values is None
    # Qwen-VL models compute M-RoPE positions on every stage from these
    assert torch.equal(middle["visual_inputs"].image_grid_thw, full["visual_inputs"].image_grid_thw)
    assert set(middle["visual_inputs"].normalized_for_model()) == {"image_grid_thw"}


def test_videos_in_layouts(encoder: ChatEncoder) -> None:
    clips = Clips("qwen2_5_vl", tiny_model("qwen2_5_vl", encoder, "sdpa"))
    batch = PaddingFreeCollator().collate(clips.samples(("text", "image video", "video")))
    full, middle = megatron_batch(batch, "bridge"), megatron_batch(batch, "bridge", with_pixels=False)
    assert full["position_ids"].shape == (3, 1, batch.input_ids.shape[1])
    grids = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
    visual = full["visual_inputs"].normalized_for_model()
    assert set(visual) == grids | {
        "pixel_values",
        "pixel_values_videos",
    }  # Qwen-VL models of Megatron-Bridge join them
    assert all(visual[name] is getattr(batch, name) for name in visual)
    assert set(middle["visual_inputs"].normalized_for_model()) == grids
    assert not set(visual) & (set(full) | set(middle))
    only = PaddingFreeCollator().collate(clips.samples(("text", "video")))
    names = {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
    assert set(megatron_batch(only, "bridge")["visual_inputs"].normalized_for_model()) == names
    for row in (batch, only):
        with pytest.raises(ConfigError, match="layout 'megatron-lm' has no place for video files"):
            megatron_batch(row, "megatron-lm")
        with pytest.raises(ConfigError, match="layout 'megatron-gpt' is for text: pretrain_gpt.py reads no images"):
            megatron_batch(row, "megatron-gpt")


def test_padding_mask_is_there_for_every_row_or_for_none() -> None:
    rng = np.random.default_rng(0)
    full = [EncodedSample(id="full", input_ids=np.arange(8), labels=np.arange(8))]
    for collator, expected in (
        (PaddingFreeCollator(), False),
        (PaddingFreeCollator(pad_multiple=8), True),
        (PaddingFreeCollator(pad_to=256), True),
    ):
        rows = [collator.collate(full), collator.collate(random_samples(rng))]
        assert ["padding_mask" in megatron_batch(row, "bridge") for row in rows] == [expected] * 2
    unpadded = PaddingFreeCollator(pad_multiple=8).collate(full)
    assert unpadded.padding_mask is not None
    assert (int(unpadded.padding_mask.sum()), unpadded.num_tokens) == (0, 8)


@pytest.mark.parametrize("layout", ["bridge", "megatron-gpt"])
def test_megatron_counts_every_target_of_a_weighted_row(layout: Any) -> None:
    rng, below = np.random.default_rng(0), 0
    for _ in range(200):
        batch = PaddingFreeCollator(loss_weighting="sqrt").collate(random_samples(rng))
        targets = int((batch.labels != -100).sum())
        below += int(batch.loss_mask.sum()) < targets
        weights = megatron_batch(batch, layout)["loss_mask"]
        assert int(weights.sum().to(torch.int)) == targets  # how Megatron's loss functions count
        torch.testing.assert_close(weights[:, :-1], batch.loss_mask[:, 1:], rtol=1e-5, atol=0)
    assert below > 10  # without the correction it loses one


@pytest.mark.parametrize("layout", ["bridge", "megatron-gpt"])
def test_a_row_of_small_weights_is_one_target(layout: Any) -> None:
    ids, weights = np.arange(1, 4), np.array([0, 0.1, 0.2], dtype=np.float32)
    batch = PaddingFreeCollator().collate([EncodedSample(input_ids=ids, labels=ids, loss_weights=weights)])
    mask = megatron_batch(batch, layout)["loss_mask"]
    assert int(mask.sum().to(torch.int)) == 1
    assert mask[0].tolist() == pytest.approx([1 / 3, 2 / 3, 0], rel=1e-5)


def test_total_tokens_reach_releases_of_megatron_core_that_know_them() -> None:
    batch = PaddingFreeCollator(pad_to=256).collate(random_samples(np.random.default_rng(0)))
    assert megatron_batch(batch, "bridge")["total_tokens"] == 256
    known = "total_tokens" in {field.name for field in fields(PackedSeqParams)}
    assert getattr(batch.packed_seq_params(), "total_tokens", None) == (256 if known else None)


def test_packed_seq_params_are_those_of_megatron_core(pack_demo: Packer, encoder: ChatEncoder) -> None:
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "shuffle": False}
    plain = next(iter(get_packed_loader(pack_demo().shards, encoder, **options))).packed_seq_params()
    assert isinstance(plain, PackedSeqParams)
    assert (plain.qkv_format, plain.cu_seqlens_q.dtype, plain.cu_seqlens_q_padded) == ("thd", torch.int32, None)
    collator = PaddingFreeCollator(pad_multiple=16)
    padded = next(iter(get_packed_loader(pack_demo().shards, encoder, collator=collator, **options)))
    params = padded.packed_seq_params()
    assert params.cu_seqlens_q.shape == params.cu_seqlens_q_padded.shape
    assert (params.cu_seqlens_q_padded % 16 == 0).all()
    assert params.max_seqlen_q == (params.cu_seqlens_q_padded[1:] - params.cu_seqlens_q_padded[:-1]).max()


def test_megatron_lm_layout(pack_demo: Packer, encoder: ChatEncoder) -> None:
    batch = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0)))
    inputs = megatron_batch(batch, "megatron-lm")
    assert set(inputs) == {"tokens", "labels", "imgs", "num_tiles", "cu_lengths", "max_lengths"}
    tokens = inputs["tokens"].shape[1]
    shifted = inputs["labels"][:, 1 : tokens + 1]  # what the example's step does
    assert torch.equal(shifted, batch.megatron_inputs()["labels"])
    assert inputs["cu_lengths"].shape == (1, batch.num_samples + 1)
    assert inputs["cu_lengths"].shape[0] == inputs["max_lengths"].shape[0] == 1
    assert inputs["num_tiles"].sum() == len(inputs["imgs"])
    assert {inputs[name].dtype for name in ("num_tiles", "cu_lengths", "max_lengths")} == {torch.int32}
    text = PaddingFreeCollator().collate(random_samples(np.random.default_rng(0)))
    assert megatron_batch(text, "megatron-lm")["imgs"].shape == torch.Size([1, 1])
    padded = PaddingFreeCollator(pad_multiple=32).collate(random_samples(np.random.default_rng(0)))
    with pytest.raises(ConfigError, match="no boundaries for padded samples"):
        megatron_batch(padded, "megatron-lm")
    weighted = PaddingFreeCollator(loss_weighting="sample").collate(random_samples(np.random.default_rng(0)))
    with pytest.raises(ConfigError, match="does not support loss weights"):
        megatron_batch(weighted, "megatron-lm")
    message = "`layout` must be one of bridge, bridge-audio, megatron-lm, megatron-gpt, got 'thd'"
    with pytest.raises(ConfigError, match=message):
        megatron_batch(text, "thd")  # type: ignore[arg-type]


def test_megatron_gpt_layout(pack_demo: Packer, encoder: ChatEncoder) -> None:
    samples = random_samples(np.random.default_rng(1))
    batch = PaddingFreeCollator(pad_multiple=8, pad_to=256, loss_weighting="sample").collate(samples)
    inputs = megatron_batch(batch, "megatron-gpt")
    # As SFTDataset of Megatron-LM: one kind of boundaries, and no key with None, which early releases do not support.
    assert set(inputs) == {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"}
    assert {tuple(inputs[n].shape) for n in ("tokens", "labels", "loss_mask", "position_ids")} == {(1, 256)}
    assert batch.cu_seqlens_padded is not None
    assert torch.equal(inputs["cu_seqlens"], batch.cu_seqlens_padded[None])
    assert {inputs[n].dtype for n in ("cu_seqlens", "max_seqlen")} == {torch.int32}
    assert inputs["max_seqlen"].shape == (1,)
    assert torch.equal(inputs["labels"], batch.megatron_inputs()["labels"])
    unpadded = PaddingFreeCollator().collate(samples)
    assert torch.equal(megatron_batch(unpadded, "megatron-gpt")["cu_seqlens"], unpadded.cu_seqlens[None])
    images = next(iter(get_packed_loader(pack_demo().shards, encoder, epochs=1, num_workers=0)))
    with pytest.raises(ConfigError, match="reads no images. Use layout 'bridge'"):
        megatron_batch(images, "megatron-gpt")
