"""The state of a loader: one versioned dict of plain types for every loader, and the check that a loader can continue.

    {"version": 4, "loader": "DataflowLoader",
     "identity": {...},                 data and settings that the loader which continues must have, too
     "epoch": 0, "step": 12, ...}       the position after the last batch that was used

A state that holds for one rank alone also has "rank" and "world_size"; `gather_state` collects the states of all ranks
under "ranks". A state without "rank" is the same on all ranks, and needs no gathering.

| loader | position | another number of ranks or workers |
|---|---|---|
| DataflowLoader over items with a global order | epoch, step, segments | exact: no item is lost, none comes twice |
| DataflowLoader over a stream | of each shard of the stream | each shard continues in one of the new workers |
| PackedLoader (Energon) | of each worker of Energon's loader | `epochs=None`, if ranks x workers stays the same |
| JointLoader | of its loaders | as its loaders |

Where an epoch ends: at its last batch, whether a loop meets the end of the iterator or counts steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from energon_packed.errors import BatchError, EnergonPackedError
from energon_packed.loading.ranks import all_gather_object

STATE_VERSION = 4
"""Version of the states of all loaders. Versions 1 to 3 had another form for each loader."""
GATHERED = "ranks"
"""Key of the states of all ranks in the dict that `gather_state` returns."""
_OF_DATA = ("dataset ", "distributor_dataset ", "distributor_content ")


def make_state(
    loader: str, identity: dict[str, Any], position: dict[str, Any], place: tuple[int, int] | None
) -> dict[str, Any]:
    """The state of a loader.

    Args:
        loader: name of its class.
        identity: data and settings that the loader which continues must have, too.
        position: after the last batch that was used.
        place: (rank, world size) of a state that holds for this rank alone; None if it is the same on all ranks.
    """
    of_rank = {} if place is None else {"rank": place[0], "world_size": place[1]}
    return {"version": STATE_VERSION, "loader": loader, **of_rank, "identity": identity, **position}


def gather_state(loader: Any, group: Any = None) -> dict[str, Any]:
    """The state of a loader for all ranks, for trainers that write one checkpoint; the same on every rank.

        state = gather_state(loader)            # on every rank
        loader.load_state_dict(state)           # on every rank, also if their number changed

    A state that is the same on all ranks is returned as it is, without communication. Otherwise this is a collective
    operation. `load_state_dict` of every loader accepts both.

    Args:
        loader: with `state_dict`, at the same step on every rank.
        group: data-parallel process group; by default all processes, or this process if there is no group.

    Returns:
        The state, or {"ranks": [the state of each rank]}; plain types.
    """
    return gathered(loader.state_dict(), group)


def gathered(state: dict[str, Any], group: Any = None) -> dict[str, Any]:
    """As `gather_state`, of a state that is at hand."""
    if "rank" not in state:
        return state
    shared = {name: state[name] for name in ("version", "loader") if name in state}
    return shared | {GATHERED: all_gather_object(state, group)}


def position_of(loader: Any) -> Any:
    """The position of a loader after the last batch that it gave, for `state_at` of later.

    A loader of another package has a state alone.
    """
    return loader.position() if hasattr(loader, "position") else loader.state_dict()


def state_at(loader: Any, position: Any) -> dict[str, Any]:
    """The state of a loader at a position that `position_of` returned."""
    found: dict[str, Any] = loader.state_dict(position) if hasattr(loader, "position") else position
    return found


def states_of(state: Any) -> list[dict[str, Any]]:
    """The states in the argument of `load_state_dict`, by rank: one state, or those that `gather_state` returned.

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
    """Turn an error of reading a damaged state into one line.

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
    """Refuse a state in which one of these values is not an integer of at least 0.

    Raises:
        BatchError: the message names the value.
    """
    for name in names:
        value = state[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise damaged(f"`{name}` is {value!r}"[:200])


def damaged(what: str) -> BatchError:
    """The error over a state that no loader saved.

    Args:
        what: is wrong with it.
    """
    return BatchError(f"the saved state is damaged ({what}); load an earlier one, or start the epoch again")


def check_state(state: Any, loader: str, identity: dict[str, Any] | None = None) -> None:
    """Refuse a state that a loader cannot continue from.

    Args:
        state: as it was saved.
        loader: name of the class that continues.
        identity: of the loader that continues; None checks version and class alone.

    Raises:
        BatchError: the message names the version, the class, or every value that differs, saved and now.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if version != STATE_VERSION:
        raise BatchError(
            f"the saved state has version {version}, and this release reads version {STATE_VERSION}; finish the run "
            "with the release that saved it, or start the epoch again without the state"
        )
    if state.get("loader") != loader:
        raise BatchError(
            f"the saved state is of {state.get('loader')}, and this loader is a {loader}; load it in a "
            f"{state.get('loader')}, or start the epoch again without the state"
        )
    if identity is not None:
        check_identity(state["identity"], identity)


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a state of other data or settings.

    Raises:
        BatchError: the message names every value that differs, saved and now.
    """
    differ = [_difference(name, saved.get(name), value) for name, value in now.items() if saved.get(name) != value]
    if len(differ) > 1:  # settings are part of the dataset's fingerprint
        differ = [one for one in differ if not one.startswith("dataset ")]
    if not differ:
        return
    if all(one.startswith("weights ") for one in differ):
        raise BatchError(
            f"{'; '.join(differ)}: pass `allow_changed_weights=True` to the loader to continue with the new ones "
            "from where each dataset is, or restore the old ones"
        )
    if all(one.startswith(_OF_DATA) for one in differ):
        raise BatchError(
            f"the saved state is of other data ({'; '.join(differ)}): it was packed again or changed since; "
            "restore the original data, or start without the state"
        )
    ranks = any(one.startswith("world_size ") for one in differ)
    redist = "redistribute it with `energon-packed state redist`, " if ranks else ""
    raise BatchError(
        f"the saved state is of another loader: {'; '.join(differ)}; {redist}restore it with the same settings "
        "and data, or start without it"
    )


def without_weights(value: Any) -> Any:
    """An identity without the weights of mixtures and blends, and of parts of them."""
    if isinstance(value, dict):
        hidden = ("weights", "distributor_weights", "distributor_blend_weights", "blend_weights")
        return {name: without_weights(one) for name, one in value.items() if name not in hidden}
    return [without_weights(one) for one in value] if isinstance(value, list) else value


def ratio(weights: Any) -> str:
    """Weights as whole numbers, 0.75 and 0.25 as 3:1; as decimals if these were large."""
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


def iterate_epoch(rest: Callable[[], Iterator[Any]], *, empty: int) -> Iterator[Any]:
    """The rest of an epoch, or the next epoch where nothing is left of one that was begun.

    A loop that counts its steps leaves the iterator after the last batch, and so does a state saved there: what
    follows is the next epoch, as after a loop that met the end.

    Args:
        rest: batches of the current epoch that were not returned; at its end the next epoch is the current one.
        empty: how often `rest` may return nothing: 1 in an epoch that was begun, 0 in a new one.
    """
    given = False
    while not given and empty >= 0:
        for batch in rest():
            given = True
            yield batch
        empty -= 1


def is_left(began: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether the epoch of an iterator has ended meanwhile, by another iterator of its loader.

    Args:
        began: number of the epoch, and of states that were loaded, when the iterator began.
        now: the same at present.

    Raises:
        BatchError: a state was loaded meanwhile: what the iterator would give next is of another place.
    """
    if began[1] != now[1]:
        raise BatchError("a state was loaded while this loop ran; leave the loop, and iterate the loader again")
    return began[0] != now[0]
