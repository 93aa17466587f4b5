"""OnePass: a source that ends once and stays ended, also after its state is restored.

Energon's buffers (shuffling, packing, batching) flush when their source ends, but a saved state does not say that it
had ended: restored during the flush, the source would begin again and the rest of the epoch would be another one.
With this wrapper between source and buffers, a state saved anywhere in an epoch restores to the same rest of it.
"""

from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.wrappers.base import BaseWrapperDataset


class OnePass(BaseWrapperDataset):
    """Passes samples through; after the end of `dataset`, gives nothing for ever.

    Args:
        dataset: what is read once.
        worker_config: as for every Energon dataset.
    """

    _savable_fields = ("_ended",)

    def __init__(self, dataset: "SavableDataset[Any]", *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Back to the beginning; Energon calls it before a first iteration."""
        self._ended = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples of one worker."""
        return int(self.dataset.len_worker(worker_idx))

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            return
        yield from self.dataset
        self._ended = True

    def config(self) -> dict[str, Any]:
        """What decides the samples, for fingerprints."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}
