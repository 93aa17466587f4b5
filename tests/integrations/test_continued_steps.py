"""PackedTrainer that continues with another number of packs in a step: the last step, the epochs and the packs."""

from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackedDataset, PackedTrainer, packed_training_arguments
from tests.integrations.launched import tiny_qwen2
from tests.integrations.trainer_runs import QUIET, Recording, StopAt, Used

EPOCHS = 2


def trained(
    packs: Path, folder: Path, layout: tuple[int, int], *, stop: int = 0, resume: Path | None = None, **more: Any
) -> tuple[PackedTrainer, list[list[str | None]]]:
    """Train with (packs of a batch, batches of a step); return the samples of each batch that was used."""
    data, collator, used = PackedDataset(packs), Recording(), Used()
    size, accumulation = layout
    steps: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    steps |= {"save_steps": stop or 500, "save_strategy": "steps" if stop else "no"}
    args = packed_training_arguments(str(folder), data, **QUIET | steps | {"num_train_epochs": EPOCHS} | more)
    callbacks = [used, StopAt(stop)] if stop else [used]
    trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=collator, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, collator.seen[: used.used]


@pytest.mark.parametrize(
    ("before", "after", "stop", "ignore_data_skip"),
    [
        ((1, 1), (2, 1), 5, False),  # more packs in a step, as with more processes
        ((2, 1), (1, 1), 5, False),  # fewer packs, as with fewer processes
        ((1, 1), (1, 2), 3, False),  # the last step of the continued epoch is short
        ((1, 3), (1, 2), 1, True),
        ((2, 1), (1, 2), 7, False),  # in the second epoch
        ((1, 1), (2, 1), 12, False),  # at the end of an epoch
        ((1, 2), (1, 2), 4, False),
    ],
)
def test_every_pack_is_used_in_each_epoch(
    short_packs: Path,
    tmp_path: Path,
    before: tuple[int, int],
    after: tuple[int, int],
    stop: int,
    ignore_data_skip: bool,
) -> None:
    count, width = len(PackedDataset(short_packs)), after[0] * after[1]
    assert count == 12
    _, first = trained(short_packs, tmp_path, before, stop=stop)
    path = tmp_path / f"checkpoint-{stop}"
    trainer, second = trained(short_packs, tmp_path, after, resume=path, ignore_data_skip=ignore_data_skip)
    used = stop * before[0] * before[1]
    seen = Counter(name for batch in first + second for name in batch)
    assert set(seen.values()) == {EPOCHS}
    left = count - used if used <= count else 2 * count - used
    steps = stop + ceil(left / width) + (ceil(count / width) if used <= count else 0)
    assert trainer.state.global_step == trainer.state.max_steps == steps
    assert trainer.state.epoch == EPOCHS
    assert set(trainer.lr_scheduler.get_last_lr()) == {0}, "the scheduler was made for another last step"


def test_max_steps_is_not_changed(short_packs: Path, tmp_path: Path) -> None:
    trained(short_packs, tmp_path, (2, 1), stop=8, max_steps=20)
    trainer, _ = trained(short_packs, tmp_path, (1, 1), resume=tmp_path / "checkpoint-8", max_steps=20)
    assert (trainer.state.global_step, trainer.state.epoch) == (20, pytest.approx(2 + 4 / 12))
