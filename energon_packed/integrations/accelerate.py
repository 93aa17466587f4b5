"""accelerate: loaders that deal packs to ranks themselves, prepared without being split or dispatched again.

accelerator.prepare is right for a torch DataLoader over a PackedDataset, whatever `split_batches` is. It must not
touch a loader that knows its rank: it would split each rank's part over ranks once more. `prepare_loader` gives such a
loader what accelerator.prepare gives others: the device, the end of an epoch for `accelerator.accumulate`, a state for
`register_for_checkpointing`, and `skip_first_batches`.

accelerator             from Accelerator(...)
  .prepare              DataLoader(PackedDataset, collate_fn=PaddingFreeCollator())
prepare_loader          PackedLoader, DataflowLoader, PackedIterableDataset
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from energon_packed.errors import ConfigError
from energon_packed.integrations.trainer_state import ConsumedBatches, exact_steps
from energon_packed.loading.state import gathered


class PreparedLoader(DataLoaderShard):
    """A loader of this rank as accelerate wants it; `prepare_loader` makes it.

    It gives `transformers_inputs()` of each batch, on the device. `len()` is the batches of an epoch.
    """

    def __len__(self) -> int:
        """Batches of this rank in one epoch.

        Raises:
            TypeError: not known in advance.
        """
        return len(self.dataset)

    def skip_on_resume(self, batches: int) -> None:
        """Put empty batches in front of the next iteration, for a trainer that skips as many when it resumes."""
        self.dataset.placeholders = batches

    def state_dict(self) -> dict[str, Any]:
        """State of all ranks after the last batch that was handed out, in plain types; every rank must call it."""
        return gathered(self.dataset.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch at which the state was saved; call it before iterating.

        Raises:
            BatchError: the check of the loader fails.
        """
        self.dataset.restore(state_dict)


def prepare_loader(accelerator: Any, loader: Any, *, to_inputs: Callable[[Any], Any] | None = None) -> Any:
    """Prepare a loader that deals packs to ranks itself; do not pass it to `accelerator.prepare`.

        accelerator = Accelerator()
        loader = prepare_loader(accelerator, get_packed_loader("out", encoder, epochs=1))
        accelerator.register_for_checkpointing(loader)

    Args:
        accelerator: made before the loader, as it begins the process group.
        loader: PackedLoader, DataflowLoader or PackedIterableDataset of this rank.
        to_inputs: makes the inputs of the model of each batch; by default `transformers_inputs()`.

    Returns:
        a DataLoader of accelerate that gives the inputs of each batch on the accelerator's device. Each iteration is
        one epoch. `accelerator.prepare` returns it as it is.

    Raises:
        ConfigError: the loader is of another rank or number of ranks than this process.
    """
    refuse_other_place(loader, accelerator.process_index, accelerator.num_processes)
    return prepared_loader(accelerator, loader, to_inputs or _inputs_of)


def prepared_loader(accelerator: Any, loader: Any, to_inputs: Callable[[Any], Any]) -> PreparedLoader:
    """As `prepare_loader`, of a loader whose data-parallel place is right."""
    prepared = PreparedLoader(
        _Ahead(loader, to_inputs),
        device=accelerator.device if accelerator.device_placement else None,
        batch_size=None,
        collate_fn=_unchanged,
    )
    prepared._is_accelerate_prepared = True  # what accelerator.prepare looks at
    found: PreparedLoader = accelerator.prepare(prepared)
    return found


def refuse_other_place(loader: Any, rank: int, world_size: int) -> None:
    """Refuse a loader that was made for another place among the ranks.

    Raises:
        ConfigError: it differs; the message names both.
    """
    made = getattr(loader, "place", (rank, world_size))
    if made != (rank, world_size):
        raise ConfigError(
            f"the loader is of rank {made[0]} of {made[1]}, and this process is rank {rank} of {world_size}: make it "
            "after the process group (Accelerator() or TrainingArguments begins it), or pass `rank` and `world_size`"
        )


class _Ahead(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The batches of one epoch for accelerate, which hands a batch out when it has read the next one.

    Attributes:
        placeholders: empty batches that come first in the next iteration, for a Trainer that skips as many: the loader
            is after the batches that these stand for.
    """

    def __init__(self, loader: Any, to_inputs: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._to_inputs = to_inputs
        self._batches = ConsumedBatches(loader)
        self.placeholders = 0
        self._waiting: dict[str, Any] | None = None  # read, and not handed out as far as one can know

    def __len__(self) -> int:
        steps = exact_steps(self._loader)
        if steps is None:
            raise TypeError("the number of batches in an epoch of this loader is not known in advance")
        return steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.placeholders):
            yield {}
        self.placeholders = 0
        if self._waiting is not None:  # an iteration that was broken off had read one more
            yield self._waiting
        for batch in self._batches.epoch():
            self._batches.use(self._batches.read - 1)  # the batch before is handed out
            self._waiting = self._to_inputs(batch)
            yield self._waiting
        self._batches.use(self._batches.read)
        self._waiting = None

    def state(self) -> dict[str, Any]:
        """State after the last batch that was handed out."""
        return self._batches.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._batches.restore(state)
        self._waiting = None


def _inputs_of(batch: Any) -> Any:
    return batch.transformers_inputs()


def _unchanged(batch: Any) -> Any:
    return batch
