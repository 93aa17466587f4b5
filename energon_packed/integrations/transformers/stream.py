"""A loader to streaming data of transformers.Trainer, with its state in the checkpoints of the Trainer.

| name | content |
|---|---|
| TrainerStream | the dataset of the Trainer |
| LoaderState | callback that saves a loader state in each checkpoint, and restores it |
| TrainerStreamCallback | LoaderState of a TrainerStream |
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.accelerate import check_loader_rank
from energon_packed.integrations.trainer_state import ConsumedBatches, exact_steps
from energon_packed.loading.ranks import check_not_resharded, group_place, refuse_dispatch
from energon_packed.loading.state import gathered

_ALL_ARGUMENTS = (
    "packed_training_arguments(output_dir, stream) sets every argument that a stream needs, and "
    "callbacks=[TrainerStreamCallback(stream)] checks all of them at the start."
)


class TrainerStream(datasets.IterableDataset, torch.utils.data.IterableDataset[Any]):
    """Iterable dataset that feeds a loader to transformers.Trainer, with a separate stream for each process.

        stream = TrainerStream(lambda: get_packed_loader("out", encoder, epochs=1))
        args = packed_training_arguments("run", stream, num_train_epochs=2)
        trainer = Trainer(model, args, train_dataset=stream, data_collator=PaddingFreeCollator(),
                          callbacks=[TrainerStreamCallback(stream)])

    The loader has the batches of this rank already, so accelerate does not shard the stream again. Each item is a
    finished row, so the loader decides the batch size. The stream does not end: `max_steps` ends the training.

    Args:
        loader: PackedLoader, DataflowLoader or PackedIterableDataset of this rank; or a function that returns it,
            called on first use, since TrainingArguments initializes the process group that a loader needs.
        order_log: folder in which every used batch is recorded; by default the folder of the loader.

    Attributes:
        used: batches that the Trainer has used; None if no TrainerStreamCallback counts them.

    Examples:
        >>> loader = DataflowLoader(MapDistributor([{"text": "A document."}] * 4), encoder)
        >>> TrainerStream(loader).steps
        4
    """

    def __init__(self, loader: Any, *, order_log: str | Path | None = None) -> None:
        # The parent class requires a source of examples, which is never read.
        super().__init__(datasets.iterable_dataset.ExamplesIterable(tuple, {}))
        self._source, self._order_log = loader, order_log
        self.used: int | None = None

    @cached_property
    def loader(self) -> Any:
        """The loader of this rank."""
        return self._source() if _is_function(self._source) else self._source

    @cached_property
    def batches(self) -> ConsumedBatches:
        """The batches of the loader, with the state after each used batch."""
        return ConsumedBatches(self.loader, order_log=self._order_log)

    @property
    def steps(self) -> int | None:
        """Batches of this rank in one epoch; None if the number is not known in advance."""
        return exact_steps(self.loader)

    @property
    def num_shards(self) -> int:
        """Number of processes + 1: before 1.14, accelerate requests shards only if there are more than processes."""
        return group_place()[1] + 1

    n_shards = num_shards

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> "TrainerStream":
        """Return this stream, which is the shard of its process.

        Raises:
            ConfigError: the loader has another rank or world size.
        """
        check_loader_rank(self.loader, index, num_shards)
        return self

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader counts its epochs."""

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end.

        Raises:
            ConfigError: accelerate splits or dispatches the batches, or a worker process reads them.
        """
        try:
            refuse_dispatch()
            check_not_resharded(max(2, group_place()[1]))
            if torch.utils.data.get_worker_info() is not None:
                raise ConfigError(
                    "a worker process of the Trainer reads a TrainerStream, whose loader has worker processes "
                    "already. Set dataloader_num_workers=0, and `num_workers` of the loader."
                )
        except ConfigError as error:
            # The arguments of a stock Trainer are not known here; the callback knows them.
            raise ConfigError(f"{error} {_ALL_ARGUMENTS}") from error
        check_loader_rank(self.loader, *group_place())
        return self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            before = self.batches.read
            for batch in self.batches.epoch():
                if self.used is None:  # no callback saves the state
                    self.batches.use(self.batches.read)
                yield batch
            if self.batches.read == before:
                raise BatchError("the loader has no batch in an epoch. Check its data.")


class LoaderState(TrainerCallback, ABC):
    """Base class of callbacks that save the state of a loader in each checkpoint, and restore it exactly.

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
        """Move the loader to a saved state."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of the loader for all ranks, after the last used batch."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state of a checkpoint that training resumes from."""
        if not state.global_step:
            return
        saved = (state.stateful_callbacks or {}).get(self.key)
        if saved is None or saved["step"] != state.global_step:
            raise BatchError(
                f"the checkpoint of step {state.global_step} has no loader state; {self.remedy}, or resume from "
                "another checkpoint"
            )
        self.restore(saved["state"], args, state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the state to the checkpoint; every rank must call it."""
        state.stateful_callbacks[self.key] = {"step": state.global_step, "state": self.state()}
        if not args.should_save:
            return
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / TRAINER_STATE_NAME
        if not path.is_file():
            raise ConfigError(f"{path} is missing, so the loader state cannot be saved. Set save_on_each_node=True.")
        # The Trainer has written the file before callbacks run; it is replaced atomically.
        atomic_path = path.with_name(path.name + ".tmp")
        state.save_to_json(str(atomic_path))
        os.replace(atomic_path, path)


class TrainerStreamCallback(LoaderState):
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
        from energon_packed.integrations.transformers.arguments import check_training_arguments

        check_training_arguments(args, self.stream)
        self.stream.batches.give_back()  # of an earlier training
        self.stream.used = 0
        if (loader := kwargs.get("train_dataloader")) is not None:
            # The iterator of a DataLoader draws a seed for worker processes. The Trainer restores torch's random state
            # before it makes the iterator of a resumed run, so the seed must not be drawn from that state.
            getattr(loader, "base_dataloader", loader).generator = torch.Generator()
        super().on_train_begin(args, state, control)

    def restore(self, state: dict[str, Any], args: Any, trainer_state: Any) -> None:
        """Move the stream to a saved state."""
        self.stream.batches.restore(state)

    def state(self) -> dict[str, Any]:
        """Return the state of the stream for all ranks."""
        return gathered(self.stream.batches.state())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a micro batch of a step as used."""
        self.stream.used = (self.stream.used or 0) + 1
        self.stream.batches.use(self.stream.used)

    on_step_end = on_substep_end  # of the last micro batch


def _is_function(loader: Any) -> bool:
    return callable(loader) and not hasattr(loader, "state_dict")
