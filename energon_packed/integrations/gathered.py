"""GatheredLoader: a loader whose state is that of all ranks, for trainers that keep what one process gives."""

from collections.abc import Iterator
from typing import Any

from energon_packed.dataflow import PackedLoader
from energon_packed.dataflow.process_group import group_place, of_all_ranks
from energon_packed.dataflow.state import check_state
from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.rows import Rows

GATHERED_VERSION = 1
"""Version of the states of `GatheredLoader`."""


class GatheredLoader:
    """Gives the inputs of a Transformers model, and one state for all ranks.

        loader = GatheredLoader(get_packed_loader("out", encoder, epochs=1))
        lightning.Trainer(...).fit(module, loader)                 # saves and restores its state

    Lightning, Fabric and accelerate write one checkpoint, with what rank 0 gives. Here every rank gives the states of
    all, and each restores its own.

    Args:
        loader: PackedLoader, DataflowLoader or PackedIterableDataset of this rank.
        steps: batches of one iteration; the loader goes on with its next epoch where it ends before. By default as
            many as an epoch of the loader has.

    Raises:
        ConfigError: the loader repeats indefinitely, or packs on the fly, and `steps` is not given.
    """

    def __init__(self, loader: Any, *, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ConfigError(f"`steps` is {steps}; it must be at least 1")
        self._rows = Rows(loader)
        self._steps = exact_steps(loader) if steps is None else steps
        if self._steps is None:
            raise ConfigError(
                "the number of batches in an epoch of this loader is not known in advance, and trainers that read "
                "ahead need it: pass `steps`, the batches of one iteration"
            )
        self._used = 0

    def __len__(self) -> int:
        return int(self._steps or 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """`transformers_inputs()` of each batch of this iteration that was not given yet."""
        self._used %= len(self)  # a loop that counts its steps does not come to the end of the last iteration
        empty = 0
        while self._used < len(self):
            before = self._used
            for batch in self._rows.epoch():
                self._used += 1
                yield batch.transformers_inputs()
                if self._used == len(self):
                    break
            empty = empty + 1 if self._used == before else 0
            if empty > 1:  # once: the end of an epoch whose last batch was the last one of an iteration
                raise BatchError(f"the loader gave no batch in an epoch; this iteration has {before} of {len(self)}")
        self._used = 0

    def state_dict(self) -> dict[str, Any]:
        """States of all ranks behind the last batch, in plain types; every rank must call it."""
        return gathered({"used": self._used, "rows": self._rows.state_after(self._rows.given)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: it is of another number of ranks, or the loader's own check fails.
        """
        own = of_this_rank(state)
        self._rows.restore(own["rows"])
        self._used = own["used"]


def exact_steps(loader: Any) -> int | None:
    """Batches of this rank in one epoch of a loader; None where that is not known in advance."""
    loader = getattr(loader, "loader", loader)  # of a PackedIterableDataset
    if isinstance(loader, PackedLoader):
        if loader.state_dict()["epochs"] is None:
            return None
        return loader.epoch_steps or len(loader.energon_loader)
    try:
        return len(loader)
    except TypeError:
        return None


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """The states of all ranks, the same on each; every rank must call it."""
    states = of_all_ranks(state)
    return {"version": GATHERED_VERSION, "world_size": len(states), "ranks": states}


def of_this_rank(state: dict[str, Any]) -> dict[str, Any]:
    """The state of this rank in what `gathered` returned.

    Raises:
        BatchError: it is of another release or number of ranks.
    """
    rank, world_size = group_place()
    check_state(state, GATHERED_VERSION, {"world_size": world_size})
    own: dict[str, Any] = state["ranks"][rank]
    return own
