"""A loader that is sharded over ranks to a DataLoader of accelerate, which does not shard or dispatch it again.

| input | use |
|---|---|
| torch DataLoader over a PackedDataset | `accelerator.prepare`, with any `split_batches` |
| DataflowLoader | `prepare_loader` |

`accelerator.prepare` would shard the batches of a rank over ranks again. `prepare_loader` adds only the other services
of accelerate: the device, the end of an epoch for `accelerator.accumulate`, a state for `register_for_checkpointing`,
and `skip_first_batches`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard

from energon_packed.errors import ConfigError
from energon_packed.integrations.consumed import Consumed
from energon_packed.libraries import changed
from energon_packed.loading.collation.batch import trainer_inputs
from energon_packed.loading.dataflow.loader import unchanged
from energon_packed.loading.loaders import Loader, as_loader


class PreparedLoader(DataLoaderShard):
    """DataLoader of accelerate over a Consumed loader of this rank, made by `prepare_loader`.

    It yields the inputs of each batch on the device. `len()` is the number of batches of an epoch.
    """

    _is_accelerate_prepared = True  # with this mark, accelerator.prepare registers the loader without wrapping it

    def __init__(self, accelerator: Any, consumed: Consumed) -> None:
        super().__init__(
            consumed,
            device=accelerator.device if accelerator.device_placement else None,
            batch_size=None,
            collate_fn=unchanged,
            # Otherwise each iterator draws a seed from torch's random state, and a resumed run has one iterator more.
            generator=torch.Generator(),
        )
        if accelerator.prepare(self) is not self:
            raise changed("accelerate", "which prepares a loader that has `_is_accelerate_prepared` set")

    def __len__(self) -> int:
        """Return the batches of this rank in one epoch.

        Raises:
            TypeError: the number is not known in advance.
        """
        return len(self.dataset)  # DataLoader would warn when a resumed epoch is longer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks after the last yielded batch, in plain types; every rank must call it."""
        state: dict[str, Any] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batch at which the state was saved; call it before iterating.

        Raises:
            BatchError: the loader refuses the state.
        """
        self.dataset.load_state_dict(state_dict)


def prepare_loader(
    accelerator: Any,
    loader: Any,
    *,
    to_inputs: Callable[[Any], Any] = trainer_inputs,
    order_log: str | Path | None = None,
) -> PreparedLoader:
    """Prepare a loader that is sharded over ranks already; do not pass the loader to `accelerator.prepare`.

        accelerator = Accelerator()
        loader = prepare_loader(accelerator, get_packed_loader("out", encoder, epochs=1))
        accelerator.register_for_checkpointing(loader)

    Args:
        accelerator: created before the loader, as it initializes the process group.
        loader, to_inputs, order_log: as for Consumed.

    Returns:
        a DataLoader of accelerate that yields the inputs of each batch on the accelerator's device. Each iteration is
        one epoch, or the rest of an epoch after a break. `accelerator.prepare` returns it unchanged.

    Raises:
        ConfigError: the loader has another rank or world size than this process.
    """
    loader = as_loader(loader)
    check_loader_rank(loader, accelerator.process_index, accelerator.num_processes)
    return PreparedLoader(accelerator, Consumed(loader, to_inputs, ahead=1, order_log=order_log))


def check_loader_rank(loader: Loader, rank: int, world_size: int) -> None:
    """Check that a loader was created for this rank.

    Raises:
        ConfigError: rank or world size differ; the message names both.
    """
    made = loader.place
    if made not in (None, (rank, world_size)):
        raise ConfigError(
            f"the loader must be of rank {rank} of {world_size}, as this process, got rank {made[0]} of {made[1]}. "
            "Create it after the process group (Accelerator() or TrainingArguments initialize it), or pass `rank` and "
            "`world_size`."
        )
