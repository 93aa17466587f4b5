"""How ranks end an epoch together: a collective operation hangs when one rank has a batch more than another."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch

from energon_packed.errors import ConfigError
from energon_packed.shards import PackingManifest, steps_per_epoch

EvenRanks = Literal["auto", "repeat", "drop", "off"]
EVEN_RANKS: tuple[EvenRanks, ...] = ("auto", "repeat", "drop", "off")
_log = logging.getLogger(__name__)


def epoch_steps(
    even_ranks: EvenRanks,
    *,
    manifest: PackingManifest | None,
    split: str,
    dataset: Callable[[int], Any],
    world_size: int,
    rank: int,
    micro_batch_size: int,
    num_workers: int,
    drop_last: bool,
) -> int | None:
    """Steps that this rank takes in one epoch, so that all ranks take the same; None to end when its data ends.

    Args:
        even_ranks: `repeat` ranks with less data repeat their last batch, `drop` ranks with more leave some out,
            `off` each rank ends with its data, `auto` is `repeat` inside a torch.distributed process group and
            `off` outside of one.
        manifest: of the data set; None for a Metadataset, or where packing on the fly decides the number.
        split, micro_batch_size, num_workers, drop_last: as the loader has them.
        dataset: makes this rank's Energon dataset, asked for its length where there is no manifest.
        world_size, rank: place of this process.

    Raises:
        ConfigError: an unknown choice, or one that needs numbers which nobody knows.
    """
    if even_ranks not in EVEN_RANKS:
        raise ConfigError(f"even_ranks is {even_ranks!r}; use one of {', '.join(EVEN_RANKS)}")
    if world_size == 1 or even_ranks == "off":
        return None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if manifest is not None:
        steps = steps_per_epoch(
            manifest,
            world_size=world_size,
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            split=split,
            drop_last=drop_last,
        )
    elif distributed:
        gathered: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(gathered, len(dataset(0)))
        steps = gathered
    elif even_ranks == "auto":
        return None
    else:
        raise ConfigError(
            f"even_ranks {even_ranks!r} needs the batches of every rank, which only a folder with packing.json or a "
            "torch.distributed process group tells; use even_ranks='off', or repeat for ever with epochs=None"
        )
    if min(steps) == max(steps):
        return None
    if even_ranks == "auto" and not distributed:
        _log.warning(
            "ranks end unevenly, after %d to %d batches; before collective operations use even_ranks='repeat' or "
            "'drop', or epochs=None",
            min(steps),
            max(steps),
        )
        return None
    return min(steps) if even_ranks == "drop" else max(steps)
