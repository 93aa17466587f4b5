"""How ranks end an epoch together: a collective operation hangs when one rank has a batch more than another."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from energon_packed.dataflow.manifests import LoadedSplit
from energon_packed.errors import ConfigError
from energon_packed.shards import steps_per_epoch

EvenRanks = Literal["auto", "repeat", "drop", "off"]
EVEN_RANKS: tuple[EvenRanks, ...] = ("auto", "repeat", "drop", "off")
_log = logging.getLogger(__name__)


def check_every_worker_has_packs(splits: Sequence[LoadedSplit], *, world_size: int, num_workers: int) -> None:
    """Refuse an endless loader in which a worker has nothing to repeat.

    Raises:
        ConfigError: fewer packs than loader workers; the message names both.
    """
    counts = [one.packs for one in splits if one.packs is not None]
    workers = world_size * max(1, num_workers)
    if len(counts) == len(splits) and sum(counts) < workers:
        others = f" and {len(splits) - 1} others have" if len(splits) > 1 else " has"
        raise ConfigError(
            f"{splits[0].path}{others} {sum(counts)} packs in split {splits[0].split!r}, fewer than the {workers} "
            f"loader workers that repeat them (world_size {world_size}, num_workers {num_workers}): use fewer, "
            "pack with a smaller --seq-len, or take epochs=1"
        )


def epoch_steps(
    even_ranks: EvenRanks,
    *,
    splits: Sequence[LoadedSplit],
    on_the_fly: bool,
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
        splits: what is read.
        on_the_fly: rows are packed while loading, so nobody knows their number before.
        dataset: makes this rank's Energon dataset, asked for its length where the manifests do not tell.
        world_size, rank: place of this process among the data-parallel ranks.
        micro_batch_size, num_workers, drop_last: as the loader has them.

    Raises:
        ConfigError: an unknown choice, one that needs numbers which nobody knows, or a rank without any pack.
    """
    if even_ranks not in EVEN_RANKS:
        raise ConfigError(f"even_ranks is {even_ranks!r}; use one of {', '.join(EVEN_RANKS)}")
    if world_size == 1 or even_ranks == "off":
        return None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if even_ranks == "auto" and not distributed and on_the_fly:
        return None
    if on_the_fly:
        raise ConfigError(
            f"even_ranks {even_ranks!r} needs the batches of every rank, and packing on the fly decides them while it "
            "runs, so ranks would end apart and collective operations hang: take epochs=None and count steps, pack "
            "offline, or use even_ranks='off'"
        )
    manifest = splits[0].manifest if len(splits) == 1 and splits[0].packs is not None else None
    if manifest is not None:
        steps = steps_per_epoch(
            manifest,
            world_size=world_size,
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            split=splits[0].split,
            drop_last=drop_last,
        )
    elif distributed:
        steps = _gathered(len(dataset(0)), rank, world_size)
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
    if min(steps) == 0:
        raise ConfigError(
            f"rank {steps.index(0)} of {world_size} has no batch while others have {max(steps)}: there are too few "
            "packs for so many ranks; use fewer ranks, pack with a smaller --seq-len, or even_ranks='off'"
        )
    return min(steps) if even_ranks == "drop" else max(steps)


def _gathered(steps: int, rank: int, world_size: int) -> list[int]:
    """Steps of every data-parallel rank; several processes (tensor-parallel ones) may share one of these."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (rank, steps))
    by_rank = dict(everyone)
    missing = [one for one in range(world_size) if one not in by_rank]
    if missing:
        raise ConfigError(
            f"no process of the group is rank {missing[0]} of world_size {world_size}; give each its data-parallel "
            "rank, or use even_ranks='off'"
        )
    return [by_rank[one] for one in range(world_size)]
