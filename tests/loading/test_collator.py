"""Batches laid out by hand, and what must hold for any of them."""

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from energon_packed import (
    BatchError,
    ConfigError,
    DefaultBatchCollator,
    EncodedSample,
    PackedBatch,
    PaddingFreeCollator,
    SampleSource,
)
from tests.internals import EncodedRow, StoredTokens, with_extra, with_weights


def sample(ids: list[int], first_target: int = 0, *, mrope: bool = False) -> EncodedSample:
    tokens = np.array(ids, dtype=np.int64)
    labels = np.where(np.arange(len(ids)) >= first_target, tokens, -100)
    positions = np.stack([np.arange(len(ids)) + 10 * row for row in range(3)]) if mrope else None
    return EncodedSample(id=f"s{ids[0]}", input_ids=tokens, labels=labels, position_ids=positions)


def test_golden_row() -> None:
    batch = PaddingFreeCollator().collate([sample([11, 12, 13]), sample([21, 22]), sample([31, 32, 33, 34], 2)])
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 31, 32, 33, 34]]
    assert batch.labels.tolist() == [[-100, 12, 13, -100, 22, -100, -100, 33, 34]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 1, 0, 0, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert (batch.max_seqlen, batch.num_samples, batch.num_tokens, batch.ids) == (4, 3, 9, ["s11", "s21", "s31"])
    assert batch.cu_seqlens_padded is None
    assert batch.padding_mask is None
    dtypes = (batch.input_ids.dtype, batch.labels.dtype, batch.loss_mask.dtype, batch.cu_seqlens.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.float32, torch.int32)


def test_golden_row_for_megatron() -> None:
    inputs = PaddingFreeCollator().collate([sample([11, 12, 13]), sample([21, 22])]).megatron_inputs()
    assert inputs["tokens"].tolist() == [[11, 12, 13, 21, 22]]
    assert inputs["labels"].tolist() == [[12, 13, -100, 22, -100]]
    assert inputs["loss_mask"].tolist() == [[1, 1, 0, 1, 0]]
    assert inputs["cu_seqlens_q"].tolist() == [0, 3, 5]
    assert (inputs["max_seqlen_q"], inputs["total_tokens"]) == (3, 5)
    assert "cu_seqlens_q_padded" not in inputs


def test_golden_row_with_padding() -> None:
    collator = PaddingFreeCollator(pad_multiple=4, pad_to=15, pad_token_id=7)
    batch = collator.collate([sample([11, 12, 13]), sample([21, 22, 23, 24, 25])])
    assert batch.input_ids.tolist() == [[11, 12, 13, 7, 21, 22, 23, 24, 25, 7, 7, 7, 7, 7, 7]]
    assert batch.labels.tolist()[0][3:5] == [-100, -100]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 11]
    assert batch.cu_seqlens_padded is not None
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 12, 15]
    assert batch.padding_mask is not None
    assert batch.padding_mask.int().tolist() == [[0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert (batch.max_seqlen, batch.num_tokens, batch.num_samples) == (8, 8, 2)
    assert batch.transformers_inputs()["cu_seq_lens_q"].tolist() == [0, 4, 12, 15]


def test_a_tail_alone_needs_no_second_boundaries() -> None:
    batch = PaddingFreeCollator(pad_to=8).collate([sample([11, 12, 13]), sample([21, 22])])
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.cu_seqlens_padded is None
    full = PaddingFreeCollator(pad_to=5).collate([sample([11, 12, 13]), sample([21, 22])])
    assert full.cu_seqlens.tolist() == [0, 3, 5]
    assert full.padding_mask is not None
    assert not full.padding_mask.any()


def test_mrope_positions_are_four_rows() -> None:
    batch = PaddingFreeCollator(pad_to=6).collate([sample([11, 12, 13], mrope=True), sample([21, 22], mrope=True)])
    assert batch.position_ids.shape == (4, 1, 6)
    assert batch.position_ids[:, 0].tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 1, 2, 0, 1, 0],
        [10, 11, 12, 10, 11, 0],
        [20, 21, 22, 20, 21, 0],
    ]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    multiple=st.integers(1, 5),
    spare=st.none() | st.integers(0, 5),
)
@example(lengths=[3], multiple=2, spare=None)
def test_padding_can_be_taken_off_again(lengths: list[int], multiple: int, spare: int | None) -> None:
    samples = [sample(list(range(100 * i + 1, 100 * i + 1 + n))) for i, n in enumerate(lengths, start=1)]
    if max(lengths) == 1:
        return
    total = sum(-(-n // multiple) * multiple for n in lengths)
    collator = PaddingFreeCollator(pad_multiple=multiple, pad_to=None if spare is None else total + spare)
    batch = collator.collate(samples)
    plain = PaddingFreeCollator().collate(samples)
    keep = torch.ones_like(batch.labels, dtype=torch.bool) if batch.padding_mask is None else ~batch.padding_mask
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        assert getattr(batch, name)[keep].tolist() == getattr(plain, name)[0].tolist()
    for form in (batch, plain):
        inputs = form.megatron_inputs()
        mask = torch.ones_like(form.labels, dtype=torch.bool) if form.padding_mask is None else ~form.padding_mask
        assert inputs["labels"][mask].tolist() == plain.megatron_inputs()["labels"][0].tolist()
    assert batch.input_ids.shape[1] == total + (spare or 0)
    assert batch.num_tokens == sum(lengths)


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([], {}, "must have at least 1 sample"),
        ([sample([1, 2, 3])], {"pad_to": 2}, "3 tokens but `pad_to` is 2. Set `pad_to` to at least 3"),
        ([sample([1, 2], 2), sample([3], 0)], {}, "No token of s1, s3 is a target"),
        ([sample([1, 2]), sample([3, 4], mrope=True)], {}, "some samples have M-RoPE positions and some do not"),
    ],
)
def test_samples_that_make_no_batch_are_refused(
    samples: list[EncodedSample], options: dict[str, int], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        PaddingFreeCollator(**options).collate(samples)


def test_patch_positions_of_some_images_only_are_refused() -> None:
    grid = torch.tensor([[1, 2, 2]])
    plain = replace(sample([1, 2]), image_grid_thw=grid, pixel_values=torch.zeros(4, 3))
    positioned = replace(plain, patch_positions=np.zeros((4, 3), dtype=np.int64))
    with pytest.raises(BatchError, match="have patch positions and some do not"):
        PaddingFreeCollator().collate([plain, positioned])
    batch = PaddingFreeCollator().collate([positioned, sample([3, 4]), positioned])
    assert batch.patch_positions is not None
    assert batch.patch_positions.shape == (8, 3)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="`pad_multiple` must be at least 1, got 0"):
        PaddingFreeCollator(pad_multiple=0)


def test_a_collator_serves_a_torch_loader() -> None:
    samples = [sample([10 * i + 1, 10 * i + 2]) for i in range(6)]
    loader: torch.utils.data.DataLoader[PackedBatch] = torch.utils.data.DataLoader(
        samples,  # type: ignore[arg-type]
        batch_size=4,
        collate_fn=PaddingFreeCollator(),
    )
    assert [batch.cu_seqlens.tolist() for batch in loader] == [[0, 2, 4, 6, 8], [0, 2, 4]]


def test_a_batch_of_packs_and_samples_is_refused() -> None:
    """Not the packs alone, without the samples."""
    for features in ([[sample([1, 2])], sample([3, 4])], [sample([3, 4]), [sample([1, 2])]]):
        with pytest.raises(BatchError, match="needs EncodedSamples, got list"):
            PaddingFreeCollator()(features)


def test_weights_that_a_stock_trainer_would_not_read_are_refused() -> None:
    packs = [[sample([1, 2])], [sample([3, 4])]]
    assert set(PaddingFreeCollator()(packs)) > {"input_ids", "labels"}
    with pytest.raises(BatchError, match="got 'sample': a model's own loss ignores loss_mask"):
        PaddingFreeCollator(loss_weighting="sample")(packs)
    PaddingFreeCollator(loss_weighting="sample")(packs[0])  # a PackedBatch has its loss_mask


class WithTypes(StoredTokens):  # type: ignore[misc]
    """Stored tokens of a model with M-RoPE positions and token types."""

    def encode_row(self, *columns: Any) -> Any:
        row = super().encode_row(*columns)
        row.position_ids = np.stack([np.arange(len(row.input_ids)) * factor for factor in (1, 2, 3)])
        row.token_type_ids = np.arange(len(row.input_ids)) % 2
        return row


@pytest.mark.parametrize("options", [{}, {"pad_multiple": 4}, {"pad_to": 20}, {"pad_multiple": 4, "pad_to": 20}])
@pytest.mark.parametrize("encoder", [StoredTokens(), WithTypes()])
def test_a_row_is_collated_as_its_samples(encoder: Any, options: dict[str, Any]) -> None:
    tokens = np.arange(11, 22)
    labels = np.where(tokens % 4, tokens, -100)
    row = encoder.encode_row(["a", "b", None], tokens, labels, np.array([0, 3, 5, 11], dtype=np.int32))
    row.sources = [SampleSource("data", {})] * 3
    collator = PaddingFreeCollator(**options)
    of_row, of_samples = collator.collate(row), collator.collate(list(row))
    assert len(row) == 3
    assert [len(one) for one in row] == [3, 2, 6]
    for name in (one.name for one in fields(of_samples)):
        found, expected = getattr(of_row, name), getattr(of_samples, name)
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype, name
            assert found.tolist() == expected.tolist(), name
        else:
            assert found == expected, name
    mask = of_row.padding_mask
    real = torch.ones_like(of_row.input_ids, dtype=torch.bool) if mask is None else ~mask
    assert of_row.input_ids[real].tolist() == tokens.tolist()
    if of_row.token_type_ids is not None:
        assert of_row.token_type_ids[real].tolist() == row.token_type_ids.tolist()
        assert of_row.position_ids[1:, real].tolist() == row.position_ids.tolist()
    of_row.input_ids.fill_(0)  # a batch is the trainer's: the row keeps its tokens
    of_row.cu_seqlens.fill_(0)
    assert row.cu_seqlens.tolist() == [0, 3, 5, 11]
    assert row.input_ids.tolist() == list(range(11, 22))
    assert row.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("encoder", [StoredTokens(), WithTypes()])
@pytest.mark.parametrize("weighted", [True, False])
def test_stored_rows_are_joined_by_their_columns(encoder: Any, weighted: bool) -> None:
    """A loader with several packs in a batch."""
    first, second = (np.arange(start, start + 9) for start in (11, 40))
    weights = np.linspace(0.5, 1.5, 9, dtype=np.float32) if weighted else None
    rows = [
        encoder.encode_row(["a", "b"], first, first, [0, 4, 9], weights),
        encoder.encode_row(["c"], second, second, [0, 9], None),
    ]
    rows[0].sources, rows[1].sources = [SampleSource("data", {}), SampleSource("more", {})], [None]
    joined: Any = EncodedRow.joined(rows)
    expected = EncodedRow.of([one for row in rows for one in row])
    for name in (one.name for one in fields(EncodedRow) if one.name != "_joined"):
        found, wanted = getattr(joined, name), getattr(expected, name)
        if isinstance(wanted, np.ndarray):
            assert (found.tolist(), found.dtype.kind) == (wanted.tolist(), wanted.dtype.kind), name
        else:
            assert found == wanted, name
    assert isinstance(joined, EncodedRow)  # no list of samples
    assert [len(one) for one in joined] == [4, 5, 9]
    assert EncodedRow.joined(rows[:1]) is rows[0]
    assert EncodedRow.joined([rows[0], list(rows[1])]) == [*rows[0], *rows[1]]
    assert EncodedRow.joined([]) == []


@pytest.mark.parametrize("own_types", [True, False])
def test_token_types_of_a_dummy_image_are_at_its_tokens(own_types: bool) -> None:
    """The tail is padded behind the dummy."""
    types = np.array([1, 2, 3])
    dummy = replace(
        sample([7, 8, 9]),
        token_type_ids=types,
        pixel_values=torch.zeros(4, 2),
        image_grid_thw=torch.tensor([[1, 2, 2]]),
    )
    row = [replace(sample([1, 2]), token_type_ids=np.array([4, 5]) if own_types else None, dummy=dummy)]
    batch = PaddingFreeCollator(dummy_images="always", pad_multiple=8).collate(row)
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.dtype == torch.int64
    at = batch.input_ids[0].tolist().index(7)
    expected = [0] * batch.input_ids.shape[1]
    expected[:2] = [4, 5] if own_types else [0, 0]
    expected[at : at + 3] = [1, 2, 3]
    assert batch.token_type_ids[0].tolist() == expected
    without = PaddingFreeCollator(dummy_images="never").collate(row)
    assert (without.token_type_ids is None) == (not own_types)


IMAGE, VIDEO = 900, 901


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6), st.booleans())
def test_images_and_videos_of_a_row_are_one_call_in_the_order_of_their_tokens(
    media: list[tuple[bool, int, int]], has_seconds: bool
) -> None:
    """Each item is an image of one step, or a video of its own steps and seconds; 4 patches are a token."""
    ids, grids, videos = [1], list[list[int]](), list[list[int]]()
    pixels: list[list[float]] = []
    pixels_of_videos: list[list[float]] = []
    seconds, expected = list[float](), list[tuple[list[int], float, list[list[float]]]]()
    for number, (is_video, steps, height) in enumerate(media):
        grid = [steps if is_video else 1, 2 * height, 2]
        patches = [[float(number), float(patch)] for patch in range(grid[0] * grid[1] * grid[2])]
        ids += [VIDEO if is_video else IMAGE] * (len(patches) // 4) + [2]
        (videos if is_video else grids).append(grid)
        (pixels_of_videos if is_video else pixels).extend(patches)
        seconds += [number + 0.5] if is_video else []
        expected.append((grid, number + 0.5 if is_video else 1.0, patches))
    row = replace(
        sample(ids),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        pixel_values=torch.tensor(pixels) if grids else None,
        image_grid_thw=torch.tensor(grids) if grids else None,
        pixel_values_videos=torch.tensor(pixels_of_videos) if videos else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=np.array(seconds) if videos and has_seconds else None,
    )
    inputs = PaddingFreeCollator(dummy_images="never").collate([row]).transformers_inputs()
    if not (grids and videos):
        assert inputs["input_ids"][0].tolist() == ids
        assert ("pixel_values" in inputs, "pixel_values_videos" in inputs) == (bool(grids), bool(videos))
        return
    assert inputs["input_ids"][0].tolist() == [VIDEO if one == IMAGE else one for one in ids]
    assert "pixel_values" not in inputs
    assert inputs["video_grid_thw"].tolist() == [grid for grid, _, _ in expected]
    assert inputs["pixel_values_videos"].tolist() == [patch for _, _, patches in expected for patch in patches]
    if has_seconds:
        assert inputs["second_per_grid_ts"].tolist() == [value for _, value, _ in expected]
    else:
        assert "second_per_grid_ts" not in inputs


@pytest.mark.parametrize("column", ["image_token_id", "video_token_id", "pixel_values", "image_grid_thw"])
def test_a_row_without_what_one_call_needs_is_passed_as_it_is(column: str) -> None:
    grid = torch.tensor([[1, 2, 2]])
    row = replace(
        sample([1, IMAGE, VIDEO]),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        pixel_values=torch.rand(4, 2),
        image_grid_thw=grid,
        pixel_values_videos=torch.rand(4, 2),
        video_grid_thw=grid,
    )
    assert "pixel_values" not in PaddingFreeCollator().collate([row]).transformers_inputs()
    positioned = replace(row, patch_positions=np.zeros((4, 3), dtype=np.int64))
    for one in (replace(row, **{column: None}), positioned):  # type: ignore[arg-type]
        inputs = PaddingFreeCollator().collate([one]).transformers_inputs()
        assert inputs["input_ids"].tolist() == [[1, IMAGE, VIDEO]]
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            assert inputs.get(name) is None if name == column and one is not positioned else name in inputs
    for name in ("pixel_values_videos", "video_grid_thw"):
        inputs = PaddingFreeCollator().collate([replace(row, **{name: None})]).transformers_inputs()  # type: ignore[arg-type]
        assert (inputs["input_ids"].tolist(), name in inputs) == ([[1, IMAGE, VIDEO]], False)


@pytest.mark.parametrize("weighting", ["token", "sample", "sqrt"])
def test_a_collator_is_called_with_what_loaders_and_trainers_pass(weighting: Any) -> None:
    collator = PaddingFreeCollator(loss_weighting=weighting)
    with pytest.raises(BatchError, match="A batch must have at least 1 sample, got 0"):
        collator([])
    with pytest.raises(BatchError, match="PaddingFreeCollator needs EncodedSamples, got int. Return EncodedSamples"):
        collator([1])
    row = [replace(sample([1, 2]), id="a"), replace(sample([1, 2]), id="b")]
    assert collator(row).ids == ["a", "b"]
    for trainer in (with_weights(collator), *([collator] if weighting == "token" else [])):
        for packs in ([row], [row[:1], row[1:]], [{"pack": row}], [{"pack": [one]} for one in row]):
            assert trainer(packs)["input_ids"].tolist() == [[1, 2, 1, 2]]
        features = [{"input_ids": one.input_ids} for one in row]
        assert trainer(features)["input_ids"].tolist() == [[1, 2, 1, 2]]
        finished = collator.collate(row)
        assert trainer([finished])["input_ids"] is finished.input_ids
        with pytest.raises(BatchError, match="A batch of finished rows must have 1 row, got 2"):
            trainer([finished, finished])
    copied = pickle.loads(pickle.dumps(collator))
    assert (copied.loss_weighting, copied(row).ids) == (weighting, ["a", "b"])


def test_extras_are_computed_from_the_batch() -> None:
    collator = PaddingFreeCollator()
    one = with_extra(collator, "names", lambda batch: batch.ids)
    both = with_extra(one, "tokens", lambda batch: batch.num_tokens)
    row = [replace(sample([1, 2]), id="a")]
    names = [{"names", "tokens"} & each([row]).keys() for each in (collator, one, both)]
    assert names == [set(), {"names"}, {"names", "tokens"}]
    inputs = both([row])
    assert (inputs["names"], inputs["tokens"], inputs["input_ids"].tolist()) == (["a"], 2, [[1, 2]])


def test_samples_of_any_type_are_stacked_as_torch_stacks_them() -> None:
    samples = [{"x": torch.arange(3), "y": 1}, {"x": torch.arange(3) + 1, "y": 2}]
    expected = torch.utils.data.default_collate(samples)
    for found in (DefaultBatchCollator()(samples), DefaultBatchCollator().collate(samples)):
        assert torch.equal(found["x"], expected["x"])
        assert torch.equal(found["y"], expected["y"])
