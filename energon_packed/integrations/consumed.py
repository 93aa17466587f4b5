"""Consumed: a loader to the inputs of a trainer, with the state after the last batch that the trainer has used.

    read        1  2  3  4  5  6  7  8  9 10     the trainer reads ahead
    used        1  2  3  4  5  6  7              `use()` was called 7 times
    positions                        7  8  9 10  of the loader; earlier positions are dropped
    state()     the state of the loader after batch 7, with every update of a mixture until now

| trainer | object | a batch is used when |
|---|---|---|
| Lightning, Fabric, DeepSpeed | Consumed | it is yielded |
| accelerate, PackedTrainer | PreparedLoader over a Consumed | the next batch is yielded |
| transformers.Trainer | TrainerStream with a Consumed | TrainerStreamCallback calls `use` |
| NeMo Automodel | AutomodelStream, a Consumed | it is yielded |
| torchtitan, Megatron | PackedDataLoader, MegatronIterator, with a Consumed | it is yielded |

Arguments and methods for a new trainer:

| trainer | Consumed |
|---|---|
| does not read ahead | `ahead=0` |
| reads 1 batch ahead | `ahead=1` |
| reads more batches ahead | `ahead=None`, and `use()` after each batch that was trained on |
| saves one checkpoint for all ranks | `state_dict()`, called on every rank |
| saves a checkpoint of each rank | `state()`, without communication; not with `steps` (`state_dict()` has the count) |

`load_state_dict` accepts both states. More than 1 batch ahead needs `use()`: at the end of an epoch, the trainer asks
for no further batch, which would count the last batches.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.random_state import SeparateRandomStates
from energon_packed.loading.collation.batch import trainer_inputs
from energon_packed.loading.loaders import as_loader
from energon_packed.loading.state import check_numbers, damage_named, gathered
from energon_packed.options import optional_integer

_STEP = "iteration_step"  # key in states, if iterations have `steps` batches


class Consumed(torch.utils.data.IterableDataset[Any]):
    """The batches of a loader as the inputs of a trainer, with a state of all ranks in one checkpoint.

        loader = Consumed(get_packed_loader("out", encoder, epochs=1))
        lightning.Trainer(...).fit(module, loader)                 # saves and restores its state

    An iteration is an epoch, or its rest after a break or a checkpoint. The state of a loader is the state after the
    last batch that was *read*; a trainer that reads ahead saves the state after the last batch that it has *used*. No
    batch is read again, and memory grows only with the unused batches. The loader draws random numbers from separate
    states (`SeparateRandomStates`).

    Lightning, Fabric and DeepSpeed write one checkpoint, with the state of rank 0. It contains the result of
    `gather_state`.

    Args:
        loader: DataflowLoader of this rank, JointLoader, or another iterable with `state_dict` and `load_state_dict`.
        to_inputs: converts a batch to the item that iterating yields; by default `transformers_inputs()`, which needs
            equal loss weights.
        steps: batches of an iteration; a loader that ends earlier continues with its next epoch. By default the
            batches of an epoch of the loader.
        ahead: batches that the trainer reads before it uses the first of them, 0 or 1. If None, it calls `use` for
            each batch.
        order_log: folder in which every used batch is recorded; by default the folder of the loader.

    Attributes:
        loader: the loader.
        read: batches that were read in this run.
        used: batches that the trainer has used in this run.

    Raises:
        ConfigError: `steps` is below 1, `ahead` above 1, or `to_inputs` not a function; when it is iterated, the
            loader has no state, or repeats indefinitely or packs on the fly while `steps` is None.

    Examples:
        >>> loader = DataflowLoader(MapDistributor([{"text": "A document."}] * 4), encoder)
        >>> consumed = Consumed(loader)
        >>> inputs = next(iter(consumed))
        >>> consumed.state_dict()["step"]
        1
    """

    def __init__(
        self,
        loader: Any,
        to_inputs: Callable[[Any], Any] = trainer_inputs,
        *,
        steps: int | None = None,
        ahead: int | None = 0,
        order_log: str | Path | None = None,
    ) -> None:
        if ahead not in (0, 1, None):
            raise ConfigError(f"`ahead` must be 0, 1 or None, got {ahead}. Pass None and call `use()` for each batch.")
        if not callable(to_inputs):
            raise ConfigError(
                f"`to_inputs` must be a function of a batch, got {to_inputs}. Omit it for `transformers_inputs()`."
            )
        self.loader = as_loader(loader)
        self.to_inputs = to_inputs
        self.ahead = ahead
        self.read = self.used = 0
        self._steps = optional_integer(steps, "steps")
        if order_log is not None:
            self.loader.log_order(order_log)
        self.loader.hold_log()
        self._positions: deque[tuple[int, Any]] = deque()  # after each batch since the last used batch
        self._waiting: deque[Any] = deque(maxlen=ahead or 0)  # inputs that were read, and perhaps not used
        self._random = SeparateRandomStates()
        self._iterators = 0

    def __len__(self) -> int:
        """Return the batches of an iteration.

        Raises:
            TypeError: the number is not known in advance.
        """
        steps = self._steps or self.loader.steps
        if steps is None:
            raise TypeError("len() is undefined: the loader does not know the number of batches of an epoch")
        return steps

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs of each remaining batch of this iteration."""
        if self.ahead == 0 and self._steps is None and self.loader.steps is None:
            raise ConfigError(
                "the number of batches in an epoch of this loader is not known in advance, but trainers that read "
                "ahead need it. Pass `steps`, the batches of one iteration."
            )
        self._iterators += 1
        own = self._iterators
        for inputs in self.epoch() if self._steps is None else self._of_steps(self._steps):
            yield inputs
            # The batch that the earlier iterator had read in advance is the first batch of the later iterator.
            if self.ahead and own != self._iterators:
                raise BatchError("A later iterator of this loader continues its batches. Use only the last iterator.")

    def epoch(self) -> Iterator[Any]:
        """Yield the inputs of the remaining batches of the current epoch; after its last batch, of the next epoch."""
        self._start()
        yield from tuple(self._waiting)  # an interrupted iteration had read these in advance
        for batch in self._batches():
            self.read += 1
            self._positions.append((self.read, self.loader.position()))
            inputs = self.to_inputs(batch)
            self._waiting.append(inputs)
            if self.ahead is not None:
                self._use_until(self.read - self.ahead)
            yield inputs
        if self.ahead is not None:
            self._use_until(self.read)
        self._waiting.clear()

    def forever(self) -> Iterator[Any]:
        """Yield the inputs of epoch after epoch, without end.

        Raises:
            BatchError: an epoch has no batch.
        """
        while True:
            before = self.read
            yield from self.epoch()
            if self.read == before:
                raise BatchError("the loader has no batch in an epoch. Check its data.")

    def use(self) -> None:
        """Count one batch more as used."""
        self._use_until(self.used + 1)

    def state(self) -> dict[str, Any]:
        """Return the state of the loader of this rank after the last used batch, in plain types."""
        self._start()
        return self.loader.state_dict(self._positions[0][1])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks after the last used batch, in plain types; every rank must call it."""
        state = gathered(self.state())
        return state if self._steps is None else state | {_STEP: self.used % self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Raises:
            BatchError: the loader refuses the state, or it was saved without `steps`.
        """
        step = 0
        if self._steps is not None:
            with damage_named():
                check_numbers(state, _STEP)
                step = state[_STEP]
        self._move(state, step)

    def give_back(self) -> None:
        """Return to the last used batch: the batches that the trainer has read, but not used, are read again."""
        if self._positions:
            self._move(self.state(), self.used)

    def _move(self, state: dict[str, Any], used: int) -> None:
        self.loader.load_state_dict(state)
        self.read = self.used = used
        self._positions.clear()
        self._waiting.clear()

    def _batches(self) -> Iterator[Any]:
        with self._random:
            iterator = self.loader.batches()
        while True:
            with self._random:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def _of_steps(self, steps: int) -> Iterator[Any]:
        """Yield the remaining inputs of an iteration of `steps` batches."""
        iteration = self.read // steps
        for inputs in self.forever():
            yield inputs
            if self.read // steps != iteration:
                return

    def _use_until(self, count: int) -> None:
        """Drop the positions before batch `count`, from 1: all batches up to it are used."""
        self.used = max(self.used, count)
        while len(self._positions) > 1 and self._positions[0][0] < self.used:
            self._positions.popleft()
        if self._positions and self._positions[0][0] <= self.used:
            self.loader.release_log(self._positions[0][1])

    def _start(self) -> None:
        if not self._positions:
            self._positions.append((self.read, self.loader.position()))
