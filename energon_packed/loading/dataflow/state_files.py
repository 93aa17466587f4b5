"""Loader states in files, one for each rank, and the states of a stream for another number of ranks.

A stream has a shard for each worker of each rank, numbered rank by rank. As long as the number of all workers stays
the same, each shard moves to the worker of its index:

    4 ranks, 1 worker each   0 | 1 | 2 | 3
    2 ranks, 2 workers each  0   1 | 2   3
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from energon_packed.errors import BatchError
from energon_packed.loading.dataflow.steps import in_one_epoch, regrouped
from energon_packed.loading.monitoring.order_log import merged
from energon_packed.loading.state import check_identity, check_state

MEGATRON_KEY = "dataloader_state_dict"
"""Key of the state in `train_dataloader_dprank000.pt` of Megatron-LM and Megatron-Bridge."""


class StateFile(NamedTuple):
    """Content of a state file.

    Attributes:
        state: state of a loader of a rank.
        megatron: whether the state is in Megatron's dict.
    """

    state: dict[str, Any]
    megatron: bool


def read_state(file: Path) -> StateFile:
    """Read a state file.

    Raises:
        BatchError: the file is damaged, or has no state of this package; the message starts with its path.
    """
    try:
        # `weights_only`: checkpoints are untrusted files, and unpickling would execute code.
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BatchError(
            f"{file} contains Python objects, as Energon's own loader saves them, and not the plain dict that a "
            "loader of energon-packed saves. Continue with the loader that saved it, or start without the state."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BatchError(f"{file} is damaged ({reason}). Use an earlier checkpoint.") from error
    megatron = isinstance(content, dict) and MEGATRON_KEY in content
    state = content[MEGATRON_KEY] if megatron else content
    if not isinstance(state, dict) or "version" not in state:
        raise BatchError(f"{file} has no state of a loader of energon-packed. Pass the file that Megatron saved.")
    return StateFile(state, megatron)


def write_state(file: Path, content: StateFile) -> None:
    """Write a state file; the file appears under its name when it is complete."""
    partial = file.with_name(file.name + ".partial")
    torch.save({MEGATRON_KEY: content.state} if content.megatron else content.state, partial)
    partial.replace(file)


def redistribute(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return states of `world_size` ranks that resume after the batches of `states`.

    Args:
        states: states of all ranks of a DataflowLoader over a stream, at the same step, in any order.
        world_size: number of data-parallel ranks to continue with.

    Returns:
        one state for each rank; each rank must run with its `num_workers`.

    Raises:
        BatchError: the states are of different runs or epochs, a rank is missing, or the workers cannot be divided by
            `world_size`.
    """
    if world_size < 1:
        raise BatchError(f"`world_size` must be at least 1, got {world_size}.")
    ordered = in_one_epoch(_of_one_run(states))
    workers = int(ordered[0]["num_workers"])
    total = workers * len(ordered)
    if total % world_size:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        raise BatchError(
            f"`world_size` must divide the {total} workers of {len(ordered)} ranks x {workers} workers, got "
            f"{world_size}. Use one of {', '.join(map(str, fitting))} ranks."
        )
    of_rank = total // world_size
    return [
        regrouped(ordered, range(rank * of_rank, (rank + 1) * of_rank), total)
        | {"world_size": world_size, "rank": rank}
        | merged(ordered)
        for rank in range(world_size)
    ]


def _of_one_run(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states in the order of ranks.

    Raises:
        BatchError: a state is of another release or run, or a rank is missing or repeated.
    """
    if not states:
        raise BatchError("`states` must have at least one state, got an empty list.")
    for state in states:
        check_state(state, "DataflowLoader")
        if "rank" not in state:
            raise BatchError("The state is the same on all ranks, and continues with any number of ranks. Copy it.")
        shared = ("world_size", "num_workers")
        now, saved = ({name: each[name] for name in shared} | each["identity"] for each in (states[0], state))
        check_identity(saved, now)
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(states[0]["world_size"])):
        raise BatchError(
            f"the states must be of {states[0]['world_size']} ranks, one of each, got ranks "
            f"{', '.join(map(str, ranks))}. Pass the states of all ranks."
        )
    return sorted(states, key=lambda state: int(state["rank"]))
