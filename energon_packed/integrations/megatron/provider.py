"""A packed dataset to the data loader provider of Megatron's `pretrain`, and to its loader in the global order."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from energon_packed.blends import has_split
from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError
from energon_packed.integrations.megatron.layouts import Layout, check_layout
from energon_packed.integrations.megatron.ranks import (
    MegatronRanks,
    check_parallelism,
    data_parallel_group,
    num_microbatches,
)
from energon_packed.integrations.megatron.restore import MegatronIterator, restore_iterator
from energon_packed.loading.collator import Collator
from energon_packed.loading.costs.model import Balance
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.dataset import PackedDataset
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.energon.config import LoaderConfig
from energon_packed.loading.energon.packed_loader import get_packed_loader
from energon_packed.loading.epoch_end import EpochEnd
from energon_packed.loading.monitoring.metrics import ThroughputMetrics
from energon_packed.loading.packers.base import Packer

Provider = Callable[[Any], tuple[MegatronIterator | None, MegatronIterator | None, MegatronIterator | None]]
Order = Literal["global", "energon"]
_DECIDED = ("rank", "world_size", "split", "epochs", "shuffle")  # by Megatron
_OF_DATASET = ("check_encoder", "check_lengths", "trust_sample_loader", "media_root")
_OF_ORDER = ("balance", "accumulation")


class OrderedOptions(TypedDict, total=False):
    """Options of `ordered_loader` that Megatron does not decide."""

    micro_batch_size: int
    num_workers: int
    seed: int
    collator: Collator | None
    balance: Balance | None
    accumulation: int
    max_failures: int
    check_encoder: bool
    check_lengths: bool
    trust_sample_loader: bool
    timeout: float
    media_root: Mapping[str, str] | None
    order_log: str | Path | None


class ProviderOptions(OrderedOptions, total=False):
    """Options of the provider: of `ordered_loader`, and of `get_packed_loader` with order='energon'."""

    config: LoaderConfig | None
    packer: Packer | None
    seq_len: int | None
    complete_epochs: bool
    shuffle_buffer_size: int
    packing_buffer_size: int | None
    epoch_end: EpochEnd


def train_valid_test_dataloaders_provider(
    path: str | Path,
    encoder: Processor | None,
    *,
    layout: Layout = "bridge",
    restore: str | Path | Literal["auto"] | None = "auto",
    order: Order = "global",
    metrics: ThroughputMetrics | None = None,
    **options: Unpack[ProviderOptions],
) -> Provider:
    """Return a provider for Megatron's `pretrain`: called on every rank, it returns (train, valid, test) iterators.

        provider = train_valid_test_dataloaders_provider("out", encoder, micro_batch_size=2, num_workers=4)
        pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)

    Ranks come from `megatron.core.parallel_state`. In `bridge` layout every rank loads: processes of the same
    data-parallel rank read the same rows, and middle pipeline stages get everything except pixels. In `megatron-lm`
    layout the first tensor-parallel rank of the first and last stage loads, in `megatron-gpt` layout the first
    tensor-parallel rank of every stage, and the step broadcasts. `valid` and `test` are None if the dataset does not
    have the split.

    Args:
        path: a packed dataset, or a Metadataset YAML.
        encoder: the Processor that the dataset was packed with; None as in `get_packed_loader`.
        layout: `bridge`, `megatron-lm` or `megatron-gpt`.
        restore: source of the loader state of a restarted run. `auto`: under Megatron-LM, the file in
            `--dataloader-save` of the iteration that `--load` restored; Megatron-Bridge restores the state
            itself. A path: a checkpoint folder (its last complete iteration is used), an iteration folder or a file.
            None reads the data from its start.
        order: `global`: packs in one order for all ranks, epoch after epoch, so that every rank has a pack at every
            step, and a checkpoint continues exactly with any number of ranks and workers. `energon`: the order of
            Energon's loader, which also packs on the fly and draws a blend by weight without an epoch.
        metrics: counts the rows of the `train` iterator, with the micro batches of a step; by default over the
            data-parallel group of this process.
        options: with `global`, the options of `ordered_loader`; with `energon`, the options of `get_packed_loader`
            except rank, world_size, split, epochs and shuffle.

    Raises:
        ConfigError: a layout, order or option is unknown, or Megatron decides the option; when the provider is called,
            the layout or the parallelism does not support the settings, megatron-core is missing, or there is no
            state to restore.
        BatchError: when the provider is called, the state does not match the loader.
    """
    check_layout(layout)
    _check_options(options, order)

    def provider(train_val_test_num_samples: Any = None) -> tuple[Any, Any, Any]:
        ranks = MegatronRanks.of_this_process()
        check_parallelism(ranks, layout, options.get("collator"))
        if not ranks.loads(layout):
            return None, None, None

        if metrics is not None:
            metrics.micro_batches = num_microbatches()
            metrics.group = metrics.group or data_parallel_group()
        given: dict[str, Any] = dict(options)
        if options.get("balance") is not None:
            given.setdefault("accumulation", num_microbatches())

        def iterator(split: str) -> MegatronIterator:
            make: Any = ordered_loader if order == "global" else get_packed_loader
            # Processes of a data-parallel rank read the same rows, and the first process writes the log.
            writes = split == "train" and ranks.is_first
            of_split = {name: value for name, value in given.items() if name != "order_log" or writes}
            loader = make(path, encoder, split=split, rank=ranks.rank, world_size=ranks.world_size, **of_split)
            counts = metrics if split == "train" else None
            return MegatronIterator(loader, layout, with_pixels=not ranks.is_middle_stage, metrics=counts)

        train = iterator("train")
        restore_iterator(train, restore, ranks.rank)
        valid, test = (iterator(split) if has_split(path, split) else None for split in ("val", "test"))
        return train, valid, test

    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank
    return provider


def ordered_loader(
    path: str | Path,
    encoder: Processor | None,
    *,
    rank: int,
    world_size: int,
    split: str = "train",
    **options: Unpack[OrderedOptions],
) -> DataflowLoader:
    """Return a loader of packs in their global order, epoch after epoch without end.

    Args:
        path, encoder, split: as for PackedDataset.
        rank, world_size: data-parallel rank and world size.
        options: further options, all with defaults:

            - `micro_batch_size`: packs in one batch, which are joined into one row; by default 1.
            - `num_workers`: worker processes, by default 2; 0 loads in this process.
            - `seed`: seed of the order; by default 0.
            - `collator`: by default PaddingFreeCollator.
            - `balance`, `accumulation`: as for MapDistributor. The provider sets `accumulation` to the micro batches
              of a step, if Megatron's calculator of micro batches is initialized.
            - `max_failures`: packs of this rank that may fail to load and are skipped; by default 0.
            - `check_encoder`, `check_lengths`, `trust_sample_loader`, `media_root`: as for PackedDataset.
            - `timeout`: seconds to wait for a batch of the worker processes; 0, the default, waits as long as they
              live.
            - `order_log`: folder in which every step is recorded.

    Raises:
        ConfigError, FormatError: as PackedDataset and DataflowLoader.
    """
    given: dict[str, Any] = dict(options)
    of_dataset, of_order = (
        {name: given.pop(name) for name in names if name in given} for names in (_OF_DATASET, _OF_ORDER)
    )
    return DataflowLoader(
        MapDistributor(PackedDataset(path, encoder, split=split, **of_dataset), repeat=True, **of_order),
        batch_size=given.pop("micro_batch_size", 1),
        num_workers=given.pop("num_workers", 2),
        rank=rank,
        world_size=world_size,
        **given,
    )


def _check_options(options: Mapping[str, Any], order: str) -> None:
    if order not in ("global", "energon"):
        raise ConfigError(f"`order` must be 'global' or 'energon', got {order!r}.")
    for name in _DECIDED:
        if name in options:
            raise ConfigError(
                f"`{name}` is not an option of the provider: Megatron sets ranks and splits, and its loop repeats "
                "shuffled data. Remove it."
            )
    known = OrderedOptions.__annotations__
    if order == "energon" and (misplaced := [name for name in _OF_ORDER if name in options]):
        raise ConfigError(
            f"`{misplaced[0]}` is not an option of order='energon', in which Energon decides the packs of each step. "
            "Remove it, or set order='global'."
        )
    for name in options:
        if order == "global" and name not in known:
            raise ConfigError(
                f"`{name}` is not an option of the global order, which has {', '.join(known)}. Remove it, or set "
                "order='energon'."
            )
