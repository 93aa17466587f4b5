"""A loader to batches and a loader state that fit a trainer which reads ahead, or which saves a single state.

ConsumedBatches keeps the position of the loader after each batch that the trainer has read, but not used:

    read        1  2  3  4  5  6  7  8  9 10     the trainer reads ahead
    used        1  2  3  4  5  6  7              `use(7)`
    positions                        7  8  9 10  of the loader; earlier positions are dropped
    state()     the state of the loader after batch 7, with every update of a mixture until now

GatheredLoader has a state of all ranks, for trainers that save the state of one process.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.random_state import SeparateRandomStates
from energon_packed.loading.batch import trainer_inputs
from energon_packed.loading.loaders import log_order, order_logs, position_of, state_at
from energon_packed.loading.state import check_numbers, damage_named, gather_state, is_left

_STEP = "iteration_step"  # key in the states of GatheredLoader


class ConsumedBatches:
    """Iterate a loader, and keep its position after each batch that was read, but not used.

    The state of a loader is the state after the last batch that was *read*. A trainer that reads ahead saves the state
    after the last batch that it has *used*. No batch is read again, and memory grows only with the unused batches.

    Args:
        loader: DataflowLoader, JointLoader, or another iterable with `state_dict`
            and `load_state_dict`, that resumes after the last batch and starts a new epoch after the last batch of
            an epoch.
        order_log: folder of the order log, in which only used batches are recorded; None leaves the log of the loader.

    Attributes:
        read: batches that were read in this run.

    Raises:
        ConfigError: the loader has no state.
    """

    def __init__(self, loader: Any, *, order_log: str | Path | None = None) -> None:
        _check_has(loader, "__iter__", "state_dict", "load_state_dict")
        log_order(loader, order_log)
        for log, _ in order_logs(loader, position_of(loader)):
            log.hold()
        self.loader = loader
        self.read = 0
        self._resumed = False
        self._positions: deque[tuple[int, Any]] = deque()
        self._random = SeparateRandomStates()

    def epoch(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch; after the last batch, the batches of the next epoch."""
        self._start()
        while True:
            before = self.read
            for batch in self._batches():
                self.read += 1
                self._resumed = False
                self._positions.append((self.read, position_of(self.loader)))
                yield batch[1] if isinstance(batch, tuple) else batch  # a JointLoader yields (name, batch)
            if self.read > before or not self._resumed:
                return
            self._resumed = False  # the state was at the end of an epoch: read the next epoch

    def _batches(self) -> Iterator[Any]:
        with self._random:
            iterator = iter(self.loader)
        while True:
            with self._random:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def use(self, used: int) -> None:
        """Drop the positions before batch `used`, from 1: all batches up to it are used."""
        while len(self._positions) > 1 and self._positions[0][0] < used:
            self._positions.popleft()
        if self._positions and self._positions[0][0] <= used:
            for log, position in order_logs(self.loader, self._positions[0][1]):
                log.release(position)

    def state(self) -> dict[str, Any]:
        """Return the state of the loader after the last used batch, in plain types."""
        self._start()
        return state_at(self.loader, self._positions[0][1])

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: the dataset or the settings differ.
        """
        if not isinstance(state, dict):
            raise BatchError(f"the saved state must be a dict, got {type(state).__name__}. Load what was saved.")
        self.loader.load_state_dict(state)
        self.read, self._resumed = 0, True
        self._positions.clear()

    def give_back(self) -> None:
        """Return to the last used batch: the batches that a trainer has read, but not used, are read again."""
        if self._positions:
            self.restore(self.state())

    def _start(self) -> None:
        if not self._positions:
            self._positions.append((self.read, position_of(self.loader)))


class GatheredLoader:
    """Wrap a loader so that its state_dict() contains the states of all ranks, for trainers that save only rank 0.

        loader = GatheredLoader(get_packed_loader("out", encoder, epochs=1))
        lightning.Trainer(...).fit(module, loader)                 # saves and restores its state

    Lightning, Fabric and DeepSpeed write one checkpoint, with the state of rank 0. It contains the result of
    `gather_state`, and the step of this iteration.

    Args:
        loader: DataflowLoader of this rank.
        steps: batches of an iteration; a loader that ends earlier continues with its next epoch. By default the
            batches of an epoch of the loader.
        to_inputs: converts a batch to the item that iterating yields; by default `transformers_inputs()`, which needs
            equal loss weights.
        order_log: folder in which every batch is recorded; by default the folder of the loader.

    Raises:
        ConfigError: the loader repeats indefinitely, or packs on the fly, and `steps` is None.

    Examples:
        >>> loader = DataflowLoader(MapDistributor([{"text": "A document."}] * 4), encoder)
        >>> gathered = GatheredLoader(loader)
        >>> inputs = next(iter(gathered))
        >>> gathered.state_dict()["step"]
        1
    """

    def __init__(
        self,
        loader: Any,
        *,
        steps: int | None = None,
        to_inputs: Callable[[Any], Any] = trainer_inputs,
        order_log: str | Path | None = None,
    ) -> None:
        if steps is not None and steps < 1:
            raise ConfigError(f"`steps` must be at least 1, got {steps}.")
        _check_has(loader, "state_dict")
        log_order(loader, order_log)
        self.loader = loader
        self._to_inputs = to_inputs
        self._steps = exact_steps(loader) if steps is None else steps
        if self._steps is None:
            raise ConfigError(
                "the number of batches in an epoch of this loader is not known in advance, but trainers that read "
                "ahead need it. Pass `steps`, the batches of one iteration."
            )
        self._used = 0
        self._iterations = self._restores = 0  # finished iterations, and states that were loaded

    def __len__(self) -> int:
        return int(self._steps or 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs of each remaining batch of this iteration."""
        started = (self._iterations, self._restores)
        self._used %= len(self)  # a loop that counts its steps does not meet the end of the last iteration
        empty = 0
        while self._used < len(self):
            before = self._used
            for batch in self.loader:
                self._used += 1
                yield self._to_inputs(batch[1] if isinstance(batch, tuple) else batch)
                if is_left(started, (self._iterations, self._restores)):
                    return
                if self._used == len(self):
                    break
            empty = empty + 1 if self._used == before else 0
            if empty > 1:  # once: the last batch of the last iteration may be the last batch of its epoch
                raise BatchError(
                    f"the loader has no batch in an epoch; this iteration has {before} of {len(self)} batches"
                )
        self._used = 0
        self._iterations += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks after the last batch, in plain types; every rank must call it."""
        return gather_state(self.loader) | {_STEP: self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: the loader refuses the state.
        """
        with damage_named():
            check_numbers({_STEP: state.get(_STEP, 0)}, _STEP)
        self.loader.load_state_dict(state)
        self._used = int(state.get(_STEP, 0))
        self._restores += 1


def _check_has(loader: Any, *names: str) -> None:
    if missing := [name for name in names if not hasattr(loader, name)]:
        raise ConfigError(
            f"`loader` must have {missing[0]} to resume, got a {type(loader).__name__}. Pass the loader of "
            "get_packed_loader, or a DataflowLoader."
        )


def exact_steps(loader: Any) -> int | None:
    """Return the batches of this rank in one epoch of a loader; None if the number is not known in advance."""
    try:
        return len(loader)
    except TypeError:
        return None
