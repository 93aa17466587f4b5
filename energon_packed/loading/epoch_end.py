"""`epoch_end`: the packs that do not fill the last step of all ranks. Every rank has the same number of batches.

| `epoch_end` | last step of an epoch, if its packs do not fill it |
|---|---|
| `repeat` | a rank without a batch gets a row without targets, so every pack counts once; a short batch stays short |
| `drop` | the step is left out on all ranks, with a warning |
| `error` | ConfigError on all ranks |

Loaders that know their packs compute the steps (`Order`, `steps_of_epoch`). The ranks of a stream do not know when the
other ranks end, so they exchange one number before each batch (`even_ranks.EvenRanks`).
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Literal

from energon_packed.errors import ConfigError
from energon_packed.options import check_choice
from energon_packed.shards.steps import steps_of_ranks

EpochEnd = Literal["repeat", "drop", "error"]
_log = logging.getLogger(__name__)


def check_epoch_end(epoch_end: str) -> None:
    """Check the value of `epoch_end`. Raises ConfigError."""
    check_choice("epoch_end", epoch_end, EpochEnd)


def check_rest(epoch_end: EpochEnd, rest: int, count: int, *, warns: bool = False) -> None:
    """Report the packs that do not fill the last step: an error, a warning, or nothing for `repeat`.

    Args:
        epoch_end: the option.
        rest: packs of an epoch after its last full step.
        count: packs of an epoch.
        warns: log the warning of `drop`; on one rank.

    Raises:
        ConfigError: `epoch_end` is `error`, and `rest` is not 0.
    """
    if rest and epoch_end == "error":
        raise ConfigError(
            f"`epoch_end='error'` needs packs that fill every step, got {rest} of {count} packs in the last step. Set "
            "'repeat' or 'drop', or change the number of ranks."
        )
    if rest and epoch_end == "drop" and warns:
        _log.warning(
            "`epoch_end='drop'` leaves out %d of %d packs in each epoch. Set 'repeat' to train on all.", rest, count
        )


def steps_of_epoch(
    packs: Sequence[tuple[int, float]],
    *,
    world_size: int,
    micro_batch_size: int,
    num_workers: int,
    epoch_end: EpochEnd = "repeat",
    warns: bool = False,
) -> int:
    """Return the micro batches of every rank in one epoch of the Energon loader.

    Args:
        packs, world_size, micro_batch_size, num_workers: as for `steps_of_ranks`.
        epoch_end: `repeat`: steps of the rank with the most batches; `drop`: full batches of the rank with the fewest.
        warns: log a warning if `drop` leaves out packs.

    Raises:
        ConfigError: `error`, and the packs do not fill the last step; a rank has no batch; or an argument is below its
            minimum.
    """
    of_ranks = partial(steps_of_ranks, packs, world_size=world_size, num_workers=num_workers)
    full, steps = (of_ranks(micro_batch_size=micro_batch_size, drop_last=drops) for drops in (True, False))
    counts = full if epoch_end == "drop" else steps
    if min(counts) == 0 < max(counts):
        raise ConfigError(
            f"rank {counts.index(0)} of {world_size} has no batch, and other ranks have {max(counts)}: there are too "
            "few packs. Use fewer ranks, or pack with a smaller `seq_len`."
        )
    if min(full) < max(steps):
        # Without batching, the steps of all ranks are the packs of the epoch.
        count = sum(of_ranks())
        check_rest(epoch_end, count - min(full) * world_size * micro_batch_size, count, warns=warns)
    return min(full) if epoch_end == "drop" else max(steps)
