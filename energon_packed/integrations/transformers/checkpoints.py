"""States of loaders and callbacks in the checkpoints of transformers.Trainer.

| name | content |
|---|---|
| CheckpointCallback | base class of callbacks that save a state in each checkpoint, and restore it |
| TrainerStreamCallback | the state of a TrainerStream |

Transformers asks callbacks that are `ExportableState` for their states on rank 0 alone, which cannot collect
the states of all ranks.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from energon_packed.errors import BatchError, ConfigError
from energon_packed.files import atomic_path
from energon_packed.integrations.transformers.arguments import check_training_arguments
from energon_packed.integrations.transformers.stream import TrainerStream


def epoch_of(trainer_state: Any) -> int:
    """Index of the current epoch of a Trainer, from 0."""
    # `epoch` is a float that sums fractions of steps, and may be slightly below the next integer.
    return int((trainer_state.epoch or 0) + 1e-6)


class CheckpointCallback(TrainerCallback, ABC):
    """Base class of callbacks that save a state, as of a loader, in each checkpoint, and restore it exactly.

    The state of all ranks is in `trainer_state.json`. A subclass implements `restore` and `state`.

    Attributes:
        key: name of the state in that file, beside the names of callbacks.
        remedy: remedy if the state is missing.

    Raises:
        BatchError: the checkpoint has no state of the loader.
    """

    key = "energon_packed_stream"
    remedy = ""

    @abstractmethod
    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Continue from a saved state."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of all ranks, after the last used batch."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state of a checkpoint that training resumes from."""
        if state.global_step:
            self.restore(self.saved(state), args, state)

    def saved(self, trainer_state: Any) -> dict[str, Any]:
        """Return the state in the TrainerState of a checkpoint."""
        saved = (trainer_state.stateful_callbacks or {}).get(self.key)
        if saved is None or saved["step"] != trainer_state.global_step:
            raise BatchError(
                f"the checkpoint of step {trainer_state.global_step} has no loader state; {self.remedy}, or resume "
                "from another checkpoint"
            )
        state: dict[str, Any] = saved["state"]
        return state

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the state to the checkpoint; every rank must call it."""
        state.stateful_callbacks[self.key] = {"step": state.global_step, "state": self.state()}
        if not args.should_save:
            return
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / TRAINER_STATE_NAME
        if not path.is_file():
            raise ConfigError(f"{path} is missing, so the loader state cannot be saved. Set save_on_each_node=True.")
        # The Trainer has written the file before callbacks run.
        with atomic_path(path) as temporary:
            state.save_to_json(str(temporary))


class TrainerStreamCallback(CheckpointCallback):
    """TrainerCallback that saves the state of a TrainerStream in each checkpoint, and restores it.

    Micro batches that the Trainer has read ahead, but not used, at the time of the save are read again. Reading
    changes no random state of the training, so a resumed run has the dropout and the weights of an uninterrupted run.

    Raises:
        ConfigError: the arguments do not fit the stream; see `check_training_arguments`.
        BatchError: the checkpoint has no state of the stream.

    Examples:
        >>> loader = DataflowLoader(MapDistributor([{"text": "A document."}] * 4), encoder)
        >>> stream = TrainerStream(loader)
        >>> callbacks = [TrainerStreamCallback(stream)]  # of the Trainer
    """

    remedy = "pass callbacks=[TrainerStreamCallback(stream)] to the Trainer that saves"

    def __init__(self, stream: TrainerStream) -> None:
        self.stream = stream

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state of a checkpoint that training resumes from."""
        check_training_arguments(args, self.stream)
        self.stream.consumed.ahead = None  # this callback counts the used batches
        self.stream.consumed.give_back()  # of an earlier training
        if (loader := kwargs.get("train_dataloader")) is not None:
            # The iterator of a DataLoader draws a seed for worker processes. The Trainer restores torch's random state
            # before it makes the iterator of a resumed run, so the seed must not be drawn from that state.
            getattr(loader, "base_dataloader", loader).generator = torch.Generator()
        super().on_train_begin(args, state, control)

    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Move the stream to a saved state."""
        self.stream.consumed.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """Return the state of the stream for all ranks."""
        return self.stream.consumed.state_dict()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a micro batch of a step as used."""
        self.stream.consumed.use()

    on_step_end = on_substep_end  # of the last micro batch
