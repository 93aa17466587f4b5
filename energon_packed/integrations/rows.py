"""Rows: batches of a loader, counted, with the state behind each one that a trainer has used.

given       1  2  3  4  5  6  7  8  9 10        what the trainer has read
used        1  2  3  4  5  6  7  8              trainers read ahead
saved    *                       *              a state of the loader every 8 batches
state_after(8) = the second state, and 0 batches to read and drop
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from energon_packed.dataflow.state import check_state
from energon_packed.errors import BatchError, ConfigError

ROWS_VERSION = 1
"""Version of the states of `Rows`."""
_EVERY = 8  # batches between two states of the loader: Energon's takes 40 ms with worker processes


class Rows:
    """The batches of a loader for a trainer that reads ahead.

    A state of the loader itself is behind the last batch that was *read*, which a trainer may not have used yet. This
    one is behind any batch that may still be asked for: a state of the loader, and how many batches to read and drop.

    Args:
        loader: PackedLoader, DataflowLoader, PackedIterableDataset, JointLoader, or another iterable with `state_dict`
            and `load_state_dict`, that resumes behind the last batch and begins a new epoch behind the last one of an
            epoch.

    Attributes:
        given: batches given since the first one of the run, the ones before a restored state included.

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
        self.given = 0
        self._drop = 0
        self._resumed = False
        self._states: deque[tuple[int, dict[str, Any]]] = deque()

    def epoch(self) -> Iterator[Any]:
        """The batches of the current epoch that were not given yet; the next one's behind the last batch."""
        if not self._states:
            self._states.append((self.given, self.loader.state_dict()))
        while True:
            before = self.given
            for batch in self.loader:
                self.given += 1
                if self._drop:
                    self._drop -= 1
                    before = self.given
                    continue
                self._resumed = False
                yield batch[1] if isinstance(batch, tuple) else batch  # a JointLoader says the name, too
                if self.given - self._states[-1][0] >= _EVERY:
                    self._states.append((self.given, self.loader.state_dict()))
            self._states.append((self.given, self.loader.state_dict()))
            if self.given > before or not self._resumed:
                return
            self._resumed = False  # the state was at the end of an epoch: this is the next one

    def state_after(self, used: int) -> dict[str, Any]:
        """State behind batch number `used`, in plain types; no earlier one can be asked for later.

        Raises:
            BatchError: it is not among the batches that were given since the last call.
        """
        if not self._states:
            self._states.append((self.given, self.loader.state_dict()))
        while len(self._states) > 1 and self._states[1][0] <= used:
            self._states.popleft()
        number, state = self._states[0]
        if not number <= used <= self.given + self._drop:
            raise BatchError(
                f"the state behind batch {used} is gone: batches {number} to {self.given} can be asked for"
            )
        return {"version": ROWS_VERSION, "used": used, "drop": used - number, "loader": state}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue behind the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: it is of another release, or the loader's own check fails.
        """
        check_state(state, ROWS_VERSION)
        self.loader.load_state_dict(state["loader"])
        self._drop, self._resumed = state["drop"], True
        self.given = state["used"] - state["drop"]
        self._states = deque([(self.given, state["loader"])])
