"""States of a loader for another number of ranks.

Energon deals shards to `world_size * num_workers` workers, numbered rank by rank. As long as that product stays the
same, each worker reads the same packs, so its state is simply handed to the rank that it now belongs to:

    4 ranks, 1 worker each   0 | 1 | 2 | 3
    2 ranks, 2 workers each  0   1 | 2   3

Every worker resumes where it stopped. Each new rank takes its next batch from its first worker, as after
`energon checkpoint redist`, so batches of different workers may come in another order than without the change.
"""

from collections.abc import Sequence
from typing import Any

from megatron.energon.savable_loader import SavableDataLoaderState

from energon_packed.dataflow.energon.plain import from_plain, to_plain
from energon_packed.dataflow.state import check_identity, check_state
from energon_packed.errors import BatchError

_LOADER = "PackedLoader"


def redistribute(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """States of `world_size` ranks that resume where the ranks of `states` stopped.

    Args:
        states: of all ranks of one run at one step, in any order.
        world_size: number of data-parallel ranks to continue with.

    Returns:
        one state for each rank; `num_workers` in its identity is what each rank needs to be run with.

    Raises:
        BatchError: states of another release or of different runs, a missing rank, a loader of one exact epoch, one
            without worker processes, or workers that cannot be divided by `world_size`.
    """
    if world_size < 1:
        raise BatchError(f"`world_size` is {world_size}; it must be at least 1")
    ordered = _of_one_run(states)
    first = ordered[0]
    identity = first["identity"]
    workers = int(identity["num_workers"])
    if identity["epochs"] is not None or identity.get("complete_epochs"):
        raise BatchError(
            "the states are of one exact epoch after another (epochs=1 or complete_epochs), whose number of steps "
            "belongs to its number of ranks; finish the epoch with the same ranks"
        )
    if workers == 0:
        raise BatchError(
            "the states are of a loader without worker processes (num_workers=0); save with num_workers=1"
        )
    total = workers * len(ordered)
    if total % world_size:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        raise BatchError(
            f"{len(ordered)} ranks of {workers} workers are {total} workers, which {world_size} ranks cannot share "
            f"evenly; use one of {', '.join(map(str, fitting))} ranks"
        )
    loaders = [from_plain(state["energon"]) for state in ordered]
    started = [loader is not None for loader in loaders]
    if any(started) and not all(started):
        raise BatchError(
            f"rank {started.index(False)} had not started to load and others had; save all ranks at one step"
        )
    states_of_workers = [state for loader in loaders if loader is not None for state in loader.worker_states]
    share = total // world_size
    return [
        first
        | {
            "world_size": world_size,
            "rank": rank,
            "identity": identity | {"num_workers": share},
            "step": sum(ours.offset + (ours.state.sample_index if ours.state else 0) for ours in part),
            "last_restore_key": None,
            "energon": to_plain(_loader_state(part, loaders[0].micro_batch_size)) if part else None,
        }
        for rank in range(world_size)
        for part in [states_of_workers[rank * share : (rank + 1) * share]]
    ]


def _loader_state(worker_states: list[Any], micro_batch_size: int | None) -> Any:
    return SavableDataLoaderState(worker_states=worker_states, next_worker_id=0, micro_batch_size=micro_batch_size)


def _of_one_run(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states in the order of ranks.

    Raises:
        BatchError: one is of another release or run, or a rank is missing or there twice.
    """
    if not states:
        raise BatchError("no state to redistribute")
    for state in states:
        check_state(state, _LOADER)
        shared = ("epoch", "world_size")
        now, saved = ({name: one[name] for name in shared} | one["identity"] for one in (states[0], state))
        check_identity(saved, now)
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(states[0]["world_size"])):
        raise BatchError(
            f"the states are of ranks {', '.join(map(str, ranks))}, and the run had {states[0]['world_size']} ranks; "
            "pass one state of each"
        )
    return sorted(states, key=lambda state: int(state["rank"]))
