"""PackedIterableDataset: raw records, packed on the fly in constant memory."""

from collections.abc import Iterator
from typing import Any

import torch

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.collator import Collator
from energon_packed.dataflow.config import DataflowConfig
from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.distributors.records import RecordDistributor
from energon_packed.dataflow.failures import FailureLog
from energon_packed.dataflow.planned_dataset import plan_in_memory
from energon_packed.dataflow.resharding import refuse_dispatch, refuse_second_split
from energon_packed.dataflow.share import place_of
from energon_packed.dataflow.torch_loader import DataflowLoader, Position
from energon_packed.dataflow.work_folder import work_folder
from energon_packed.errors import ConfigError
from energon_packed.pipeline.encoders import prepare_workers
from energon_packed.pipeline.keys import make_keys
from energon_packed.pipeline.reader import open_reader


class PackedIterableDataset(torch.utils.data.IterableDataset[PackedBatch]):
    """Streams the records of a config, and yields a PackedBatch for each row; every iteration is one epoch.

        for batch in PackedIterableDataset(DataflowConfig.from_yaml("pack.yaml"), num_workers=4):
            ...

    Records are read in ranges, sharded over ranks and workers; memory does not grow with the data. It has worker
    processes of its own: iterate it directly.

    Args:
        config: what is read, and how it is packed.
        rank, world_size: data-parallel place; by default from torch.distributed.
        num_workers: worker processes.
        collator: makes the batch; by default PaddingFreeCollator.
        options: other options of `DataflowLoader`, such as `order_log`.

    Raises:
        ConfigError, SourceError: as `pack`.
    """

    def __init__(
        self,
        config: DataflowConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        collator: Collator | None = None,
        **options: Any,
    ) -> None:
        reader = open_reader(config, work_folder(config))
        config.check_format(reader)
        self.config = config
        self._place = (rank, world_size)
        prepare_workers(config.encoder_loader, sum(len(source.chunks()) for source in reader.sources))
        fingerprint = make_keys(config, reader.sources, None).input
        self.loader = DataflowLoader(
            RecordDistributor(reader, shuffle=config.shuffle, fingerprint=fingerprint),
            config.encoder_loader.load(),
            config.packer(),
            collator,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
            **{"seed": config.seed, "max_failures": config.max_failures} | options,
        )
        self.loader.failures.limits = config.limits

    def __iter__(self) -> Iterator[PackedBatch]:
        """The rest of the current epoch; after its last batch, the next epoch.

        Raises:
            RejectLimitError: more records are rejected than `strict`, `overlong`, `max_failures` or `max_reject_rate`
                allow.
            ConfigError: it is read in a worker process of another loader, or accelerate splits or dispatches it again.
        """
        refuse_dispatch()
        refuse_second_split(place_of(*self._place)[1])
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigError(
                "a PackedIterableDataset is read in a worker process of a DataLoader, and each worker would read "
                "everything: iterate it directly, and set its own `num_workers`"
            )
        return iter(self.loader)

    def rest_of_epoch(self) -> Iterator[PackedBatch]:
        """As `DataflowLoader.rest_of_epoch`."""
        return self.loader.rest_of_epoch()

    @property
    def failures(self) -> FailureLog:
        """Records of the current epoch that were rejected: `counts` by reason, and the first `rows`."""
        return self.loader.failures

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size) of this process."""
        return self.loader.place

    def position(self) -> Position:
        """As `DataflowLoader.position`."""
        return self.loader.position()

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """As `DataflowLoader.state_dict`."""
        return self.loader.state_dict(position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `DataflowLoader.load_state_dict`."""
        self.loader.load_state_dict(state)


def get_raw_loader(
    config: DataflowConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    collator: Collator | None = None,
    **options: Any,
) -> DataflowLoader:
    """Raw records as batches of one row each, the same way from either form.

        loader = get_raw_loader(DataflowConfig.from_yaml("train.yaml"), num_workers=4)

    With `streaming: true` it is the loader of a `PackedIterableDataset`; with `streaming: false`, a
    `MapDistributor` over `plan_in_memory`, whose length is known. Its `failures` has the counts and rows of the
    rejected records in both forms.

    Args:
        config: what is read, and how it is packed.
        rank, world_size: data-parallel place; by default from torch.distributed.
        num_workers: worker processes.
        collator: makes the batch; by default PaddingFreeCollator.
        options: other options of `DataflowLoader`, such as `order_log`; `seed` and `max_failures` are of the config.

    Raises:
        ConfigError, SourceError, RejectLimitError: as those two.
    """
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "num_workers": num_workers}
    if config.streaming:
        return PackedIterableDataset(config, collator=collator, **place, **options).loader
    dataset = plan_in_memory(config)
    given = {"seed": config.seed, "max_failures": config.max_failures} | options
    items = MapDistributor(dataset, shuffle=config.shuffle)
    loader = DataflowLoader(items, collator=collator, **place, **given)
    loader.failures.planned = dataset.rejects
    return loader
