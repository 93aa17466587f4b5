"""A loader that is sharded over ranks to a DataLoader of accelerate, which does not shard or dispatch it again.

| input | use |
|---|---|
| torch DataLoader over a PackedDataset | `accelerator.prepare`, with any `split_batches` |
| DataflowLoader | `prepare_loader` |

`accelerator.prepare` would shard the batches of a rank over ranks again. `prepare_loader` adds only the other services
of accelerate: the device, the end of an epoch for `accelerator.accumulate`, a state for `register_for_checkpointing`,
and `skip_first_batches`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from energon_packed.errors import BatchError, ConfigError
from energon_packed.integrations.trainer_state import ConsumedBatches, exact_steps
from energon_packed.libraries import changed
from energon_packed.loading.batch import trainer_inputs
from energon_packed.loading.dataflow.loader import unchanged
from energon_packed.loading.state import gathered


class PreparedLoader(DataLoaderShard):
    """DataLoader of accelerate over a loader of this rank, made by `prepare_loader`.

    It yields `transformers_inputs()` of each batch on the device. `len()` is the number of batches of an epoch.
    """

    def __len__(self) -> int:
        """Return the batches of this rank in one epoch.

        Raises:
            TypeError: the number is not known in advance.
        """
        return len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks after the last yielded batch, in plain types; every rank must call it."""
        return gathered(self.dataset.batches.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch at which the state was saved; call it before iterating.

        Raises:
            BatchError: the loader refuses the state.
        """
        self.dataset.restore(state_dict)


def prepare_loader(
    accelerator: Any,
    loader: Any,
    *,
    to_inputs: Callable[[Any], Any] | None = None,
    order_log: str | Path | None = None,
) -> Any:
    """Prepare a loader that is sharded over ranks already; do not pass the loader to `accelerator.prepare`.

        accelerator = Accelerator()
        loader = prepare_loader(accelerator, get_packed_loader("out", encoder, epochs=1))
        accelerator.register_for_checkpointing(loader)

    Args:
        accelerator: created before the loader, as it initializes the process group.
        loader: DataflowLoader of this rank.
        to_inputs: converts a batch to the inputs of the model; by default `transformers_inputs()`, which needs equal
            loss weights.

    Returns:
        a DataLoader of accelerate that yields the inputs of each batch on the accelerator's device. Each iteration is
        one epoch, or the rest of an epoch after a break. `accelerator.prepare` returns it unchanged.

    Raises:
        ConfigError: the loader has another rank or world size than this process.
    """
    check_loader_rank(loader, accelerator.process_index, accelerator.num_processes)
    return prepared_loader(accelerator, loader, to_inputs or trainer_inputs, order_log=order_log)


def prepared_loader(
    accelerator: Any, loader: Any, to_inputs: Callable[[Any], Any], *, order_log: str | Path | None = None
) -> PreparedLoader:
    """Prepare a loader whose rank was checked; see `prepare_loader`."""
    prepared = PreparedLoader(
        ConsumedDataset(loader, to_inputs, order_log),
        device=accelerator.device if accelerator.device_placement else None,
        batch_size=None,
        collate_fn=unchanged,
        # Otherwise each iterator draws a seed from torch's random state, and a resumed run has one iterator more.
        generator=torch.Generator(),
    )
    # With this mark, accelerator.prepare only registers the loader, and does not wrap it again.
    prepared._is_accelerate_prepared = True
    registered: PreparedLoader = accelerator.prepare(prepared)
    if registered is not prepared:
        raise changed("accelerate", "which prepares a loader that has `_is_accelerate_prepared` set")
    return registered


def check_loader_rank(loader: Any, rank: int, world_size: int) -> None:
    """Check that a loader was created for this rank.

    Raises:
        ConfigError: rank or world size differ; the message names both.
    """
    made = getattr(loader, "place", (rank, world_size))
    if made != (rank, world_size):
        raise ConfigError(
            f"the loader must be of rank {rank} of {world_size}, as this process, got rank {made[0]} of {made[1]}. "
            "Create it after the process group (Accelerator() or TrainingArguments initialize it), or pass `rank` and "
            "`world_size`."
        )


class ConsumedDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Dataset of the batches of one epoch for accelerate, which yields a batch only after it has read the next batch.

    Attributes:
        to_inputs: converts a batch to the inputs of the model.
        batches: the batches of the loader, with the state after each yielded batch.
        placeholders: empty batches at the start of the next iteration, for a Trainer that skips this many: the loader
            continues after the batches that they replace.
    """

    def __init__(self, loader: Any, to_inputs: Callable[[Any], Any], order_log: str | Path | None) -> None:
        self._loader = loader
        self.to_inputs = to_inputs
        self.batches = ConsumedBatches(loader, order_log=order_log)
        self.placeholders = 0
        self._waiting: dict[str, Any] | None = None  # read, and perhaps not yielded
        self._iterators = 0

    def __len__(self) -> int:
        steps = exact_steps(self._loader)
        if steps is None:
            raise TypeError("len() is undefined: the loader does not know the number of batches of an epoch")
        return steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._iterators += 1
        own = self._iterators
        for row in self._rows():
            yield row
            # The row that the earlier iterator had read in advance is the first row of the later iterator.
            if own != self._iterators:
                raise BatchError("A later iterator of this loader continues its batches. Use only the last iterator.")

    def _rows(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.placeholders):
            yield {}
        self.placeholders = 0
        if self._waiting is not None:  # an interrupted iteration had read this batch in advance
            yield self._waiting
        for batch in self.batches.epoch():
            self.batches.use(self.batches.read - 1)  # the previous batch was yielded
            self._waiting = self.to_inputs(batch)
            yield self._waiting
        self.batches.use(self.batches.read)
        self._waiting = None

    def restore(self, state: dict[str, Any]) -> None:
        """Move the loader to a saved state."""
        self.batches.restore(state)
        self._waiting = None
