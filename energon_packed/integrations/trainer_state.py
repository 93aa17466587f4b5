"""ConsumedBatches: batches of a loader for a trainer that reads ahead, and the loader's state after each used batch.

read        1  2  3  4  5  6  7  8  9 10     the trainer reads ahead
used        1  2  3  4  5  6  7              `use(7)`
positions                        7  8  9 10  of the loader; earlier ones are dropped
state()     the state of the loader after batch 7, with every update of a mixture until now

GatheredLoader: a loader whose state is that of all ranks, for trainers that keep the state of one process.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from energon_packed.errors import BatchError, ConfigError
from energon_packed.loading import gather_state
from energon_packed.loading.state import check_numbers, damage_named, position_of, state_at


class ConsumedBatches:
    """Counts the batches of a loader, and keeps its position after each batch that is read and not used.

    The state of a loader is that after the last batch that was *read*. A trainer that reads ahead saves the state
    after the last batch that it has *used*. Nothing is read again, and memory grows with what is read ahead alone.

    Args:
        loader: PackedLoader, DataflowLoader, PackedIterableDataset, JointLoader, or another iterable with `state_dict`
            and `load_state_dict`, that resumes after the last batch and begins a new epoch after the last batch of
            an epoch.

    Attributes:
        read: batches that were read in this run.

    Raises:
        ConfigError: the loader has no state.
    """

    def __init__(self, loader: Any) -> None:
        if missing := [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(loader, name)]:
            raise ConfigError(
                f"a {type(loader).__name__} has no {missing[0]}, so it cannot resume; pass the loader of "
                "get_packed_loader, a DataflowLoader or a PackedIterableDataset"
            )
        self.loader = loader
        self.read = 0
        self._resumed = False
        self._positions: deque[tuple[int, Any]] = deque()

    def epoch(self) -> Iterator[Any]:
        """The batches of the current epoch that were not read yet; after the last batch, those of the next epoch."""
        self._begin()
        while True:
            before = self.read
            for batch in self.loader:
                self.read += 1
                self._resumed = False
                self._positions.append((self.read, position_of(self.loader)))
                yield batch[1] if isinstance(batch, tuple) else batch  # a JointLoader gives the name, too
            if self.read > before or not self._resumed:
                return
            self._resumed = False  # the state was at the end of an epoch: this is the next one

    def use(self, used: int) -> None:
        """Batches up to number `used`, from 1, are used: no state of an earlier batch can be asked for."""
        while len(self._positions) > 1 and self._positions[0][0] < used:
            self._positions.popleft()

    def state(self) -> dict[str, Any]:
        """State of the loader after the last used batch, in plain types."""
        self._begin()
        return state_at(self.loader, self._positions[0][1])

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: the state is of other data or settings.
        """
        if not isinstance(state, dict):
            raise BatchError(f"the saved state must be a dict, got {type(state).__name__}. Load what was saved.")
        self.loader.load_state_dict(state)
        self.read, self._resumed = 0, True
        self._positions.clear()

    def _begin(self) -> None:
        if not self._positions:
            self._positions.append((self.read, position_of(self.loader)))


_PLACE = "iteration_step"


class GatheredLoader:
    """Wraps a loader so that its state_dict() has the states of all ranks, and gives inputs of a Transformers model.

        loader = GatheredLoader(get_packed_loader("out", encoder, epochs=1))
        lightning.Trainer(...).fit(module, loader)                 # saves and restores its state

    Lightning, Fabric and DeepSpeed write one checkpoint, with the state of rank 0. It is that of the loader, as
    `gather_state` returns it, and the place in this iteration.

    Args:
        loader: PackedLoader, DataflowLoader or PackedIterableDataset of this rank.
        steps: batches of one iteration; the loader continues with its next epoch where it ends before. By default as
            many as an epoch of the loader has.

    Raises:
        ConfigError: the loader repeats indefinitely, or packs on the fly, and `steps` is not given.
    """

    def __init__(self, loader: Any, *, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ConfigError(f"`steps` is {steps}; it must be at least 1")
        if not hasattr(loader, "state_dict"):
            raise ConfigError(
                f"a {type(loader).__name__} has no state_dict, so it cannot resume; pass the loader of "
                "get_packed_loader, a DataflowLoader or a PackedIterableDataset"
            )
        self.loader = loader
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
            for batch in self.loader:
                self._used += 1
                yield (batch[1] if isinstance(batch, tuple) else batch).transformers_inputs()
                if self._used == len(self):
                    break
            empty = empty + 1 if self._used == before else 0
            if empty > 1:  # once: the end of an epoch whose last batch was the last one of an iteration
                raise BatchError(f"the loader gave no batch in an epoch; this iteration has {before} of {len(self)}")
        self._used = 0

    def state_dict(self) -> dict[str, Any]:
        """State of all ranks after the last batch, in plain types; every rank must call it."""
        return gather_state(self.loader) | {_PLACE: self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: the check of the loader fails.
        """
        with damage_named():
            check_numbers({_PLACE: state.get(_PLACE, 0)}, _PLACE)
        self.loader.load_state_dict(state)
        self._used = int(state.get(_PLACE, 0))


def exact_steps(loader: Any) -> int | None:
    """Batches of this rank in one epoch of a loader; None where that is not known in advance."""
    loader = getattr(loader, "loader", loader)  # of a PackedIterableDataset
    try:
        return len(loader)
    except TypeError:
        return None
