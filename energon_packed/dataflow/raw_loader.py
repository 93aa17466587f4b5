"""`get_raw_loader`: the loader of a DataflowConfig, streaming or map-style by its `streaming`."""

from typing import Any

from energon_packed.dataflow.collator import Collator
from energon_packed.dataflow.config import DataflowConfig
from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.packed_iterable import PackedIterableDataset
from energon_packed.dataflow.planned_dataset import plan_in_memory
from energon_packed.dataflow.torch_loader import DataflowLoader


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
