"""ConsumedBatches: batches of a loader for a trainer that reads ahead, and the loader's state after each used batch.

read        1  2  3  4  5  6  7  8  9 10     the trainer reads ahead
used        1  2  3  4  5  6  7              `use(7)`
positions                        7  8  9 10  of the loader; earlier ones are dropped
state()     the state of the loader after batch 7, with every update of a mixture until now
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from energon_packed.dataflow.state import position_of, state_at
from energon_packed.errors import BatchError, ConfigError


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
