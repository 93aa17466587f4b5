"""Loader states: plain versioned dicts, and the check that a loader continues with the same data and settings."""

from typing import Any

from energon_packed.errors import BatchError

LOADER_VERSION = 3
"""Version of the states of `PackedLoader`; 1 and 2 were objects."""


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
    if found != version:
        raise BatchError(
            f"the saved state has version {found}, and this release reads version {version}; finish the run with the "
            "release that saved it, or start the epoch again without the state"
        )
    differ = [f"{n} {state.get(n)} saved, {now} now" for n, now in (identity or {}).items() if state.get(n) != now]
    if len(differ) > 1:  # settings are part of the dataset's fingerprint
        differ = [one for one in differ if not one.startswith("dataset ")]
    if differ:
        ranks = any(one.startswith("world_size ") for one in differ)
        redist = "redistribute it with `energon-packed state redist`, " if ranks else ""
        raise BatchError(
            f"the saved state is of another loader: {'; '.join(differ)}; {redist}restore it with the same settings "
            "and data, or start without it"
        )


def _load(values: dict[str, Any]) -> dict[str, Any]:
    """What checkpoints with a state of version 1 or 2 call when they are unpickled: `check_state` then refuses it."""
    return {"version": values.get("format_version")}
