"""The batches of the ranks of a stream in, the same number of batches on every rank out; see `epoch_end`.

rank 0   a b c -        `repeat`: rank 0 gets row g of rank 1 without targets
rank 1   d e f g -      `drop`: the epoch ends before g; `error`: ConfigError on both ranks
"""

import logging
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import chain, repeat
from typing import Any

import torch

from energon_packed.encoding.sample import IGNORE_INDEX
from energon_packed.errors import ConfigError, WorkerError
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.epoch_end import EpochEnd
from energon_packed.loading.ranks import broadcast_object, group_place, has_group

_log = logging.getLogger(__name__)
_TIMEOUT = timedelta(minutes=30)
"""Longest time between the same batch of two ranks: reading, a checkpoint, or an evaluation on one rank."""


def without_targets(batch: Any) -> Any:
    """Return the same row without targets, for a rank that has no row in a step.

    Args:
        batch: PackedBatch, or the dict of inputs that a custom collator returns.

    Raises:
        ConfigError: a batch of another type.
    """
    if isinstance(batch, PackedBatch):
        return batch.without_targets()
    if isinstance(batch, Mapping) and "labels" in batch:
        empty = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "loss_mask": 0}
        changed = {k: torch.full_like(batch[k], value) for k, value in empty.items() if k in batch}
        rows = {k: v.without_targets() for k, v in batch.items() if isinstance(v, PackedBatch)}
        return {**batch, **changed, **rows}
    raise ConfigError(
        f"`epoch_end='repeat'` needs batches with `labels`, got {type(batch).__name__}. Return a PackedBatch or a "
        "dict from the collator, or set `epoch_end='drop'`."
    )


class EvenRanks:
    """Make the ranks of a stream end an epoch together: before each batch, they exchange whether they have a batch.

    Every rank must iterate its loader, because the exchange is a collective operation, in a separate gloo group.

    Args:
        epoch_end: the option.
        rank, world_size: place in the process group.
    """

    _group: tuple[Any, Any] = (None, None)  # (default group, gloo group of the same processes)

    def __init__(self, epoch_end: EpochEnd, rank: int, world_size: int) -> None:
        self._epoch_end, self._rank, self._world_size = epoch_end, rank, world_size

    @classmethod
    def of(cls, epoch_end: EpochEnd, place: tuple[int, int]) -> "EvenRanks | None":
        """Return the object for a loader of (rank, world size); None if its ranks cannot or need not communicate.

        Raises:
            ConfigError: `drop` or `error`, and the ranks of the loader are not the ranks of the process group.
        """
        if place[1] == 1:
            return None
        if has_group() and group_place() == place:
            return cls(epoch_end, *place)
        if epoch_end != "repeat":
            raise ConfigError(
                f"`epoch_end={epoch_end!r}` needs packs of a known number, or a process group with the ranks of the "
                f"loader, got rank {place[0]} of {place[1]}. Set 'repeat' and count steps, or pack offline."
            )
        if has_group():
            _log.warning(
                "Rank %d of %d is not the rank of this process in its process group, so the ranks of this stream may "
                "end at different steps. Count steps.",
                *place,
            )
        return None

    def even(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this rank, until all ranks end together.

        Args:
            batches: batches of this rank. With `drop`, some may be left.

        Raises:
            ConfigError: `epoch_end` is `error`, and some ranks have no batch.
            WorkerError: another rank ended, failed, or does not iterate.
        """
        for number, batch in enumerate(chain(batches, repeat(None)), 1):
            agreed = self._agreed(number, batch)
            if agreed is None:
                return
            yield agreed

    def _agreed(self, number: int, batch: Any) -> Any:
        """Return the batch of this rank in a step; None at the end of the epoch."""
        present = torch.zeros(self._world_size, dtype=torch.int32)
        present[self._rank] = batch is not None
        try:
            torch.distributed.all_reduce(present, group=self._gloo())
        except RuntimeError as error:
            raise WorkerError(
                f"batch {number} of this iteration was not read on all ranks: another rank failed, or does not "
                "iterate its loader. See the error of that rank."
            ) from error
        if present.all():
            return batch
        if not present.any():
            return None
        longer, shorter = int(present.argmax()), int(present.argmin())
        if self._epoch_end == "error":
            raise ConfigError(
                f"`epoch_end='error'` needs ranks with the same number of batches, got no batch {number} on rank "
                f"{shorter}, and more batches on rank {longer}. Set 'repeat' or 'drop'."
            )
        if self._epoch_end == "drop":
            if batch is not None:
                _log.warning(
                    "`epoch_end='drop'` leaves out the batches of rank %d from number %d on, as rank %d has ended.",
                    self._rank,
                    number,
                    shorter,
                )
            return None
        row = without_targets(batch) if self._rank == longer else None
        row = broadcast_object(row, self._gloo(), first=longer)
        return row if batch is None else batch

    @classmethod
    def _gloo(cls) -> Any:
        """The group of the exchange: NCCL would wait for the GPU, and may have other operations in flight."""
        world = torch.distributed.group.WORLD
        if cls._group[0] is not world:
            cls._group = world, torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        return cls._group[1]
