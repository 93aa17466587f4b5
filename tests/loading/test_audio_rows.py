"""Rows of samples with audio: packed equals separate, and rows are split again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import BatchError, ChatEncoder, EncodedSample, PaddingFreeCollator, normalize
from tests.audio import qwen2_audio, signal, tiny_model, write
from tests.integrations.launched import run_script
from tests.internals import megatron_batch

RATE = 16_000


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder.from_pretrained(qwen2_audio(tmp_path_factory.mktemp("qwen2-audio")))


@pytest.fixture(scope="module")
def model(encoder: ChatEncoder) -> Any:
    token = encoder.rules.audio_token_id
    assert token is not None
    return tiny_model(encoder.parts.vocabulary, token)


def sample(encoder: ChatEncoder, folder: Path, ident: str, *seconds: float, answer: str = "hello") -> EncodedSample:
    files = [
        write(folder / f"{ident}-{i}", "flac", signal(int(RATE * s), RATE, i), RATE) for i, s in enumerate(seconds)
    ]
    marks = " and ".join(["<audio>"] * len(files))
    turns = [{"role": "user", "content": f"{marks} What?"}, {"role": "assistant", "content": answer}]
    return encoder.encode(normalize({"id": ident, "messages": turns, "audios": [str(file) for file in files]}))


@pytest.fixture(scope="module")
def samples(encoder: ChatEncoder, tmp_path_factory: pytest.TempPathFactory) -> list[EncodedSample]:
    folder = tmp_path_factory.mktemp("audio")
    return [
        sample(encoder, folder, "a", 1.3, answer="hello world"),
        sample(encoder, folder, "b"),
        sample(encoder, folder, "c", 0.4, 2.2, answer="world"),
        sample(encoder, folder, "d", 30.0, answer="said in the audio"),
    ]


def test_packed_equals_separate(model: Any, samples: list[EncodedSample]) -> None:
    """Logits, loss and gradients, of a row with several clips for each sample, and none for one."""
    batch = PaddingFreeCollator(dummy_images="never").collate(samples)
    logits = model(**batch.transformers_inputs()).logits
    loss = batch.loss(logits)
    model.zero_grad()
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("audio_tower" in name and grad.abs().max() > 0 for name, grad in packed.items())
    model.zero_grad()
    targets = sum(s.num_supervised for s in samples)
    total = 0.0
    for start, one in zip(batch.cu_seqlens.tolist(), samples, strict=False):
        alone = PaddingFreeCollator(dummy_images="never").collate([one])
        separate = model(**alone.transformers_inputs()).logits
        assert torch.allclose(separate[0], logits[0, start : start + len(one)], atol=1e-5)
        part = alone.loss(separate, targets=targets)
        part.backward()
        total += float(part)
    assert abs(total - float(loss)) < 1e-5
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, packed[name], atol=1e-5), name


def test_the_model_of_transformers_gives_the_same_loss(model: Any, samples: list[EncodedSample]) -> None:
    batch = PaddingFreeCollator(dummy_images="never").collate(samples)
    inputs = batch.transformers_inputs()
    assert inputs["input_features"].shape == (4, 128, 3000)
    assert inputs["feature_attention_mask"].shape == (4, 3000)
    assert batch.input_features is inputs["input_features"]
    out = model(**inputs)
    assert abs(float(out.loss) - float(batch.loss(out.logits))) < 1e-5


def test_a_row_is_split_again(samples: list[EncodedSample]) -> None:
    batch = PaddingFreeCollator(pad_multiple=8, dummy_images="never").collate(samples)
    assert batch.num_audios == [1, 0, 2, 1]
    for one, again in zip(samples, batch.split(), strict=True):
        assert again.input_ids.tolist() == one.input_ids.tolist()
        assert again.audio_token_id == one.audio_token_id
        assert (again.audio_inputs is None) == (one.audio_inputs is None)
        if one.audio_inputs is not None and again.audio_inputs is not None:
            assert again.num_audios == one.num_audios
            for name, value in one.audio_inputs.values.items():
                assert torch.equal(again.audio_inputs.values[name], value)
    assert torch.equal(PaddingFreeCollator(dummy_images="never").collate(batch.split()).input_ids,
                       PaddingFreeCollator(dummy_images="never").collate(samples).input_ids)  # fmt: skip


def test_features_have_the_dtype_of_pixels_and_move_with_the_batch(samples: list[EncodedSample]) -> None:
    batch = PaddingFreeCollator(pixel_dtype=torch.bfloat16).collate(samples)
    assert batch.audio_inputs is not None
    assert batch.audio_inputs["input_features"].dtype == torch.bfloat16
    moved = PaddingFreeCollator().collate(samples).to("meta", torch.float16)
    assert moved.audio_inputs is not None
    assert moved.audio_inputs["input_features"].dtype == torch.float16
    assert moved.audio_inputs["feature_attention_mask"].dtype != torch.float16
    assert {value.device.type for value in moved.audio_inputs.values()} == {"meta"}


def test_rows_without_audio_get_dummy_audio(model: Any, encoder: ChatEncoder, samples: list[EncodedSample]) -> None:
    """As FSDP requires of all ranks; neither loss nor gradients of the other weights change."""
    text = [samples[1]]
    batch = PaddingFreeCollator(dummy_images="always").collate(text)
    assert batch.input_features is not None
    assert batch.num_audios == []
    plain = PaddingFreeCollator(dummy_images="never").collate(text)
    logits = model(**batch.transformers_inputs()).logits
    expected = model(**plain.transformers_inputs()).logits
    assert torch.allclose(logits[:, : plain.input_ids.shape[1]], expected, atol=1e-5)
    model.zero_grad()
    batch.loss(logits).backward()
    of_audio = [p.grad for name, p in model.named_parameters() if "audio_tower" in name and p.grad is not None]
    assert of_audio
    assert not any(grad.any() for grad in of_audio)
    with_audio = PaddingFreeCollator(dummy_images="always").collate([samples[0]])
    assert with_audio.input_features is not None
    assert len(with_audio.input_features) == 1


def test_samples_are_truncated_before_or_after_their_audio(samples: list[EncodedSample]) -> None:
    from energon_packed import RecordError

    one = samples[0]
    end = int(np.flatnonzero(one.input_ids == one.audio_token_id)[-1]) + 1
    with pytest.raises(RecordError, match="would remove part of audio"):
        one.truncated(end - 1)


def test_layouts_of_megatron_refuse_audio_by_name(samples: list[EncodedSample]) -> None:
    from dataclasses import replace

    from energon_packed import ConfigError

    batch = PaddingFreeCollator().collate(samples)
    for layout in ("bridge", "megatron-lm", "megatron-gpt"):
        with pytest.raises(ConfigError, match=f"layout '{layout}' has no place for audio. Use layout 'bridge-audio'"):
            megatron_batch(batch, layout)
    for other in (
        replace(batch, position_ids=batch.position_ids.expand(4, 1, -1)),
        replace(batch, image_token_id=5),
        replace(batch, audio_inputs={"input_features": batch.audio_inputs["input_features"]}),
    ):
        with pytest.raises(
            ConfigError, match="layout 'bridge-audio' is for Qwen2-Audio.*got samples of another model"
        ):
            megatron_batch(other, "bridge-audio")


@pytest.mark.parametrize("collator", [{}, {"pad_multiple": 8, "pad_to": 1600}, {"loss_weighting": "sqrt"}])
def test_the_step_of_bridge_gets_a_row_for_each_sample(samples: list[EncodedSample], collator: dict[str, Any]) -> None:
    """`audio_lm_step` drops sample boundaries, and packs padded rows with a mask, shifted labels and all features."""
    batch = PaddingFreeCollator(**collator).collate(samples)
    inputs = megatron_batch(batch, "bridge-audio")
    assert set(inputs) == {
        "tokens", "input_ids", "labels", "loss_mask", "position_ids", "attention_mask", "audio_inputs",
    }  # fmt: skip
    longest = max(map(len, samples))
    for row, one in enumerate(samples):
        length = len(one)
        labels = np.append(one.labels[1:], -100)
        for name, expected, fill in (
            ("tokens", one.input_ids, 0), ("input_ids", one.input_ids, 0), ("labels", labels, -100),
            ("position_ids", np.arange(length), 0), ("attention_mask", np.ones(length), 0),
        ):  # fmt: skip
            assert inputs[name].shape == (len(samples), longest), name
            assert inputs[name].dtype == torch.int64, name
            assert inputs[name][row, :length].tolist() == expected.tolist(), name
            assert set(inputs[name][row, length:].tolist()) <= {fill}, name
        weights = inputs["loss_mask"][row]
        assert (weights[: length - 1] != 0).tolist() == (one.labels[1:] != -100).tolist()
        assert not weights[length - 1 :].any()
    assert float(inputs["loss_mask"].sum()) == pytest.approx(float(batch.loss_mask.sum()), rel=1e-4)
    arguments = inputs["audio_inputs"].normalized_for_model()
    assert {name: tuple(value.shape) for name, value in arguments.items()} == {
        "input_features": (4, 128, 3000), "feature_attention_mask": (4, 3000),
    }  # fmt: skip
    assert torch.equal(arguments["input_features"], batch.input_features)
    assert vars(inputs["audio_inputs"]).keys() == arguments.keys()  # which the step moves to the device
    assert megatron_batch(batch, "bridge-audio", with_pixels=False)["audio_inputs"] is None


def test_rows_of_bridge_without_audio(encoder: ChatEncoder, samples: list[EncodedSample]) -> None:
    text = [samples[1], encoder.encode(normalize({"text": "hello"}))]
    inputs = megatron_batch(PaddingFreeCollator(pad_to=500).collate(text), "bridge-audio")
    assert inputs["audio_inputs"] is None
    assert inputs["attention_mask"].sum(1).tolist() == list(map(len, text))
    dummy = encoder.dummy
    assert dummy is not None
    inputs = megatron_batch(PaddingFreeCollator(pad_to=500, dummy_images="always").collate(text), "bridge-audio")
    assert inputs["audio_inputs"].input_features.shape[0] == 1
    assert inputs["attention_mask"].sum(1).tolist()[:2] == list(map(len, text))
    own = int(inputs["attention_mask"][2].sum())
    assert own <= len(dummy)
    assert inputs["tokens"][2, :own].tolist() == dummy.input_ids[:own].tolist()
    assert (inputs["tokens"] == encoder.rules.audio_token_id).sum() == (
        dummy.input_ids == encoder.rules.audio_token_id
    ).sum()
    assert not (inputs["labels"][2] != -100).any()
    assert not inputs["loss_mask"][2].any()


def test_audio_of_two_families_cannot_share_a_row(samples: list[EncodedSample]) -> None:
    from dataclasses import replace

    inputs = samples[0].audio_inputs
    assert inputs is not None
    other = replace(samples[0], audio_inputs=replace(inputs, dims={"input_features": 0}))
    with pytest.raises(BatchError, match="different model families cannot share a row"):
        PaddingFreeCollator().collate([samples[0], other])


def test_sharded_ranks_with_and_without_audio_equal_one_process(
    encoder: ChatEncoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every rank calls the sharded audio encoder in each step; else the ranks would wait for each other."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "out").mkdir()
    ranks = run_script("tests.loading.dummy_audio_script", qwen2_audio(folder / "tokenizer"), out=folder / "out")
    assert len(ranks) == 2
    for found in ranks:
        assert found["found"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["found"][-1] < found["found"][0]
