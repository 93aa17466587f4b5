"""Rows of random samples against loops over their tokens, and every column of a row through `split`."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import BatchError, ConfigError, EncodedSample, PackedBatch, PaddingFreeCollator, SampleSource
from tests.internals import VisionInputs

EXPONENTS = {"token": 0.0, "sample": 1.0, "sqrt": 0.5}


@settings(max_examples=20)
@given(
    samples=st.lists(st.lists(st.sampled_from([0, 0.5, 1, 3]), min_size=2, max_size=7), min_size=1, max_size=5),
    multiple=st.integers(1, 4),
    spare=st.none() | st.integers(0, 5),
    weighting=st.sampled_from(list(EXPONENTS)),
)
def test_a_row_is_what_a_loop_over_its_tokens_gives(
    samples: list[list[float]], multiple: int, spare: int | None, weighting: Any
) -> None:
    """A token is a target if its weight is not 0; the first of a sample never is."""
    samples = [[*weights, 2.0] for weights in samples]
    counts = [sum(weight > 0 for weight in weights[1:]) for weights in samples]
    factors = [count ** -EXPONENTS[weighting] for count in counts]
    scale = sum(counts) / sum(count * factor for count, factor in zip(counts, factors, strict=True))
    ids, labels, mask, padding, positions = list[int](), list[int](), list[float](), list[bool](), list[int]()
    unpadded, bounds, row = [0], [0], list[EncodedSample]()
    for number, weights in enumerate(samples):
        tokens = [100 * number + place + 1 for place in range(len(weights))]
        targets = [token if weight else -100 for token, weight in zip(tokens, weights, strict=True)]
        fill = -len(tokens) % multiple
        ids += tokens + [9] * fill
        labels += [-100, *targets[1:]] + [-100] * fill
        mask += [0, *(weight * factors[number] * scale for weight in weights[1:])] + [0] * fill
        padding += [False] * len(tokens) + [True] * fill
        positions += range(len(tokens) + fill)
        unpadded.append(unpadded[-1] + len(tokens))
        bounds.append(bounds[-1] + len(tokens) + fill)
        row.append(
            EncodedSample(
                id=str(number), input_ids=np.array(tokens), labels=np.array(targets), loss_weights=np.float32(weights)
            )
        )
    if spare:
        ids += [9] * spare
        labels += [-100] * spare
        mask += [0] * spare
        padding += [True] * spare
        positions += range(spare)
        unpadded.append(unpadded[-1] + spare)
        bounds.append(bounds[-1] + spare)
    pad_to = None if spare is None else bounds[-1]
    collator = PaddingFreeCollator(
        pad_multiple=multiple, pad_to=pad_to, pad_token_id=9, loss_weighting=weighting, dummy_images="never"
    )
    batch = collator.collate(row)
    assert batch.input_ids[0].tolist() == ids
    assert batch.labels[0].tolist() == labels
    assert batch.position_ids[0].tolist() == positions
    torch.testing.assert_close(batch.loss_mask[0], torch.tensor(mask, dtype=torch.float32))
    assert batch.loss_mask_scale == pytest.approx(scale)
    assert batch.cu_seqlens.tolist() == unpadded
    assert (batch.cu_seqlens.dtype, batch.max_seqlen) == (torch.int32, max(np.diff(bounds)))
    assert (batch.cu_seqlens_padded is None) == (unpadded == bounds)
    if batch.cu_seqlens_padded is not None:
        assert batch.cu_seqlens_padded.tolist() == bounds
    assert (batch.padding_mask is None) == (multiple == 1 and spare is None)
    if batch.padding_mask is not None:
        assert batch.padding_mask[0].tolist() == padding
    assert (batch.num_samples, batch.num_tokens) == (len(row), padding.count(False))
    megatron = batch.megatron_inputs()
    assert megatron["labels"][0].tolist() == [*labels[1:], -100]
    assert megatron["loss_mask"][0].tolist() == [*batch.loss_mask[0, 1:].tolist(), 0]
    for kind in ("q", "kv"):
        assert megatron[f"cu_seqlens_{kind}"] is batch.cu_seqlens
        assert megatron.get(f"cu_seqlens_{kind}_padded") is batch.cu_seqlens_padded
        assert megatron[f"max_seqlen_{kind}"] == batch.max_seqlen


def full_sample(number: int, images: int, videos: int, *, others: bool = False) -> EncodedSample:
    """A sample with a value in every column; images and videos of different sizes."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(1, 90, 4 + number)
    grids = [[1, 2, 2 * (one + 1)] for one in range(images)]
    clips = [[2 + one, 2, 2] for one in range(videos)]
    patches = sum(int(np.prod(grid)) for grid in grids)
    of_videos = sum(int(np.prod(grid)) for grid in clips)
    media: dict[str, Any] = {}
    if grids and others:
        media = {"vision_inputs": VisionInputs({"sizes": torch.rand(images, 2)}, {"sizes": 0}, images)}
    elif grids:
        media = {
            "pixel_values": torch.rand(patches, 3),
            "image_grid_thw": torch.tensor(grids),
            "patch_positions": rng.integers(0, 9, (patches, 3)),
        }
    if clips:
        media |= {
            "pixel_values_videos": torch.rand(of_videos, 3),
            "video_grid_thw": torch.tensor(clips),
            "second_per_grid_ts": np.arange(videos) + 0.5,
        }
    return EncodedSample(
        id=f"s{number}",
        input_ids=tokens,
        labels=np.array([-100, *tokens[1:]]),
        position_ids=rng.integers(0, 9, (3, len(tokens))),
        token_type_ids=rng.integers(0, 2, len(tokens)),
        loss_weights=rng.random(len(tokens), dtype=np.float32),
        source=SampleSource(f"d{number}", {}),
        image_token_id=95,
        video_token_id=96,
        **media,
    )


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("options", [{}, {"pad_multiple": 4}, {"pad_multiple": 4, "pad_to": 64}])
def test_split_returns_every_column(options: dict[str, int], others: bool) -> None:
    counts = [(2, 0), (0, 0), (1, 0), (0, 0), (3, 0)] if others else [(2, 1), (0, 0), (1, 0), (0, 2), (3, 1)]
    row = [full_sample(number, *count, others=others) for number, count in enumerate(counts)]
    batch = PaddingFreeCollator(**options).collate(row)
    found = batch.split()
    assert (batch.num_images, batch.num_videos) == ([i for i, _ in counts], [v for _, v in counts])
    assert len(found) == len(row)
    for one, expected in zip(found, row, strict=True):
        for name, value in vars(expected).items():
            of_batch = getattr(one, name)
            if isinstance(value, torch.Tensor | np.ndarray):
                assert of_batch.dtype == value.dtype, name
                assert of_batch.tolist() == value.tolist(), name
            elif isinstance(value, VisionInputs):
                assert of_batch.images == value.images
                assert torch.equal(of_batch.values["sizes"], value.values["sizes"])
            else:
                assert of_batch == value, name
    inputs = batch.megatron_inputs()
    assert inputs["position_ids"].tolist() == batch.position_ids[1:].tolist()
    cast = batch.to(dtype=torch.bfloat16)
    for name in ("pixel_values", "pixel_values_videos"):
        if getattr(batch, name) is not None:
            assert torch.equal(getattr(cast, name), getattr(batch, name).bfloat16())


def two_sources() -> tuple[PackedBatch, torch.Tensor]:
    ids = [np.arange(1, 5), np.arange(3, 9)]
    row = [
        EncodedSample(id=n, input_ids=one, labels=one, source=SampleSource(n, {}))
        for n, one in zip("ab", ids, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    return PaddingFreeCollator(pad_to=13).collate(row), torch.randn(1, 13, 10, generator=generator)


@pytest.mark.parametrize("signal", ["loss", "entropy", "gradient_norm"])
def test_signals_of_sources_are_those_of_autograd(signal: Any) -> None:
    batch, logits = two_sources()
    found = batch.loss_by_source(logits, signal)
    for name, (start, stop) in {"a": (0, 4), "b": (4, 10)}.items():
        values = []
        for place in range(start + 1, stop):
            of_token = logits[0, place - 1].clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(of_token, batch.input_ids[0, place])
            (gradient,) = torch.autograd.grad(loss, of_token)
            entropy = torch.distributions.Categorical(logits=of_token).entropy()
            values.append({"loss": loss, "entropy": entropy, "gradient_norm": gradient.norm()}[signal].item())
        assert found[name].item() == pytest.approx(np.mean(values), rel=1e-4)


def test_a_rank_without_a_row_has_no_target_and_no_name() -> None:
    batch, logits = two_sources()
    empty = batch.without_targets()
    assert (empty.ids, empty.has_targets, batch.has_targets, batch.ids) == ([None, None], False, True, ["a", "b"])
    assert empty.input_ids is batch.input_ids
    assert set(empty.labels[0].tolist()) == {-100}
    assert not empty.loss_mask.any()
    assert empty.transformers_inputs()["num_items_in_batch"] == 1
    assert "num_items_in_batch" not in batch.transformers_inputs()
    assert empty.loss(logits) == 0
    assert empty.loss_by_source(logits) == {}


@pytest.mark.parametrize("name", ["pad_multiple", "pad_to"])
def test_limits_of_padding(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must be at least 1, got 0"):
        PaddingFreeCollator(**{name: 0})
    row = [full_sample(0, 0, 0)]
    assert PaddingFreeCollator(**{name: 4}).collate(row).num_tokens == 4
    with pytest.raises(ConfigError, match="`loss_weighting` must be one of token, sample, sqrt, got 'x'"):
        PaddingFreeCollator(loss_weighting="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`pixel_dtype` must be torch.float32 or torch.bfloat16, got torch.int8"):
        PaddingFreeCollator(pixel_dtype=torch.int8)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_pixels_have_the_dtype_of_the_collator(dtype: torch.dtype | None) -> None:
    batch = PaddingFreeCollator(pixel_dtype=dtype).collate([full_sample(0, 2, 1), full_sample(1, 1, 1)])
    for values in (batch.pixel_values, batch.pixel_values_videos):
        assert values is not None
        assert values.dtype == (dtype or torch.float32)
    other = PaddingFreeCollator(pixel_dtype=dtype).collate([full_sample(0, 2, 0, others=True)])
    assert other.vision_inputs is not None
    assert other.vision_inputs["sizes"].dtype == (dtype or torch.float32)
    with pytest.raises(BatchError, match="Images of different vision families cannot share a row"):
        PaddingFreeCollator().collate([full_sample(0, 2, 0, others=True), full_sample(1, 1, 0)])
