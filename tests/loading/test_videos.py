"""Packed rows with videos: the model sees the same as for each sample alone, and batches keep every part."""

import copy
import pickle
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import (
    BatchError,
    ChatEncoder,
    DataflowLoader,
    EncodedSample,
    IsolationError,
    MapDistributor,
    PackedBatch,
    PaddingFreeCollator,
    RecordError,
    SimpleBatcher,
    check_isolation,
)
from tests.loading.clips import MODELS, ROW, Clips
from tests.loading.models import tiny_model


@pytest.fixture(scope="module", params=MODELS)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def clips(name: str, encoder: ChatEncoder) -> Clips:
    return Clips(name, tiny_model(name, encoder, "sdpa"))


@pytest.fixture(scope="module")
def row(clips: Clips) -> list[EncodedSample]:
    return clips.samples()


def collated(row: list[EncodedSample], **options: Any) -> PackedBatch:
    return PaddingFreeCollator(**options).collate(row)


@pytest.fixture(scope="module")
def separate(clips: Clips, row: list[EncodedSample]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits (T, vocabulary), loss over all targets, and gradients of the samples, each in its own forward pass."""
    clips.model.zero_grad()
    outputs = [clips.alone(sample) for sample in row]
    counts = [sample.num_supervised for sample in row]
    loss = sum(output.loss * count for output, count in zip(outputs, counts, strict=True)) / sum(counts)
    loss.backward()
    logits = torch.cat([output.logits[0].detach() for output in outputs])
    return logits, loss.detach(), {key: p.grad.clone() for key, p in clips.model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [{}, {"pad_multiple": 8, "pad_to": 1024}], ids=["plain", "padded"])
def test_a_packed_row_equals_its_samples_alone(
    clips: Clips, row: list[EncodedSample], separate: Any, attention: str, padding: dict[str, Any]
) -> None:
    logits, loss, gradients = separate
    batch = collated(row, **padding)
    model = clips.model
    model.set_attn_implementation(attention)
    model.zero_grad()
    output = model(**batch.transformers_inputs())
    output.loss.backward()
    real = slice(None) if batch.padding_mask is None else ~batch.padding_mask[0]
    assert (output.logits[0][real] - logits).abs().max() <= 1e-5
    assert abs(output.loss.item() - loss.item()) <= 1e-5 * loss.item()
    found = {key: p.grad for key, p in model.named_parameters()}
    assert any(".visual." in key and gradients[key].any() for key in gradients)
    norm = torch.cat([gradients[key].flatten() for key in gradients]).norm()
    assert torch.cat([(found[key] - gradients[key]).flatten() for key in gradients]).norm() <= 1e-5 * norm


@pytest.mark.parametrize("change", ["three rows of positions", "no boundaries", "seconds", "order of videos"])
def test_the_comparison_sees_an_error(
    name: str, clips: Clips, row: list[EncodedSample], separate: Any, change: str
) -> None:
    inputs = collated(row).transformers_inputs()
    if change == "three rows of positions":  # without the text row, Transformers builds no boundaries
        inputs["position_ids"] = inputs["position_ids"][1:]
    elif change == "no boundaries":
        inputs["position_ids"] = inputs["position_ids"].clone()
        inputs["position_ids"][0, 0] = torch.arange(inputs["input_ids"].shape[1])
    elif change == "seconds":
        other = [clips.positions(s.input_ids, s.image_grid_thw, s.video_grid_thw, None) for s in row]
        if name != "qwen2_5_vl":  # positions of these models do not depend on seconds
            assert all((left == right.position_ids).all() for left, right in zip(other, row, strict=True))
            return
        inputs["position_ids"] = inputs["position_ids"].clone()
        inputs["position_ids"][1:, 0] = torch.from_numpy(np.concatenate(other, axis=1))
    else:
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].flip(0)
    with torch.no_grad():
        logits = clips.model(**inputs).logits[0]
    assert (logits - separate[0]).abs().max() > 1e-4


def test_a_row_with_images_and_videos_runs_the_vision_tower_once(clips: Clips, row: list[EncodedSample]) -> None:
    """Ranks whose rows have different media must run the same collective operations."""
    calls: list[int] = []
    hook = clips.model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    try:
        for kinds in (ROW, ("image",), ("video", "text"), ("video image",), ("text",)):
            calls.clear()
            with torch.no_grad():
                clips.model(**collated(clips.samples(kinds), dummy_images="never").transformers_inputs())
            assert len(calls) == (kinds != ("text",))
    finally:
        hook.remove()


def test_batches_have_the_media_of_their_samples(name: str, row: list[EncodedSample]) -> None:
    batch = collated(row)
    assert batch.num_images == [0, 0, 1, 2, 0, 0, 1]
    assert batch.num_videos == [0, 1, 0, 1, 0, 2, 1]
    assert batch.position_ids.shape == (4, 1, sum(map(len, row)))
    with_video = [sample for sample in row if sample.video_grid_thw is not None]
    assert torch.equal(batch.video_grid_thw, torch.cat([sample.video_grid_thw for sample in with_video]))  # type: ignore
    assert batch.pixel_values_videos.shape[0] == batch.video_grid_thw.prod(dim=1).sum()  # type: ignore[union-attr]
    if name == "qwen2_5_vl":
        assert batch.second_per_grid_ts.dtype == torch.float32  # type: ignore[union-attr]
        assert batch.second_per_grid_ts.shape == (5,)  # type: ignore[union-attr]
    else:
        assert batch.second_per_grid_ts is None
    bounds = batch.cu_seqlens.tolist()
    for sample, start, end in zip(row, bounds, bounds[1:], strict=False):
        assert (batch.position_ids[1:, 0, start:end].numpy() == sample.position_ids).all()


@pytest.mark.parametrize("padding", [{}, {"pad_multiple": 8, "pad_to": 1024}], ids=["plain", "padded"])
def test_split_returns_the_samples(row: list[EncodedSample], padding: dict[str, int]) -> None:
    for found, sample in zip(collated(row, **padding).split(), row, strict=True):
        for field in fields(sample):
            left, right = getattr(found, field.name), getattr(sample, field.name)
            if field.name == "labels":
                left, right = left[1:], right[1:]
            elif field.name == "second_per_grid_ts" and right is not None:
                right = right.astype(np.float32)
            if isinstance(right, np.ndarray | torch.Tensor):
                assert np.array_equal(left, right), field.name
            else:
                assert left == right


def test_order_of_packs_and_stored_rows_keep_media(row: list[EncodedSample]) -> None:
    """Samples of several packs in one row, one of them without the media of the others."""
    again = collated([*row[4:], *row[:4]]).split()
    assert [sample.id for sample in again] == [sample.id for sample in [*row[4:], *row[:4]]]
    assert torch.equal(again[1].pixel_values_videos, row[5].pixel_values_videos)  # type: ignore[arg-type]
    assert again[0].video_grid_thw is None


def test_batches_travel_between_processes(row: list[EncodedSample]) -> None:
    batch = collated(row)
    loader = DataflowLoader(MapDistributor(row, shuffle=False), packer=SimpleBatcher(len(row)), num_workers=1)
    for received in (
        pickle.loads(pickle.dumps(batch)),
        pickle.loads(bytes(ForkingPickler.dumps(batch))),
        copy.deepcopy(batch),
        next(iter(loader)),
    ):
        assert same(received, batch)


def same(left: PackedBatch, right: PackedBatch) -> bool:
    for field in fields(right):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name
        elif not field.name.startswith("__"):
            assert one == other, field.name
    return True


def test_pixels_of_videos_are_cast_and_moved(row: list[EncodedSample]) -> None:
    batch = collated(row)
    cast = batch.to(dtype=torch.bfloat16)
    assert cast.pixel_values_videos.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert collated(row, pixel_dtype=torch.bfloat16).pixel_values_videos.dtype == torch.bfloat16  # type: ignore
    if batch.second_per_grid_ts is not None:
        assert cast.second_per_grid_ts is batch.second_per_grid_ts
    assert batch.to("meta").video_grid_thw.device.type == "meta"  # type: ignore[union-attr]


def test_a_video_is_never_cut(clips: Clips) -> None:
    sample = clips.sample("video")
    last = int(np.flatnonzero(sample.input_ids == clips.config.video_token_id)[-1])
    first = int(np.flatnonzero(sample.input_ids == clips.config.video_token_id)[0])
    for length in (first + 1, (first + last) // 2, last):
        with pytest.raises(RecordError, match="would remove part of a video"):
            sample.truncated(length)
    assert len(sample.truncated(len(sample))) == len(sample)


def test_isolation_of_rows_with_videos(clips: Clips, row: list[EncodedSample]) -> None:
    batch = collated(row)
    assert not check_isolation(clips.model, batch).leaks
    leaking = copy.copy(batch)
    leaking.position_ids = batch.position_ids.clone()
    leaking.position_ids[0, 0] = torch.arange(batch.input_ids.shape[1])
    with pytest.raises(IsolationError, match="does not keep packed samples apart"):
        check_isolation(clips.model, leaking)


def test_samples_of_two_encoders_are_refused(encoder: ChatEncoder) -> None:
    one = Clips("qwen2_5_vl", tiny_model("qwen2_5_vl", encoder, "sdpa")).sample("video")
    other = Clips("qwen2_vl", tiny_model("qwen2_vl", encoder, "sdpa")).sample("video")
    with pytest.raises(BatchError, match="Some samples with videos have second_per_grid_ts and some do not"):
        collated([one, other])
