"""Families served by their Transformers processor: packed equals separate, isolation, dummy images, splitting."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import build_model, build_processor, write_folder

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    EncodedSample,
    PackedBatch,
    PaddingFreeCollator,
    check_isolation,
)
from tests import oldest
from tests.encoding.test_processor_vision import TAKEN, pictures, talk
from tests.internals import megatron_batch

PACKED = [name for name in TAKEN if name != "gemma3"]  # which is right with one sample in a row


@pytest.fixture(scope="module", params=PACKED)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def encoder(name: str, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder.from_pretrained(write_folder(tmp_path_factory.mktemp(name), name, text_tokenizer_dir))


@pytest.fixture(scope="module")
def row(encoder: ChatEncoder) -> list[EncodedSample]:
    """Samples with one image, none, two images of other sizes, and none."""
    talks = [
        talk("<image>\nWhat is this?", pictures(1, 1)),
        talk("What is a house?", []),
        talk("<image> or <image>?", pictures(2, 2)),
        talk("And now?", []),
    ]
    return [encoder.encode(one) for one in talks]


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: Any, name: str, text_tokenizer_dir: Path) -> Any:
    return build_model(name, build_processor(name, text_tokenizer_dir), request.param)


def collated(row: list[EncodedSample], **options: Any) -> PackedBatch:
    return PaddingFreeCollator(**options).collate(row)


def alone(model: Any, sample: EncodedSample) -> Any:
    """A separate forward, as Transformers is normally called."""
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(sample.input_ids)[None]}
    inputs["labels"] = torch.from_numpy(sample.labels)[None]
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if sample.token_type_ids is not None:
        inputs["token_type_ids"] = torch.from_numpy(sample.token_type_ids)[None]
    values = sample.vision_inputs.values if sample.vision_inputs is not None else {}
    return model(**inputs, **values, use_cache=False)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    norm = torch.cat([grad.flatten() for grad in others.values()]).norm()
    zero = torch.zeros(())
    return float(torch.cat([(some[key] - others.get(key, zero)).flatten() for key in some]).norm() / norm)


def test_packed_equals_separate(model: Any, row: list[EncodedSample]) -> None:
    for options in ({}, {"pad_multiple": 8, "pad_to": 800}):
        batch = collated(row, **options)
        out = model(**batch.transformers_inputs())
        keep = slice(None) if batch.padding_mask is None else ~batch.padding_mask[0]
        separate = [alone(model, sample) for sample in row]
        difference = out.logits[0][keep] - torch.cat([one.logits[0] for one in separate])
        assert difference.detach().abs().max() <= 1e-5 * max(1.0, float(out.logits.detach().abs().max()))
        counts = [sample.num_supervised for sample in row]
        loss = sum(one.loss * count for one, count in zip(separate, counts, strict=True)) / sum(counts)
        assert abs(float((out.loss - loss).detach())) <= 1e-5 * float(loss)
        packed = gradients(model, out.loss)
        assert distance(packed, gradients(model, loss)) <= 1e-5


def test_the_images_matter(model: Any, row: list[EncodedSample]) -> None:
    """Kept so that the test above is known to see the pixels."""
    inputs = collated(row).transformers_inputs()
    with torch.no_grad():
        plain = model(**inputs).logits[0]
        other = model(**inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}).logits[0]
    end = len(row[0])
    assert (plain[:end] - other[:end]).abs().max() > 1e-3
    between = slice(end, end + len(row[1]))
    assert (plain[between] - other[between]).abs().max() <= 1e-5 * float(plain.abs().max())


def test_isolation(model: Any, row: list[EncodedSample]) -> None:
    assert not check_isolation(model, collated(row)).leaks


def test_a_dummy_image_changes_no_loss_and_no_gradient(model: Any, row: list[EncodedSample]) -> None:
    texts = [row[1], row[3]]
    found = []
    for choice in ("never", "always"):
        batch = collated(texts, dummy_images=choice)
        assert (batch.vision_inputs is not None) == (choice == "always")
        loss = model.train()(**batch.transformers_inputs()).loss
        found.append((float(loss), gradients(model, loss)))
        model.eval()
    (plain, without), (loss, with_dummy) = found
    assert abs(loss - plain) <= 1e-6 * plain
    assert distance(with_dummy, without) <= 1e-6
    tower = {key for key in with_dummy if "vision" in key}
    assert tower
    assert not tower & without.keys()


def test_a_row_is_taken_apart_again(row: list[EncodedSample]) -> None:
    batch = collated(row, dummy_images="always")
    assert batch.num_images == [1, 0, 2, 0]
    for before, after in zip(row, batch.split(), strict=True):
        assert after.input_ids.tolist() == before.input_ids.tolist()
        assert after.num_images == before.num_images
        if before.vision_inputs is not None:
            assert after.vision_inputs is not None
            for key, value in before.vision_inputs.values.items():
                assert torch.equal(after.vision_inputs.values[key], value)
    again = collated(batch.split())
    for key, value in batch.transformers_inputs().items():
        assert torch.equal(torch.as_tensor(again.transformers_inputs()[key]), torch.as_tensor(value)), key


def test_pixels_take_the_dtype_that_is_asked_for(row: list[EncodedSample]) -> None:
    inputs = collated(row, pixel_dtype=torch.bfloat16).transformers_inputs()
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert all(value.dtype == torch.int64 for key, value in inputs.items() if key == "image_sizes")


def test_megatron_layouts_say_that_they_do_not_carry_them(row: list[EncodedSample]) -> None:
    with pytest.raises(ConfigError, match="layout 'bridge' supports only pixel_values of patches and image_grid_thw"):
        megatron_batch(collated(row), "bridge")


@pytest.fixture(scope="module")
def gemma3(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder.from_pretrained(write_folder(tmp_path_factory.mktemp("gemma3"), "gemma3", text_tokenizer_dir))


def test_gemma3_is_right_with_one_sample_in_a_row_and_refused_with_several(
    gemma3: ChatEncoder, text_tokenizer_dir: Path
) -> None:
    """Its sliding layers mark images by their place in the row, where Transformers asks for places in the sample."""
    assert gemma3.vision is not None
    assert "Gemma3Processor: rows of several samples with images are refused" in gemma3.vision.warnings[0]
    model = build_model("gemma3", build_processor("gemma3", text_tokenizer_dir))
    samples = [gemma3.encode(talk("<image>What is this?", pictures(1, 1))), gemma3.encode(talk("What is that?", []))]
    with torch.no_grad():
        single = model(**collated(samples[:1]).transformers_inputs()).logits
        assert (single - alone(model, samples[0]).logits).abs().max() <= 1e-5
    batch = collated(samples)
    with pytest.raises(BatchError, match="must have 1 segment .*, got 2: .* `max_samples_per_pack=1`"):
        batch.transformers_inputs()
    texts = collated([samples[1], samples[1]])
    with torch.no_grad():
        with_dummy = collated([samples[1]], dummy_images="always").transformers_inputs()
        assert not with_dummy["token_type_ids"].any()
        found = model(**with_dummy).logits[0, : len(samples[1])]
        assert (found - alone(model, samples[1]).logits[0]).abs().max() <= 1e-5
        found = model(**texts.transformers_inputs()).logits[0, len(samples[1]) :]
        assert (found - alone(model, samples[1]).logits[0]).abs().max() <= 1e-5
        inputs = replace(texts, token_type_ids=None).transformers_inputs()
        types = torch.zeros_like(inputs["input_ids"])
        types[0, 5:9] = 1  # as of an image in the first sample
        wrong = model(**inputs, token_type_ids=types).logits[0, len(samples[1]) :]
        is_wrong = bool((wrong - found).abs().max() > 1e-3)
        assert is_wrong != oldest.TRANSFORMERS, "Transformers is right now: allow it"
