"""Rows without images get a dummy image where several ranks train: no rank waits, and no loss or gradient changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import ChatEncoder, EncodedSample, PackedBatch, PaddingFreeCollator
from tests.integrations.launched import run_script
from tests.internals import megatron_batch
from tests.loading.dummy_script import MODELS, encoder_of, media_rows, samples, trained

STEPS = 20


@pytest.fixture(scope="module", params=MODELS)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def vision_encoder(name: str, tokenizer_dir: Path) -> ChatEncoder:
    return encoder_of(name, tokenizer_dir)


@pytest.fixture(scope="module")
def two_ranks(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of both ranks."""
    out = tmp_path_factory.mktemp("ranks")
    return run_script("tests.loading.dummy_script", tokenizer_dir, STEPS, out=out)


def text_row(encoder: ChatEncoder) -> list[EncodedSample]:
    return samples(encoder, 0, 0)


def collated(row: list[EncodedSample], **options: Any) -> PackedBatch:
    return PaddingFreeCollator(**options).collate(row)


def test_losses_of_two_ranks_equal_the_run_without_dummy_images(
    name: str, vision_encoder: ChatEncoder, two_ranks: list[dict[str, Any]]
) -> None:
    """In one process, the mean of both ranks' losses is trained on rows as they are."""
    model = trained(name, vision_encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected: list[list[float]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for rank in (0, 1):
            batch = collated(samples(vision_encoder, step, rank), dummy_images="never")
            assert (batch.pixel_values is not None) == bool(step >> rank & 1)
            loss = model(**batch.transformers_inputs()).loss
            (loss / 2).backward()
            found.append(loss.item())
        optimizer.step()
        expected.append(found)
    for rank in (0, 1):
        assert two_ranks[rank][name] == pytest.approx([losses[rank] for losses in expected], rel=1e-5)
        assert two_ranks[rank][f"{name} sharded"] == pytest.approx([one[rank] for one in expected[:4]], rel=1e-5)
    assert expected[-1][0] < 0.9 * expected[0][0]


def test_ranks_with_images_and_videos_equal_the_run_in_one_process(
    name: str, vision_encoder: ChatEncoder, two_ranks: list[dict[str, Any]]
) -> None:
    """FSDP: a rank with images and videos runs the vision tower as often as a rank with text, an image or a video."""
    model = trained(name, vision_encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, rows in enumerate(media_rows(name, model)):
        optimizer.zero_grad()
        for rank, row in enumerate(rows):
            batch = collated(row, dummy_images="never")
            loss = model(**batch.transformers_inputs()).loss
            (loss / 2).backward()
            assert two_ranks[rank][f"{name} videos"][step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.step()


def test_without_dummy_images_the_ranks_fail(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert "Expected to have finished reduction" in rank["without dummy images"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [{}, {"pad_multiple": 8}, {"pad_to": 120}], ids=str)
def test_no_loss_and_no_gradient_changes(
    name: str, vision_encoder: ChatEncoder, attention: str, padding: dict[str, int]
) -> None:
    model = trained(name, vision_encoder)
    model.set_attn_implementation(attention)
    results = []
    for choice in ("never", "always"):
        model.zero_grad()
        loss = model(**collated(text_row(vision_encoder), dummy_images=choice, **padding).transformers_inputs()).loss
        loss.backward()
        results.append((loss, {key: p.grad for key, p in model.named_parameters()}))
    (plain, none), (loss, found) = results
    assert abs(loss.item() - plain.item()) <= 1e-6 * plain.item()
    tower = {key for key in found if ".visual." in key}
    assert all(none[key] is None for key in tower)
    assert all(found[key] is not None and not found[key].any() for key in tower)
    others = found.keys() - tower
    difference = torch.cat([(found[key] - none[key]).flatten() for key in others]).norm()
    assert difference <= 1e-6 * torch.cat([none[key].flatten() for key in others]).norm()


def test_the_dummy_is_padding_and_no_sample(vision_encoder: ChatEncoder) -> None:
    row = text_row(vision_encoder)
    plain, batch = collated(row, dummy_images="never"), collated(row, dummy_images="always")
    real = plain.input_ids.shape[1]
    assert batch.input_ids[0, real:].tolist() == vision_encoder.dummy.input_ids.tolist()  # type: ignore[union-attr]
    assert vision_encoder.tokenizer.decode(batch.input_ids[0, real:]) == "<|vision_start|><|image_pad|><|vision_end|>"
    assert batch.padding_mask is not None
    assert batch.padding_mask[0].tolist() == [False] * real + [True] * 3
    assert batch.cu_seqlens.tolist() == [*plain.cu_seqlens.tolist(), real + 3]
    assert batch.cu_seqlens_padded is None
    assert batch.position_ids[:, 0, real:].tolist() == [[0, 1, 2]] * 4
    assert (batch.ids, batch.sources, batch.num_images) == (plain.ids, plain.sources, plain.num_images)
    assert (batch.num_samples, batch.num_tokens) == (plain.num_samples, plain.num_tokens)
    assert [one.input_ids.tolist() for one in batch.split()] == [one.input_ids.tolist() for one in row]
    assert all(one.pixel_values is None for one in batch.split())
    inputs = batch.megatron_inputs()
    assert (inputs["labels"][0, real - 1 :] == -100).all()
    assert not inputs["loss_mask"][0, real - 1 :].any()
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert inputs["pixel_values"].shape == (4, text_pixels(vision_encoder))
    assert "pixel_values" not in megatron_batch(batch, "megatron-gpt")


def text_pixels(encoder: ChatEncoder) -> int:
    assert encoder.vision is not None
    return 3 * 2 * int(encoder.vision.image_processor.patch_size) ** 2


def test_rows_with_images_keep_their_images(vision_encoder: ChatEncoder) -> None:
    row = samples(vision_encoder, 1, 0)
    plain, batch = collated(row, dummy_images="never"), collated(row, dummy_images="always")
    assert batch.input_ids.tolist() == plain.input_ids.tolist()
    assert batch.image_grid_thw is not None
    assert batch.image_grid_thw.tolist() == plain.image_grid_thw.tolist()  # type: ignore[union-attr]
    assert plain.padding_mask is None
    assert batch.padding_mask is not None  # Megatron's ranks must agree on whether it exists
    assert not batch.padding_mask.any()


def test_by_default_the_number_of_ranks_decides(
    vision_encoder: ChatEncoder, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = text_row(vision_encoder)
    assert collated(row).pixel_values is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    collator = PaddingFreeCollator()
    assert collator.collate(row).pixel_values is not None
    monkeypatch.delenv("WORLD_SIZE")
    assert collator.collate(row).pixel_values is not None  # as in a worker process that knows nothing of ranks
    stored = vision_encoder.encode_row(["a"], row[0].input_ids, row[0].labels, [0, len(row[0])])
    assert collator.collate(stored).pixel_values is not None
    text = text_row(ChatEncoder.from_pretrained(text_tokenizer_dir))
    assert collator.collate(text).input_ids.shape[1] == sum(map(len, text))
