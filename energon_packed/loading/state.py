"""Loader states: a position in the data in, a versioned dict of plain types out; and the checks before it is restored.

    {"version": 1, "loader": "DataflowLoader",
     "identity": {...},                 data and settings that must be equal in the loader that continues
     "epoch": 0, "step": 12, ...}       the position after the last batch that was used

A state of a single rank also has "rank" and "world_size"; `gather_state` collects the states of all ranks under
"ranks". A state without "rank" is the same on all ranks, and is not gathered.

| loader | position | with another number of ranks or workers |
|---|---|---|
| DataflowLoader over items with a global order | epoch, step, segments | exact: every item is read once |
| DataflowLoader over a stream | position in each shard of the stream | each shard continues in a new worker |
| JointLoader | positions of its loaders | as its loaders |

An epoch ends at its last batch, whether a loop reaches the end of the iterator or counts steps (`iterate_epoch`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import Any, NoReturn

from energon_packed.errors import BatchError, ConfigError, EnergonPackedError
from energon_packed.loading.ranks import all_gather_object

STATE_VERSION = 1
"""Version of the states of all loaders."""
GATHERED = "ranks"
"""Key of the states of all ranks in the dict that `gather_state` returns."""
_DATA_KEYS = ("distributor_dataset", "distributor_content")
_WEIGHT_KEYS = ("weights", "distributor_weights", "distributor_blend_weights", "blend_weights")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a loader after a batch: small, for a later `state_dict(position)`.

    Positions of a run are compared by epoch and step.

    Attributes:
        epoch: from 0.
        step: batches of the epoch so far.
        parts: positions in the data: the segments of a global order (`order.Segment`), the shards of a stream
            (`dataflow.steps.Shards`), or the position of each loader of a JointLoader; None in an order log.
    """

    epoch: int
    step: int
    parts: Any = field(default=None, compare=False)


def refuse_as_dataset(loader: str) -> NoReturn:
    """Refuse an index of a loader, as a Trainer reads its `train_dataset`.

    Raises:
        ConfigError: always; the message names the wrapper.
    """
    raise ConfigError(
        f"`train_dataset` must be a PackedDataset, a PlannedDataset or a TrainerStream, got a {loader}, which yields "
        "batches. Pass TrainerStream(loader), or iterate the loader without a Trainer."
    )


def make_state(
    loader: str, identity: dict[str, Any], position: dict[str, Any], place: tuple[int, int] | None
) -> dict[str, Any]:
    """Build the state of a loader.

    Args:
        loader: name of its class.
        identity: data and settings that must be equal in the loader that continues.
        position: entries of the position after the last batch that was used.
        place: (rank, world size) of a state of this rank only; None if the state is the same on all ranks.
    """
    of_rank = {} if place is None else {"rank": place[0], "world_size": place[1]}
    return {"version": STATE_VERSION, "loader": loader, **of_rank, "identity": identity, **position}


def gather_state(loader: Any, group: Any = None) -> dict[str, Any]:
    """Collect the loader states of all ranks in one dict, for trainers that write one checkpoint.

        state = gather_state(loader)            # on every rank
        loader.load_state_dict(state)           # on every rank, also if the number of ranks changed

    A state that is the same on all ranks is returned unchanged, without communication. Otherwise this is a collective
    operation. `load_state_dict` of every loader accepts both.

    Args:
        loader: a loader with `state_dict`, at the same step on every rank.
        group: data-parallel process group; by default all processes, or this process if there is no group.

    Returns:
        The state, or {"ranks": [the state of each rank]}, in plain types; equal on every rank.
    """
    return gathered(loader.state_dict(), group)


def gathered(state: dict[str, Any], group: Any = None) -> dict[str, Any]:
    """Collect a state that `state_dict` returned, as `gather_state` does."""
    # A state without a rank is equal on all ranks, so no rank needs to join a collective operation for it.
    if "rank" not in state:
        return state
    shared = {name: state[name] for name in ("version", "loader") if name in state}
    return shared | {GATHERED: all_gather_object(state, group)}


def states_of(state: Any) -> list[dict[str, Any]]:
    """The states in an argument of `load_state_dict`, by rank: one state, or the states that `gather_state` collected.

    Raises:
        BatchError: a rank is missing.
    """
    if not (isinstance(state, dict) and isinstance(state.get(GATHERED), Sequence)):
        return [state]
    # Processes that share a data-parallel rank (tensor or pipeline parallelism) have equal states, and count once.
    by_rank = {saved.get("rank", i): saved for i, saved in enumerate(state[GATHERED]) if isinstance(saved, dict)}
    ranks = sorted(by_rank)
    count = by_rank[ranks[0]].get("world_size", len(ranks)) if ranks else 0
    if not ranks or ranks != list(range(count)):
        raise BatchError(
            f"A gathered state must have the states of all {count} ranks, got ranks "
            f"{', '.join(map(str, ranks)) or 'none'}. Call gather_state on every data-parallel rank."
        )
    return [by_rank[rank] for rank in ranks]


@contextmanager
def damage_named() -> Iterator[None]:
    """Context manager that turns any error of reading a corrupted state into a BatchError of a single line.

    Raises:
        BatchError: a value is missing or has another type than the saved value.
    """
    try:
        yield
    except EnergonPackedError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise damaged(f"{type(error).__name__}: {error}") from error


def check_numbers(state: dict[str, Any], *names: str) -> None:
    """Refuse a state in which one of these values is not an integer of at least 0.

    Raises:
        BatchError: the message names the value.
    """
    for name in names:
        value = state[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:  # True is an int in Python
            raise damaged(f"`{name}` is {value!r}"[:200])


def damaged(reason: str) -> BatchError:
    """The error for a state that no loader can have saved.

    Args:
        reason: description of the damage.
    """
    return BatchError(f"The saved state is corrupted ({reason}). Load an earlier one, or restart the epoch.")


def check_state(state: Any, loader: str) -> None:
    """Refuse a state that a loader cannot continue from.

    Args:
        state: the saved state.
        loader: name of the class that continues.

    Raises:
        BatchError: the message names the version or the class, saved and now.
    """
    if not isinstance(state, dict) or "version" not in state:
        keys = ", ".join(map(str, state))[:200] if isinstance(state, dict) else type(state).__name__
        raise BatchError(f"This is not a loader state (no `version` key, got {keys}). Pass a saved state_dict().")
    if state["version"] != STATE_VERSION:
        raise BatchError(
            f"State version {state['version']} is not supported (this release reads version {STATE_VERSION}). Finish "
            "the run with the release that saved it, or restart the epoch."
        )
    if state.get("loader") != loader:
        saved = state.get("loader")
        raise BatchError(f"The state was saved by {saved}, but this loader is a {loader}. Load it with a {saved}.")


def check_identity(saved: dict[str, Any], now: dict[str, Any], *, allow_changed_weights: bool = False) -> None:
    """Refuse a state of other data or settings; `allow_changed_weights` compares no weights of mixtures and blends.

    Raises:
        BatchError: the message names every value that differs, saved and now.
    """
    if allow_changed_weights:
        saved, now = _without_weights(saved), _without_weights(now)
    names = [name for name, value in now.items() if saved.get(name) != value]
    if len(names) > 1 and "distributor_dataset" in names:
        # Its fingerprint contains the settings, so it differs as well and explains nothing.
        names.remove("distributor_dataset")
    if not names:
        return
    differ = "; ".join(_difference(name, saved.get(name), now[name]) for name in names)
    if all(_is_ratio(name, saved.get(name), now[name]) for name in names):
        raise BatchError(
            f"{differ}. Pass `allow_changed_weights=True` to continue with the new weights, or restore the old."
        )
    if all(name in _DATA_KEYS for name in names):
        raise BatchError(
            f"The dataset changed since the state was saved ({differ}). Restore the original dataset, or start "
            "without the state."
        )
    raise BatchError(
        f"The saved state does not match this loader: {differ}. Restore it with the same settings and data, or start "
        "without it."
    )


def _without_weights(value: Any) -> Any:
    """An identity without the weights of mixtures and blends, at any depth."""
    if isinstance(value, dict):
        return {name: _without_weights(entry) for name, entry in value.items() if name not in _WEIGHT_KEYS}
    return [_without_weights(entry) for entry in value] if isinstance(value, list) else value


def ratio(weights: Any) -> str:
    """Format weights as small integers, 0.75 and 0.25 as 3:1; as decimals if the integers were above 1,000."""
    # Users write 3:1 and states store 0.75 and 0.25, so messages show the smallest integers with the same ratios.
    values = [float(weight) for weight in (weights.values() if isinstance(weights, dict) else weights)]
    least = Fraction(min((value for value in values if value), default=1.0))
    shares = [(Fraction(value) / least).limit_denominator(1000) for value in values]
    common = lcm(*[share.denominator for share in shares])
    whole = [int(share * common) for share in shares]
    return ":".join(map(str, whole)) if max(whole) <= 1000 else ":".join(f"{value:.4g}" for value in values)


def _is_ratio(name: str, saved: Any, now: Any) -> bool:
    """Whether a difference is one of weights over the same datasets."""
    return name in _WEIGHT_KEYS and bool(saved) and bool(now) and len(saved) == len(now)


def _difference(name: str, saved: Any, now: Any) -> str:
    if _is_ratio(name, saved, now):
        return f"weights {ratio(saved)} saved, {ratio(now)} now"
    return f"{name} {saved} saved, {now} now"


def iterate_epoch(rest: Callable[[], Iterator[Any]], *, empty: int) -> Iterator[Any]:
    """Iterate over the rest of an epoch, or over the next epoch if the current epoch has no batch left.

    A loop that counts its steps leaves the iterator after the last batch, and a state may be saved there. The next
    iteration then is the next epoch, as after a loop that reached the end of the iterator.

    Args:
        rest: returns the remaining batches of the current epoch, after which the next epoch is the current epoch.
        empty: how many times `rest` may be empty: 1 in an epoch that was started, 0 in a new epoch.
    """
    # A generator that returned nothing means the state was at the end of an epoch; then the next epoch is tried.
    is_empty = True
    while is_empty and empty >= 0:
        for batch in rest():
            is_empty = False
            yield batch
        empty -= 1


def is_left(began: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether the epoch of an iterator was ended by another iterator of the same loader.

    Args:
        began: (epoch, count of loaded states) at the start of the iterator.
        now: the present values.

    Raises:
        BatchError: a state was loaded since the start, so the iterator would continue at another position.
    """
    if began[1] != now[1]:
        raise BatchError(
            "load_state_dict() was called while this iterator was active. Leave the loop and iterate the loader again."
        )
    return began[0] != now[0]
