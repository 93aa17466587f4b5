"""OnePass: a source that stays exhausted after its end, even after its state is restored.

Energon's buffers (shuffling, packing, batching) flush when their source ends, but a saved state does not record that
end. Restored during the flush, the source would restart and change the rest of the epoch. With this wrapper between
source and buffers, a state saved at any point of an epoch resumes with the same remaining samples.
"""

from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.wrappers.base import BaseWrapperDataset


class OnePass(BaseWrapperDataset):
    """Passes samples through; yields nothing more after `dataset` ends.

    Args:
        dataset: source to read once.
        worker_config: as for every Energon dataset.
    """

    _savable_fields = ("_ended",)

    def __init__(self, dataset: "SavableDataset[Any]", *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Reset to the beginning; Energon calls this before the first iteration."""
        self._ended = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Number of samples of one worker."""
        return int(self.dataset.len_worker(worker_idx))

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            return
        yield from self.dataset
        self._ended = True

    def config(self) -> dict[str, Any]:
        """Settings that determine the samples, for fingerprints."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}
