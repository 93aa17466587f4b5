"""Loader states: plain versioned dicts, and the check that a loader continues with the same data and settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import torch

from energon_packed.dataflow.process_group import of_all_ranks
from energon_packed.errors import BatchError, EnergonPackedError

LOADER_VERSION = 3
"""Version of the states of `PackedLoader`; 1 and 2 were objects."""
GATHERED = "ranks"
"""Name of the states of all ranks, in what `gather_state` returns."""
_NAMES = {"energon": "get_packed_loader", "workers": "DataflowLoader", "loaders": "JointLoader"}
"""Which loader has which value in its states."""
_KINDS = {"energon": LOADER_VERSION, "workers": 1, "loaders": 1}
_OF_DATA = ("dataset ", "distributor_dataset ", "distributor_content ")


def gather_state(loader: Any, group: Any = None) -> dict[str, Any]:
    """The states of all ranks, for trainers that write one checkpoint: a collective operation, the same on every rank.

        state = gather_state(loader)            # on every rank
        loader.load_state_dict(state)           # on every rank, also where their number changed

    `load_state_dict` of DataflowLoader, PackedIterableDataset, JointLoader and PackedLoader takes it.

    Args:
        loader: with `state_dict`, at the same step on every rank.
        group: data-parallel process group; by default all processes, and this one where there is no group.

    Returns:
        {"ranks": a state for each rank, in plain types}.
    """
    return {GATHERED: of_all_ranks(loader.state_dict(), group)}


def states_of(state: Any) -> list[dict[str, Any]]:
    """The states in what `load_state_dict` gets, by rank: one, or those that `gather_state` returned.

    Processes that share a data-parallel rank have equal states, and count once.

    Raises:
        BatchError: a rank is missing.
    """
    if not (isinstance(state, dict) and isinstance(state.get(GATHERED), Sequence)):
        return [state]
    found = {one.get("rank", place): one for place, one in enumerate(state[GATHERED]) if isinstance(one, dict)}
    ranks = sorted(found)
    count = found[ranks[0]].get("world_size", len(ranks)) if ranks else 0
    if not ranks or ranks != list(range(count)):
        raise BatchError(
            f"the gathered state has ranks {', '.join(map(str, ranks)) or 'none'}, and the run had {count}; call "
            "gather_state on every data-parallel rank"
        )
    return [found[rank] for rank in ranks]


@contextmanager
def damage_named() -> Iterator[None]:
    """What reading a damaged state raises, as one line.

    Raises:
        BatchError: a value is missing, or of another type than it was saved with.
    """
    try:
        yield
    except EnergonPackedError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise damaged(f"{type(error).__name__}: {error}") from error


def check_numbers(state: dict[str, Any], *names: str) -> None:
    """Refuse a state in which one of these is no integer of at least 0.

    Raises:
        BatchError: the message names the value.
    """
    for name in names:
        value = state[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise damaged(f"`{name}` is {value!r}"[:200])


def check_place_of(states: Sequence[dict[str, Any]]) -> None:
    """Refuse states of a DataflowLoader whose place in the data no loader can have.

    Raises:
        BatchError: the message names the value.
    """
    for state in states:
        workers, count = state["workers"], max(1, state["num_workers"])
        if len(workers) != count:
            raise damaged(f"{len(workers)} workers, and the run had {count}")
        check_numbers(state, "epoch", "steps", "next_worker")
        if state["next_worker"] >= count or (state["steps"] and not any(workers) and not state.get("rest")):
            raise damaged(f"{state['steps']} steps, next worker {state['next_worker']}, workers {workers!r}"[:200])


def damaged(what: str) -> BatchError:
    """The error over a state that no loader saved.

    Args:
        what: is wrong with it.
    """
    return BatchError(f"the saved state is damaged ({what}); load an earlier one, or start the epoch again")


def check_state(state: Any, version: int, identity: dict[str, Any] | None = None) -> None:
    """Refuse a state that a loader cannot continue from.

    Args:
        state: as it was saved.
        version: that this release reads.
        identity: what the state must have in common with the loader, by name; None checks the version alone.

    Raises:
        BatchError: the message names the version, or every value that differs, saved and now.
    """
    found = state.get("version") if isinstance(state, dict) else None
    if found != version and found in _KINDS.values() and (kinds := [n for n in _KINDS if n in state]):
        raise BatchError(f"the saved state is of {_NAMES[kinds[0]]}, and this is another loader; load it there")
    if found != version:
        raise BatchError(
            f"the saved state has version {found}, and this release reads version {version}; finish the run with the "
            "release that saved it, or start the epoch again without the state"
        )
    differ = [_difference(n, state.get(n), now) for n, now in (identity or {}).items() if state.get(n) != now]
    if len(differ) > 1:  # settings are part of the dataset's fingerprint
        differ = [one for one in differ if not one.startswith("dataset ")]
    if differ:
        if all(one.startswith("weights ") for one in differ):
            raise BatchError(
                f"{'; '.join(differ)}: pass `allow_changed_weights=True` to the loader to go on with the new ones "
                "from where each data set is, or restore the old ones"
            )
        if all(one.startswith(_OF_DATA) for one in differ):
            raise BatchError(
                f"the saved state is of other data ({'; '.join(differ)}): it was packed again or changed since; "
                "restore the data of then, or start without the state"
            )
        ranks = any(one.startswith("world_size ") for one in differ)
        redist = "redistribute it with `energon-packed state redist`, " if ranks else ""
        raise BatchError(
            f"the saved state is of another loader: {'; '.join(differ)}; {redist}restore it with the same settings "
            "and data, or start without it"
        )


def without_weights(value: Any) -> Any:
    """An identity without the weights of mixtures, and of parts of them; those of a blended dataset stay."""
    if isinstance(value, dict):
        return {n: without_weights(one) for n, one in value.items() if n not in ("weights", "distributor_weights")}
    return [without_weights(one) for one in value] if isinstance(value, list) else value


def equal_weights(state: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether a state is of these weights, wherever in the identity they are."""
    return all(state.get(name) == value for name, value in identity.items())


def ratio(weights: Any) -> str:
    """Weights as whole numbers, 0.75 and 0.25 as 3:1; where these were large, as decimals."""
    values = [float(one) for one in (weights.values() if isinstance(weights, dict) else weights)]
    total = sum(values) or 1.0
    shares = [Fraction(one / total).limit_denominator(1000) for one in values]
    common = lcm(*[one.denominator for one in shares])
    whole = [int(one * common) for one in shares]
    divisor = gcd(*whole) or 1
    whole = [one // divisor for one in whole]
    return ":".join(map(str, whole)) if max(whole) <= 1000 else ":".join(f"{one:.4g}" for one in values)


def _difference(name: str, saved: Any, now: Any) -> str:
    plain = name.removeprefix("distributor_").removeprefix("blend_")
    if plain == "weights" and saved and len(saved) == len(now):
        return f"weights {ratio(saved)} saved, {ratio(now)} now"
    return f"{name} {saved} saved, {now} now"


def _load(values: dict[str, Any]) -> dict[str, Any]:
    """What checkpoints with a state of version 1 or 2 call when they are unpickled: `check_state` then refuses it."""
    return {"version": values.get("format_version")}


torch.serialization.add_safe_globals([_load])  # makes a version number of plain values, and nothing else
