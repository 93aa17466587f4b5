"""The loss of an optimizer step does not depend on how its samples are divided into rows and ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import BatchError, EncodedSample, PackedBatch, PaddingFreeCollator, step_targets
from tests.processes import run_ranks

WEIGHTINGS = ("token", "sample", "sqrt")


def sample(number: int, tokens: int) -> EncodedSample:
    ids = np.arange(number, number + tokens, dtype=np.int64)
    return EncodedSample(id=str(number), input_ids=ids, labels=np.where(np.arange(tokens) < 2, -100, ids))


SAMPLES = [sample(number, tokens) for number, tokens in enumerate((3, 20, 7, 11, 4, 30))]
ROWS = (SAMPLES[:2], SAMPLES[2:3], SAMPLES[3:])


def logits(batch: PackedBatch) -> torch.Tensor:
    """Logits that depend on the token alone."""
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))[batch.input_ids]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_losses_of_micro_batches_sum_to_the_loss_of_one_row(weighting: Any) -> None:
    collator = PaddingFreeCollator(loss_weighting=weighting)
    together = collator.collate(SAMPLES)
    batches = [collator.collate(row) for row in ROWS]
    targets = step_targets(batches)
    total = sum(batch.loss(logits(batch), targets=targets) for batch in batches)
    torch.testing.assert_close(total, together.loss(logits(together)), rtol=1e-6, atol=0)
    mean_of_means = sum(batch.loss(logits(batch)) for batch in batches) / 3
    assert abs(mean_of_means - total) > 1e-3


def test_targets_of_a_step_are_its_labels_samples_or_arguments_of_a_model() -> None:
    token, by_sample = ([PaddingFreeCollator(loss_weighting=w).collate(row) for row in ROWS] for w in WEIGHTINGS[:2])
    labels = sum(int((batch.labels != -100).sum()) for batch in token)
    assert step_targets(token) == labels
    assert step_targets(batch.transformers_inputs() for batch in token) == labels
    torch.testing.assert_close(step_targets(by_sample), torch.tensor(float(len(SAMPLES))))


def test_a_row_without_targets_adds_nothing_to_a_step() -> None:
    batch = PaddingFreeCollator().collate(SAMPLES)
    empty = batch.without_targets()
    assert step_targets([batch, empty]) == step_targets([batch])
    assert torch.equal(step_targets([]), torch.zeros(()))  # as on a rank without a row
    assert empty.loss(logits(empty), targets=step_targets([batch, empty])) == 0


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_batches_on_workers_and_devices_keep_the_scale_of_their_weights(weighting: Any) -> None:
    data = [[one] for one in SAMPLES]
    collate = PaddingFreeCollator(loss_weighting=weighting)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, collate_fn=collate.collate)
    for received, one in zip(loader, data, strict=True):
        assert received.to("cpu").loss_mask_scale == collate.collate(one).loss_mask_scale


def test_targets_are_the_mean_of_the_ranks_also_with_fewer_micro_batches(tmp_path: Path) -> None:
    script = """
from energon_packed import step_targets
from tests.loading.test_loss import PaddingFreeCollator, ROWS
batches = [PaddingFreeCollator().collate(row) for row in ROWS[: 2 - rank]]
print(float(step_targets(batches)), float(step_targets(batch.transformers_inputs() for batch in batches)))
"""
    first, second = ((batch.labels != -100).sum().item() for batch in map(PaddingFreeCollator().collate, ROWS[:2]))
    assert run_ranks(script, 2, tmp_path / "store") == [f"{first + second / 2} {first + second / 2}"] * 2


def test_weights_of_a_batch_are_refused_by_a_collator_that_ignores_them() -> None:
    batch = PaddingFreeCollator(loss_weighting="sample").collate(SAMPLES)
    with pytest.raises(BatchError, match=r"`loss_mask` must be 1 at every target, .* from 0\.0357 to 1\. Use"):
        PaddingFreeCollator()([batch])
