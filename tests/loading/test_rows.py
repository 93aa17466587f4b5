"""Rows, their losses and dummy images against loops over tokens; every column of a row through `split`."""

import sys
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import (
    BatchError,
    ConfigError,
    EncodedSample,
    PackedBatch,
    PaddingFreeCollator,
    SampleSource,
    step_targets,
)
from tests.internals import VisionInputs, target_signals, with_weights

EXPONENTS = {"token": 0.0, "sample": 1.0, "sqrt": 0.5}


DUMMY = EncodedSample(
    input_ids=np.array([7, 8, 6]),
    labels=np.array([-100, 8, 6]),
    pixel_values=torch.arange(8.0).reshape(4, 2),
    image_grid_thw=torch.tensor([[1, 2, 2]]),
)


@settings(max_examples=60)
@given(
    samples=st.lists(st.lists(st.sampled_from([0, 0.5, 1, 3]), min_size=1, max_size=7), max_size=5),
    multiple=st.integers(1, 4),
    spare=st.none() | st.integers(0, 5),
    weighting=st.sampled_from(list(EXPONENTS)),
    has_weights=st.booleans(),
    has_mrope=st.booleans(),
    has_dummy=st.booleans(),
)
def test_a_row_is_what_a_loop_over_its_tokens_gives(
    samples: list[list[float]],
    multiple: int,
    spare: int | None,
    weighting: Any,
    has_weights: bool,
    has_mrope: bool,
    has_dummy: bool,
) -> None:
    """A token is a target if its weight is not 0; the first of a sample never is."""
    samples = [[0.0, 2.0], *samples]
    if not has_weights:
        samples = [[float(weight > 0) for weight in weights] for weights in samples]
    counts = [sum(weight > 0 for weight in weights[1:]) for weights in samples]
    factors = [count ** -EXPONENTS[weighting] if count else 0.0 for count in counts]
    scale = sum(counts) / sum(count * factor for count, factor in zip(counts, factors, strict=True))
    ids, labels, mask, padding, positions = list[int](), list[int](), list[float](), list[bool](), list[int]()
    unpadded, bounds, row, mrope = [0], [0], list[EncodedSample](), [list[int]() for _ in range(3)]
    for number, weights in enumerate(samples):
        tokens = [100 * number + place + 1 for place in range(len(weights))]
        targets = [token if weight else -100 for token, weight in zip(tokens, weights, strict=True)]
        fill = -len(tokens) % multiple
        ids += tokens + [9] * fill
        labels += [-100, *targets[1:]] + [-100] * fill
        mask += [0, *(weight * factors[number] * scale for weight in weights[1:])] + [0] * fill
        padding += [False] * len(tokens) + [True] * fill
        positions += range(len(tokens) + fill)
        for axis, places in enumerate(mrope):
            places += [token * 10 + axis for token in tokens] + [*range(len(tokens), len(tokens) + fill)]
        unpadded.append(unpadded[-1] + len(tokens))
        bounds.append(bounds[-1] + len(tokens) + fill)
        row.append(
            EncodedSample(
                id=str(number),
                input_ids=np.array(tokens),
                labels=np.array(targets),
                loss_weights=np.float32(weights) if has_weights else None,
                position_ids=np.array([[token * 10 + axis for token in tokens] for axis in range(3)])
                if has_mrope
                else None,
            )
        )
    tail = DUMMY.input_ids.tolist() if has_dummy else []
    size = -(-len(tail) // multiple) * multiple if spare is None else spare
    pad_to = None if spare is None else bounds[-1] + spare
    collator = PaddingFreeCollator(
        pad_multiple=multiple,
        pad_to=pad_to,
        pad_token_id=9,
        loss_weighting=weighting,
        dummy_images=DUMMY if has_dummy else "never",
    )
    if len(tail) > size:
        with pytest.raises(BatchError, match=f"room for {spare} tokens up to `pad_to`, but the dummy .* needs 3"):
            collator.collate(row)
        return
    if size:
        ids += tail + [9] * (size - len(tail))
        labels += [-100] * size
        mask += [0] * size
        padding += [True] * size
        for places in (positions, *mrope):
            places += range(size)
        unpadded.append(unpadded[-1] + size)
        bounds.append(bounds[-1] + size)
    batch = collator.collate(row)
    megatron = batch.megatron_inputs()
    assert batch.input_ids[0].tolist() == ids
    assert batch.labels[0].tolist() == labels
    assert batch.position_ids.tolist() == ([[positions], *([axis] for axis in mrope)] if has_mrope else [positions])
    assert megatron["position_ids"].tolist() == ([[axis] for axis in mrope] if has_mrope else [positions])
    torch.testing.assert_close(batch.loss_mask[0], torch.tensor(mask, dtype=torch.float32))
    assert batch.loss_mask_scale == pytest.approx(scale)
    assert batch.cu_seqlens.tolist() == unpadded
    max_seqlen = max(np.diff(bounds))
    assert (batch.cu_seqlens.dtype, batch.max_seqlen) == (torch.int32, max_seqlen)
    assert (batch.cu_seqlens_padded is None) == (unpadded == bounds)
    if batch.cu_seqlens_padded is not None:
        assert batch.cu_seqlens_padded.tolist() == bounds
    assert (batch.padding_mask is None) == (multiple == 1 and spare is None and not has_dummy)
    if batch.padding_mask is not None:
        assert batch.padding_mask[0].tolist() == padding
    assert (batch.num_samples, batch.num_tokens) == (len(row), padding.count(False))
    assert megatron["labels"][0].tolist() == [*labels[1:], -100]
    assert megatron["loss_mask"][0].tolist() == [*batch.loss_mask[0, 1:].tolist(), 0]
    for kind in ("q", "kv"):
        assert megatron[f"cu_seqlens_{kind}"] is batch.cu_seqlens
        assert megatron.get(f"cu_seqlens_{kind}_padded") is batch.cu_seqlens_padded
        assert megatron[f"max_seqlen_{kind}"] == batch.max_seqlen
    inputs = batch.transformers_inputs(weighted_loss=True)
    assert [inputs.pop(name) for name in ("use_cache", "max_length_q", "max_length_k")] == [
        False,
        max_seqlen,
        max_seqlen,
    ]
    assert inputs.pop("cu_seq_lens_q").tolist() == inputs.pop("cu_seq_lens_k").tolist() == bounds
    segments = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    assert "seq_idx" not in inputs if len(bounds) == 2 else inputs.pop("seq_idx").tolist() == [segments.tolist()]
    assert inputs.keys() - {"pixel_values", "image_grid_thw"} == {"input_ids", "labels", "position_ids"}
    assert ("pixel_values" in inputs) == has_dummy
    assert not has_dummy or inputs["pixel_values"].tolist() == DUMMY.pixel_values.tolist()  # type: ignore[union-attr]
    assert batch.num_images == [0] * len(row)
    assert (batch.__key__, batch.__restore_key__) == ([one.id for one in row], ())
    assert all(one.pixel_values is one.image_grid_thw is None for one in batch.split())


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
        values = {
            "sizes": torch.rand(images, 2),
            "pixel_values": torch.rand(1, images, 3),
            "tiles": torch.arange(images),
        }
        media = {"vision_inputs": VisionInputs(values, {"sizes": 0, "pixel_values": 1, "tiles": 0}, images)}
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
        position_ids=None if others else rng.integers(0, 9, (3, len(tokens))),
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
                assert (of_batch.images, of_batch.dims) == (value.images, value.dims)
                assert {name: each.tolist() for name, each in of_batch.values.items()} == {
                    name: each.tolist() for name, each in value.values.items()
                }
            else:
                assert of_batch == value, name
    cast = batch.to(dtype=torch.bfloat16)
    for name in ("pixel_values", "pixel_values_videos"):
        if getattr(batch, name) is not None:
            assert torch.equal(getattr(cast, name), getattr(batch, name).bfloat16())
    if others:
        assert batch.vision_inputs is not None
        assert cast.vision_inputs is not None
        assert torch.equal(cast.vision_inputs["pixel_values"], batch.vision_inputs["pixel_values"].bfloat16())
        assert torch.equal(cast.vision_inputs["sizes"], batch.vision_inputs["sizes"])
        assert {value.device.type for value in (batch.to("meta").vision_inputs or {}).values()} == {"meta"}


def test_the_inputs_of_a_dummy_are_of_no_sample() -> None:
    dummy = full_sample(0, 1, 0, others=True)
    batch = PaddingFreeCollator(dummy_images=dummy).collate([full_sample(1, 0, 0, others=True)])
    assert batch.vision_inputs is not None
    assert [one.vision_inputs for one in batch.split()] == [None]


@pytest.mark.parametrize("types", [[0, 0, 0], [0, 1, 1]])
def test_images_with_token_types_are_alone_in_their_row(types: list[int]) -> None:
    one = EncodedSample(input_ids=np.arange(3), labels=np.arange(3), token_type_ids=np.array(types))
    inputs = PaddingFreeCollator().collate([one]).transformers_inputs()
    assert inputs["token_type_ids"].tolist() == [types]
    two = PaddingFreeCollator().collate([one, one])
    if any(types):
        with pytest.raises(BatchError, match="A row with images must have 1 segment for this model family, got 2"):
            two.transformers_inputs()
    else:
        assert two.transformers_inputs()["token_type_ids"].tolist() == [types * 2]


@pytest.mark.parametrize("has_total", [False, True])
def test_packed_seq_params_have_the_fields_of_the_release(monkeypatch: pytest.MonkeyPatch, has_total: bool) -> None:
    """A stand-in for releases that are not installed; `tests/integrations/megatron` uses the installed one."""
    names = ["qkv_format", *(f"{name}_{kind}" for name in ("cu_seqlens", "max_seqlen") for kind in ("q", "kv"))]
    names += ["cu_seqlens_q_padded", "cu_seqlens_kv_padded", *["total_tokens"] * has_total]
    release = SimpleNamespace(PackedSeqParams=make_dataclass("PackedSeqParams", names))
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", release)
    batch = PaddingFreeCollator(pad_multiple=4).collate([full_sample(0, 0, 0), full_sample(1, 0, 0)])
    found = vars(batch.packed_seq_params())
    assert found.pop("qkv_format") == "thd"
    assert found.pop("total_tokens", None) == (12 if has_total else None)
    assert found == {name: getattr(batch, name.replace("_q", "").replace("_kv", "")) for name in found}
    assert len(found) == 6
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    with pytest.raises(BatchError, match="packed_seq_params requires megatron-core; run pip install"):
        batch.packed_seq_params()


def two_sources() -> tuple[PackedBatch, torch.Tensor]:
    ids = [np.arange(1, 5), np.arange(3, 9)]
    row = [
        EncodedSample(id=n, input_ids=one, labels=one, source=SampleSource(n, {}))
        for n, one in zip("ab", ids, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    return PaddingFreeCollator(pad_to=13).collate(row), torch.randn(1, 13, 10, generator=generator)


@settings(max_examples=25)
@given(
    samples=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]),
            st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0.125, 1, 3])), min_size=2, max_size=5),
        ),
        min_size=1,
        max_size=4,
    ),
    tail=st.integers(0, 2),
    weighting=st.sampled_from(list(EXPONENTS)),
    size=st.sampled_from([1, 60]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_losses_and_signals_are_those_of_autograd(
    samples: list[tuple[str | None, list[tuple[int, float]]]], tail: int, weighting: Any, size: int, dtype: torch.dtype
) -> None:
    samples = [("a", [(0, 0), (2, 0.125)]), *samples]
    row, sources = list[EncodedSample](), list[str | None]()
    for source, tokens in samples:
        ids, weights = (np.array(column) for column in zip(*tokens, strict=True))
        labels, origin = np.where(weights > 0, ids, -100), None if source is None else SampleSource(source, {})
        row.append(EncodedSample(input_ids=ids, labels=labels, loss_weights=np.float32(weights), source=origin))
        sources += [source or "unknown"] * len(tokens)
    batch = PaddingFreeCollator(pad_to=len(sources) + tail, loss_weighting=weighting).collate(row)
    logits = torch.randn(1, len(sources) + tail, 4, generator=torch.Generator().manual_seed(len(sources)))
    logits = (logits * size).to(dtype)
    weights, expected = batch.loss_mask[0].tolist(), dict[str, list[float]]()
    for place in range(1, len(sources) + tail):
        of_token = logits[0, place - 1].double().requires_grad_()
        label = batch.labels[0, place]
        loss = torch.nn.functional.cross_entropy(of_token, label.clamp(min=0))
        (gradient,) = torch.autograd.grad(loss, of_token)
        entropy = torch.distributions.Categorical(logits=of_token).entropy()
        for name, value in {"loss": loss, "entropy": entropy, "gradient_norm": gradient.norm()}.items():
            expected.setdefault(name, []).append(0.0 if label == -100 else value.item())
    for signal, values in expected.items():
        found = target_signals(logits, batch.labels, signal)
        assert (found.dtype, found.tolist()) == (torch.float32, pytest.approx(values, rel=1e-4, abs=1e-3))
        sums = dict[str, np.ndarray[Any, Any]]()
        for source, weight, value in zip(sources[1:], weights[1:], values, strict=False):
            sums[source] = sums.get(source, np.zeros(2)) + np.array([weight * value, weight])
        means = {source: total / weight for source, (total, weight) in sums.items() if weight}
        of_source = batch.loss_by_source(logits, signal)  # type: ignore[arg-type]
        assert {name: value.item() for name, value in of_source.items()} == pytest.approx(means, rel=1e-4, abs=1e-3)
    total = sum(weight * value for weight, value in zip(weights[1:], expected["loss"], strict=True))
    assert batch.loss(logits).item() == pytest.approx(total / sum(weights), rel=1e-4, abs=1e-5)
    of_step = batch.loss(logits, targets=7).item()
    assert of_step == pytest.approx(total / 7 / batch.loss_mask_scale, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("targets", [None, 7, torch.tensor(7.0)])
def test_a_loss_is_on_the_device_of_the_logits(targets: Any) -> None:
    batch, logits = two_sources()
    assert batch.loss(logits.to("meta"), targets=targets).device.type == "meta"
    assert target_signals(logits.to("meta"), batch.labels, "entropy").device.type == "meta"


@pytest.mark.parametrize("weighting", ["token", "sample"])
@pytest.mark.parametrize("weights", [None, (1, 1, 1, 1), (1, 3, 0.5, 1)])
def test_weights_reach_a_trainer_that_applies_them(weighting: Any, weights: tuple[float, ...] | None) -> None:
    """A sample of 4 tokens and one of 2: the mean weight by `sample` is not 1."""
    column = None if weights is None else np.float32(weights)
    row = [
        EncodedSample(input_ids=np.arange(4), labels=np.arange(4), loss_weights=column),
        EncodedSample(input_ids=np.arange(2), labels=np.arange(2)),
    ]
    collator = PaddingFreeCollator(loss_weighting=weighting)
    batch = collator.collate(row)
    if weights is None and weighting == "token":
        assert "num_items_in_batch" not in batch.transformers_inputs()
    else:
        with pytest.raises(BatchError, match="`weighted_loss` must be True with loss weights other than 1, got False"):
            batch.transformers_inputs()
    inputs = with_weights(collator)([batch])
    assert not collator._with_weights
    if weighting == "token" and weights in (None, (1, 1, 1, 1)):
        assert "loss_mask" not in inputs
        assert "loss_mask" not in collator([batch])
    else:
        assert inputs["loss_mask"].tolist() == (batch.loss_mask / batch.loss_mask_scale).tolist()
        with pytest.raises(BatchError, match=r"`loss_\w+` must be"):
            collator([batch])
    assert step_targets([inputs, inputs]).item() == pytest.approx(step_targets([batch, batch]).item())


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
    assert PaddingFreeCollator(pad_multiple=2).collate(row).padding_mask is not None
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
    assert other.vision_inputs["tiles"].dtype == torch.int64
    with pytest.raises(BatchError, match="Images of different vision families cannot share a row"):
        PaddingFreeCollator().collate(
            [full_sample(0, 2, 0, others=True), replace(full_sample(1, 1, 0), position_ids=None)]
        )


def text_row(dummy: EncodedSample | None = DUMMY) -> list[EncodedSample]:
    """5 tokens of an encoder with this dummy."""
    return [replace(DUMMY, pixel_values=None, image_grid_thw=None, dummy=dummy), EncodedSample(**TWO)]


TWO: Any = {"input_ids": np.array([1, 2]), "labels": np.array([1, 2])}


def test_a_dummy_is_added_if_several_processes_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = PaddingFreeCollator()
    assert alone.collate(text_row()).pixel_values is None
    assert alone.collate(text_row()).padding_mask is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert alone.collate(text_row()).pixel_values is not None
    collator = PaddingFreeCollator()
    monkeypatch.delenv("WORLD_SIZE")
    assert collator.collate(text_row()).pixel_values is not None  # as in a worker process that knows nothing of ranks
    assert collator.collate(text_row(None)).pixel_values is None
    assert PaddingFreeCollator(dummy_images="never").collate(text_row()).pixel_values is None
    other = replace(DUMMY, pixel_values=DUMMY.pixel_values + 1)  # type: ignore[operator]
    assert torch.equal(PaddingFreeCollator(dummy_images=other).collate(text_row()).pixel_values, other.pixel_values)
    for pictured in (full_sample(0, 1, 0), full_sample(0, 0, 1)):  # media of its own: only the mask remains
        own = PaddingFreeCollator(dummy_images=DUMMY).collate([pictured])
        assert own.input_ids.tolist() == [pictured.input_ids.tolist()]
        assert own.padding_mask is not None


def test_by_default_a_full_row_has_a_warning_in_place_of_a_dummy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron's recipes pad to `seq_len`, and its own reduction waits for no gradient."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    collator = PaddingFreeCollator(pad_to=7)
    for _ in range(2):
        assert collator.collate(text_row()).pixel_values is None
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "A row without images has room for 2 tokens up to `pad_to`"
    ]
    assert "Set `pad_to` to at least `seq_len` + 3, or pack with a smaller `seq_len`." in caplog.text
    with pytest.raises(BatchError, match="The row has 5 tokens but `pad_to` is 4"):
        PaddingFreeCollator(pad_to=4).collate(text_row())
    assert len(caplog.records) == 1


def test_dummies_that_cannot_be_added_raise() -> None:
    row = text_row()
    with pytest.raises(BatchError, match="A row without images has room for 2 tokens up to `pad_to`, .* needs 3. Set"):
        PaddingFreeCollator(dummy_images="always", pad_to=7).collate(row)
    assert PaddingFreeCollator(dummy_images="always", pad_to=8).collate(row).pixel_values is not None
    with pytest.raises(ConfigError, match="must be one of auto, always, never, or `encoder.dummy`, got 'yes'"):
        PaddingFreeCollator(dummy_images="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a sample with an image"):
        PaddingFreeCollator(dummy_images=row[0])
    with pytest.raises(BatchError, match="needs samples of an encoder with a vision family"):
        PaddingFreeCollator(dummy_images="always").collate(text_row(None))


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])), min_size=1
    ),
    dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    device=st.sampled_from(["cpu", "meta"]),
)
def test_pixels_are_joined_as_torch_joins_them(
    parts: list[tuple[int, torch.dtype]], dtype: torch.dtype | None, device: str
) -> None:
    pixels = [torch.rand(patches, 2, 3).to(part).to(device) for patches, part in parts]
    row = [EncodedSample(**TWO, pixel_values=one) for one in pixels]
    found = PaddingFreeCollator(pixel_dtype=dtype).collate([EncodedSample(**TWO), *row]).pixel_values
    expected = torch.cat(pixels) if dtype is None else torch.cat(pixels).to(dtype)
    assert found is not None
    assert (found.device, found.dtype, found.shape) == (expected.device, expected.dtype, expected.shape)
    if device == "cpu":
        assert torch.equal(found, expected)


def test_media_of_different_encoders_cannot_share_a_row() -> None:
    others = full_sample(0, 2, 0, others=True)
    assert others.vision_inputs is not None
    other_dims = replace(others, vision_inputs=replace(others.vision_inputs, dims={"sizes": 0}))
    clip = replace(full_sample(1, 0, 1), position_ids=None)
    for second, message in (
        (replace(full_sample(1, 1, 0), position_ids=None), "Images of different vision families cannot share a row"),
        (clip, "Images of different vision families cannot share a row"),
        (other_dims, "Images of different vision families cannot share a row"),
    ):
        for row in ([others, second], [second, others]):
            with pytest.raises(BatchError, match=message):
                PaddingFreeCollator().collate(row)
    for row in ([clip, replace(clip, second_per_grid_ts=None)], [replace(clip, second_per_grid_ts=None), clip]):
        with pytest.raises(BatchError, match="Some samples with videos have second_per_grid_ts and some do not"):
            PaddingFreeCollator().collate(row)
    flat, square = (EncodedSample(**TWO, pixel_values=torch.zeros(1, *shape)) for shape in ((4,), (2, 2)))
    with pytest.raises(BatchError, match=r"Patches must have one shape, got \[\(2, 2\), \(4,\)\]"):
        PaddingFreeCollator().collate([flat, square])
    without = PaddingFreeCollator().collate([EncodedSample(**TWO), others, others])
    assert without.split()[0].vision_inputs is None
    assert [one.num_images for one in without.split()] == [0, 2, 2]
