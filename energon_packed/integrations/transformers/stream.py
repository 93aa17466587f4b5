"""TrainerStream: a loader as streaming data of transformers.Trainer."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch

from energon_packed.errors import ConfigError
from energon_packed.integrations.accelerate import check_loader_rank
from energon_packed.integrations.consumed import Consumed
from energon_packed.loading.dataflow.loader import unchanged
from energon_packed.loading.ranks import group_place
from energon_packed.loading.resharding import check_not_resharded, refuse_dispatch

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
        loader: as for Consumed; or a function that returns it, called on first use, since TrainingArguments
            initializes the process group that a loader needs.
        order_log: folder in which every used batch is recorded; by default the folder of the loader.

    Examples:
        >>> loader = DataflowLoader(MapDistributor([{"text": "A document."}] * 4), encoder)
        >>> TrainerStream(loader).steps
        4
    """

    def __init__(self, loader: Any, *, order_log: str | Path | None = None) -> None:
        # The parent class requires a source of examples, which is never read.
        super().__init__(datasets.iterable_dataset.ExamplesIterable(tuple, {}))
        self._source, self._order_log = loader, order_log

    @cached_property
    def consumed(self) -> Consumed:
        """The batches of the loader; yielded batches count as used, unless a TrainerStreamCallback counts them."""
        loader = self._source() if callable(self._source) else self._source
        return Consumed(loader, unchanged, order_log=self._order_log)

    @property
    def steps(self) -> int | None:
        """Batches of this rank in one epoch; None if the number is not known in advance."""
        return self.consumed.loader.steps

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
        check_loader_rank(self.consumed.loader, index, num_shards)
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
        check_loader_rank(self.consumed.loader, *group_place())
        return self.consumed.forever()
