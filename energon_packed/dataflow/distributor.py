"""Distributor: which raw items this rank and worker read, and in what order. One required method: `dataset`."""

from abc import ABC, abstractmethod
from pathlib import Path

from megatron.energon import SavableDataset, WorkerConfig, get_train_dataset, get_val_dataset

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.task_encoder import PackedTaskEncoder
from energon_packed.errors import ConfigError


class Distributor(ABC):
    """Deals raw items to ranks and workers."""

    @abstractmethod
    def dataset(self, task_encoder: PackedTaskEncoder, worker_config: WorkerConfig) -> "SavableDataset[PackedBatch]":
        """Batches for one rank, as a dataset whose state can be saved."""


class EnergonDistributor(Distributor):
    """An Energon data set folder or Metadataset.

    Args:
        path: folder of shards, or a Metadataset YAML.
        split: `train`, `val` or `test`.
        micro_batch_size: packs in one batch.
        shuffle: mix shards and packs; False reads in order, for one epoch.
        shuffle_buffer_size: packs in the shuffle buffer, held as raw bytes.
        packing_buffer_size: samples in the buffer of a packer; None for data that is packed already.
        epochs: None repeats for ever, 1 ends after one exact pass.
        drop_last: leave out the short batch at the end of each worker's data.

    Raises:
        ConfigError: epochs that Energon cannot give.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        split: str = "train",
        micro_batch_size: int = 1,
        shuffle: bool = True,
        shuffle_buffer_size: int = 64,
        packing_buffer_size: int | None = None,
        epochs: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if epochs not in (None, 1):
            raise ConfigError(f"epochs is {epochs}; use None to repeat for ever, or 1 for one exact pass")
        if not shuffle and epochs is None:
            raise ConfigError("shuffle=False reads in order for one epoch; give epochs=1 with it")
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        self.path = path
        self.split = split
        self.micro_batch_size = micro_batch_size
        self.shuffle = shuffle
        self.shuffle_buffer_size = shuffle_buffer_size
        self.packing_buffer_size = packing_buffer_size
        self.epochs = epochs
        self.drop_last = drop_last

    def dataset(self, task_encoder: PackedTaskEncoder, worker_config: WorkerConfig) -> "SavableDataset[PackedBatch]":
        """Batches for one rank."""
        common = {
            "split_part": self.split,
            "worker_config": worker_config,
            "batch_size": self.micro_batch_size,
            "batch_drop_last": self.drop_last,
            "packing_buffer_size": self.packing_buffer_size,
            "task_encoder": task_encoder,
        }
        if not self.shuffle:
            return get_val_dataset(self.path, **common)
        try:
            return get_train_dataset(
                self.path,
                **common,
                shuffle_buffer_size=None if task_encoder.one_pass else self.shuffle_buffer_size,
                max_samples_per_sequence=None,
                repeat=self.epochs is None,
            )
        except AssertionError as error:
            if self.epochs is None or "weights" not in str(error):
                raise
            raise ConfigError(
                f"{self.path} draws by weight for ever, so it has no epoch; use epochs=None, or make the blend with "
                "energon-packed metadataset --epochized (shuffle=False reads each input once)"
            ) from error
