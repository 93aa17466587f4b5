"""ThroughputMetrics: counts of every batch type against the samples, values over the ranks, time."""

import gc
import json
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    DataflowLoader,
    EncodedSample,
    JointLoader,
    MapDistributor,
    PackedDataset,
    PaddingFreeCollator,
    SampleSource,
    SequentialPacker,
    ThroughputMetrics,
)
from tests.conftest import Packer
from tests.internals import count_batch, megatron_batch
from tests.processes import run_ranks

LENGTHS = [5, 9, 2]
TARGETS = [3, 6, 1]


def samples() -> list[EncodedSample]:
    found = []
    for number, (length, targets) in enumerate(zip(LENGTHS, TARGETS, strict=True)):
        labels = np.array([-100] * (length - targets) + [1] * targets)
        source = SampleSource("ab"[number % 2], {})
        found.append(EncodedSample(id=str(number), input_ids=np.ones(length, int), labels=labels, source=source))
    return found


def forms(batch: Any) -> dict[str, Any]:
    """The batch in every type that this project yields."""
    layouts = ["bridge"]
    layouts += ["megatron-gpt"] if batch.pixel_values is None else []
    layouts += ["megatron-lm"] if batch.cu_seqlens_padded is None else []
    found = {"packed": batch, "joint": ("name", batch), "transformers": batch.transformers_inputs()}
    return found | {"megatron": batch.megatron_inputs()} | {name: megatron_batch(batch, name) for name in layouts}


def sizes(counts: Any) -> tuple[int, ...]:
    return counts.tokens, counts.padding, counts.targets, counts.samples, counts.squares


def test_every_type_of_a_batch_has_the_same_counts() -> None:
    for name, batch in forms(PaddingFreeCollator().collate(samples())).items():
        counts = count_batch(batch).read()
        assert sizes(counts) == (16, 0, 10, 3, 25 + 81 + 4), name
        assert counts.sources == ({"a": 7, "b": 9} if name in ("packed", "joint") else {}), name


def test_padding_is_not_counted_as_tokens() -> None:
    # Samples of 8, 12 and 4 tokens with padding, and a tail of 6.
    squares = 64 + 144 + 16 + 36
    for name, batch in forms(PaddingFreeCollator(pad_multiple=4, pad_to=30).collate(samples())).items():
        is_marked = name not in ("transformers", "megatron-gpt")
        expected = (16, 14, 10, 3, squares) if is_marked else (30, 0, 10, 4, squares)
        assert sizes(count_batch(batch).read()) == expected, name
    # The layout megatron-lm has no padding between samples, and no mask of the tail.
    batch = PaddingFreeCollator(pad_to=20).collate(samples())
    assert sizes(count_batch(batch).read()) == (16, 4, 10, 3, 25 + 81 + 4 + 16)
    assert sizes(count_batch(megatron_batch(batch, "megatron-lm")).read()) == (20, 0, 10, 4, 25 + 81 + 4 + 16)
    empty = count_batch(batch.without_targets()).read()
    assert (empty.tokens, empty.padding, empty.targets, empty.samples, empty.sources) == (0, 20, 0, 0, {})


def test_batches_of_other_collators() -> None:
    features = [{"input_ids": [1] * n, "labels": [-100] * (n - t) + [1] * t} for n, t in zip(LENGTHS, TARGETS)]  # noqa: B905
    for flash in (False, True):
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)(features)
        assert sizes(count_batch(batch).read()) == (16, 0, 10, 3, 25 + 81 + 4)
    padded = {
        "input_ids": torch.ones(3, 9, dtype=torch.int64),
        "attention_mask": torch.tensor([[1] * n + [0] * (9 - n) for n in LENGTHS]),
        "position_ids": torch.arange(9).expand(3, 9),
        "labels": torch.tensor([[-100] * (n - t) + [1] * t + [-100] * (9 - n) for n, t in zip(LENGTHS, TARGETS)]),  # noqa: B905
    }
    assert sizes(count_batch(padded).read()) == (16, 11, 10, 3, 3 * 81)
    with pytest.raises(BatchError, match="`batch` must be a PackedBatch or a dict with `input_ids`, got dict"):
        count_batch({"pixel_values": 1})


def test_rows_with_images_have_patches(pack_demo: Packer, encoder: ChatEncoder) -> None:
    dataset = PackedDataset(pack_demo().shards, encoder)
    number = next(n for n in range(len(dataset)) if any(sample.image_grid_thw is not None for sample in dataset[n]))
    batch = PaddingFreeCollator().collate(dataset[number])
    areas = batch.image_grid_thw.prod(dim=1)
    for name, form in forms(batch).items():
        counts = count_batch(form).read()
        assert (counts.patches, counts.patch_squares) == (areas.sum(), (areas**2).sum()), name
        assert counts.samples == len(dataset[number]), name


def test_values_are_those_of_the_batches() -> None:
    data = [{"input_ids": [1] * 8, "labels": [-100] * 4 + [1] * 4}] * 6
    metrics = ThroughputMetrics(seq_len=20)
    batches = list(metrics.watch(DataflowLoader(MapDistributor(data), packer=SequentialPacker(20))))
    assert [batch.num_tokens for batch in batches] == [16, 16, 16]
    assert metrics.steps == 3
    found = metrics.summary()
    assert found.pop("data/wait_s") > 0
    assert found.pop("perf/tokens_per_s") == pytest.approx(2 * found.pop("perf/targets_per_s"))
    assert found == {
        "data/tokens_per_step": 16, "data/samples_per_pack": 2, "data/supervised_share": 0.5, "data/utilization": 0.8,
        "data/padding": 0, "perf/global_seq_len_avg": 16, "perf/global_seq_len_min": 16,
        "perf/global_seq_len_max": 16, "perf/imbalance": 1,
    }  # fmt: skip
    assert metrics.summary() == {}
    with pytest.raises(ConfigError, match="`micro_batches` must be at least 1, got 0"):
        ThroughputMetrics(micro_batches=0)


def test_a_joint_loader_and_the_time_of_steps() -> None:
    batch = PaddingFreeCollator().collate(samples())
    joint = JointLoader({"a": [batch] * 4}, {"a": 1}, stop="first")
    metrics = ThroughputMetrics(micro_batches=2)
    start = time.perf_counter()
    for _ in metrics.watch(joint):
        time.sleep(0.02)
    metrics.end_step()
    took = time.perf_counter() - start
    time.sleep(0.2)  # an evaluation
    start = time.perf_counter()
    metrics.restart_timer()
    for _ in range(2):
        metrics.add(batch)
    metrics.end_step()
    took += time.perf_counter() - start
    assert metrics.steps == 3
    found = metrics.summary()
    assert found["data/tokens_per_step"] == 32
    assert 96 / took * 0.999 <= found["perf/tokens_per_s"] <= 96 / 0.08
    assert found["data/source/a"] == 7 / 16


def test_boundaries_may_repeat_their_last_value() -> None:
    """Megatron fills `cu_seqlens` of a fixed size with the end of the row."""
    for pad_to in (None, 30):
        batch = PaddingFreeCollator(pad_multiple=4, pad_to=pad_to).collate(samples())
        expected = count_batch(batch).read()
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            bounds = getattr(batch, name)
            batch = replace(batch, **{name: torch.cat([bounds, bounds[-1:].expand(4)])})
        assert count_batch(batch).read() == expected


def test_memory_is_bounded_without_a_summary() -> None:
    """Each batch is kept until its step is folded; the later summary counts all of them."""
    metrics, batch = ThroughputMetrics(), PaddingFreeCollator().collate(samples())
    counts = count_batch(batch).read()
    counted = count_batch(batch)
    kept = weakref.ref(counted.numbers)
    metrics.add_counts(counted)
    del counted
    for _ in range(19_999):
        metrics.add_counts(counts)
    gc.collect()
    assert kept() is None
    assert metrics.steps == 20_000
    assert all(len(getattr(metrics._counts, name)) < 20_000 for name in ("step_tokens", "step_costs"))
    found = metrics.summary()
    assert (found["data/tokens_per_step"], found["perf/global_seq_len_avg"]) == (16, 16)
    assert metrics.steps == 0


METRICS = """
import json
from energon_packed import CostModel, DataflowLoader, EncodedSample, MapDistributor, SampleSource, ThroughputMetrics
import numpy as np
metrics = ThroughputMetrics(seq_len=40, micro_batches=2, cost=CostModel(token=0, square=1, patch=0))
lengths = [[4, 4, 12], [20, 2, 2, 2, 30]][rank]
data = [EncodedSample(id="s", input_ids=np.ones(n, int), labels=np.ones(n, int), source=SampleSource("ab"[rank], {}))
        for n in lengths]
for batch in DataflowLoader(MapDistributor(data, shuffle=False), batch_size=1, rank=0, world_size=1):
    metrics.add(batch, wait=1.0)
print(json.dumps([metrics.summary(), metrics.summary()]))
"""


def test_metrics_over_ranks(tmp_path: Path) -> None:
    (found, later), (other, _) = (json.loads(output) for output in run_ranks(METRICS, 2, tmp_path / "store"))
    assert found == other
    assert later == {}
    # Steps of rank 0: 8 and 12 tokens, and of rank 1: 22, 4 and 30. Squares: 32 and 144; 404, 8 and 900.
    assert found["perf/global_seq_len_avg"] == pytest.approx((15 + 8 + 15) / 3)
    assert found["perf/global_seq_len_min"] == pytest.approx((8 + 4 + 0) / 3)
    assert found["perf/global_seq_len_max"] == pytest.approx((22 + 12 + 30) / 3)
    assert found["perf/imbalance"] == pytest.approx((404 + 144 + 900) / ((436 + 152 + 900) / 2))
    assert found["data/tokens_per_step"] == pytest.approx(76 / 3)
    assert found["data/utilization"] == pytest.approx(76 / (8 * 40))
    assert found["data/supervised_share"] == pytest.approx(68 / 76)  # not the mean of 17 / 20 and 51 / 56
    assert found["data/wait_s"] == pytest.approx(8 / 2 / 3)
    assert found["data/source/a"] == pytest.approx(20 / 76)
    assert found["data/source/b"] == pytest.approx(56 / 76)
