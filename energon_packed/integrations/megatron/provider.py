"""A packed dataset to the data loader provider of Megatron's `pretrain`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

from energon_packed.blends import has_split
from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError
from energon_packed.integrations.megatron.layouts import Layout
from energon_packed.integrations.megatron.ranks import (
    MegatronRanks,
    check_parallelism,
    data_parallel_group,
    num_microbatches,
)
from energon_packed.integrations.megatron.restore import MegatronIterator, restore_iterator
from energon_packed.keywords import ProviderKeywords
from energon_packed.loading.collation.collator import Collator
from energon_packed.loading.costs.model import Balance
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.energon.packed_loader import get_packed_loader
from energon_packed.loading.monitoring.metrics import ThroughputMetrics
from energon_packed.loading.options import PackedLoaderOptions
from energon_packed.loading.packers.base import Packer
from energon_packed.options import check_choice, declared

Provider = Callable[[Any], tuple[MegatronIterator | None, MegatronIterator | None, MegatronIterator | None]]
Order = Literal["global", "energon"]
DECIDED = ("rank", "world_size", "split", "epochs", "shuffle")
"""Options that Megatron decides."""
_OF_DATASET = ("check_encoder", "check_lengths", "trust_sample_loader", "media_root")
_OF_ORDER = ("balance", "accumulation")
_OF_ENERGON = ("seq_len", "complete_epochs", "shuffle_buffer_size", "packing_buffer_size", "epoch_end")


def train_valid_test_dataloaders_provider(
    path: str | Path,
    encoder: Processor | None,
    *,
    layout: Layout = "bridge",
    restore: str | Path | Literal["auto"] | None = "auto",
    order: Order = "global",
    metrics: ThroughputMetrics | None = None,
    collator: Collator | None = None,
    packer: Packer | None = None,
    balance: Balance | None = None,
    accumulation: int | None = None,
    **options: Unpack[ProviderKeywords],
) -> Provider:
    """Return a provider for Megatron's `pretrain`: called on every rank, it returns (train, valid, test) iterators.

        provider = train_valid_test_dataloaders_provider("out", encoder, micro_batch_size=2, num_workers=4)
        pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)

    Ranks come from `megatron.core.parallel_state`. In layouts `bridge` and `bridge-audio` every rank loads: processes
    of the same data-parallel rank read the same rows, and middle pipeline stages get everything except pixels and
    features of audio. In `megatron-lm` layout the first tensor-parallel rank of the first and last stage loads, in
    `megatron-gpt` layout the first tensor-parallel rank of every stage, and the step broadcasts. `valid` and `test`
    are None if the dataset does not have the split.

    Args:
        path: a packed dataset, or a Metadataset YAML.
        encoder: the Processor that the dataset was packed with; None as in `get_packed_loader`.
        layout: `bridge`, `bridge-audio`, `megatron-lm` or `megatron-gpt`.
        restore: source of the loader state of a restarted run. `auto`: under Megatron-LM, the file in
            `--dataloader-save` of the iteration that `--load` restored; Megatron-Bridge restores the state
            itself. A path: a checkpoint folder (its last complete iteration is used), an iteration folder or a file.
            None reads the data from its start.
        order: `global`: packs in one order for all ranks, epoch after epoch, so that every rank has a pack at every
            step, and a checkpoint continues exactly with any number of ranks and workers. `energon`: the order of
            Energon's loader, which also packs on the fly and draws a blend by weight without an epoch.
        metrics: counts the rows of the `train` iterator, with the micro batches of a step; by default over the
            data-parallel group of this process.
        collator: as for DataflowLoader.
        balance: with `global`, as for MapDistributor.
        packer: with `energon`, as for `get_packed_loader`.
        accumulation: with `global`, as for MapDistributor; by default the micro batches of a step, if Megatron's
            calculator of micro batches is initialized.
        options: the fields of `PackedLoaderOptions` except rank, world_size, split, epochs and shuffle; with `global`,
            also without the options of Energon's order.

    Raises:
        ConfigError: a layout, order or option is unknown, or Megatron decides the option; when the provider is called,
            the layout or the parallelism does not support the settings, megatron-core is missing, or there is no
            state to restore.
        BatchError: when the provider is called, the state does not match the loader.
    """
    check_choice("layout", layout, Layout)
    of_order = {"collator": collator, "packer": packer, "balance": balance, "accumulation": accumulation}
    given: dict[str, Any] = {**options, **{name: value for name, value in of_order.items() if value is not None}}
    _check_options(given, order)

    def provider(train_val_test_num_samples: Any = None) -> tuple[Any, Any, Any]:
        ranks = MegatronRanks.of_this_process()
        check_parallelism(ranks, layout, collator)
        if not ranks.loads(layout):
            return None, None, None

        if metrics is not None:
            metrics.micro_batches = num_microbatches()
            metrics.group = metrics.group or data_parallel_group()
        of_call = {**given} if balance is None else {"accumulation": num_microbatches(), **given}

        def iterator(split: str) -> MegatronIterator:
            make: Any = global_loader if order == "global" else get_packed_loader
            # Processes of a data-parallel rank read the same rows, and the first process writes the log.
            writes = split == "train" and ranks.is_first
            of_split = {name: value for name, value in of_call.items() if name != "order_log" or writes}
            loader = make(path, encoder, split=split, rank=ranks.rank, world_size=ranks.world_size, **of_split)
            counts = metrics if split == "train" else None
            return MegatronIterator(loader, layout, with_pixels=not ranks.is_middle_stage, metrics=counts)

        train = iterator("train")
        restore_iterator(train, restore, ranks.rank)
        valid, test = (iterator(split) if has_split(path, split) else None for split in ("val", "test"))
        return train, valid, test

    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank
    return provider


def global_loader(
    path: str | Path,
    encoder: Processor | None,
    *,
    rank: int,
    world_size: int,
    split: str = "train",
    collator: Collator | None = None,
    balance: Balance | None = None,
    accumulation: int = 1,
    **options: Unpack[ProviderKeywords],
) -> DataflowLoader:
    """Return a loader of packs in their global order, epoch after epoch without end."""
    of_loader: dict[str, Any] = dict(options)
    of_dataset = {name: of_loader.pop(name) for name in _OF_DATASET if name in of_loader}
    packs = PackedDataset(path, encoder, split=split, **of_dataset)
    return DataflowLoader(
        MapDistributor(packs, repeat=True, balance=balance, accumulation=accumulation),
        collator=collator,
        batch_size=of_loader.pop("micro_batch_size", 1),
        rank=rank,
        world_size=world_size,
        **{"num_workers": 2, **of_loader},
    )


def _check_options(options: Mapping[str, Any], order: str) -> None:
    if order not in ("global", "energon"):
        raise ConfigError(f"`order` must be 'global' or 'energon', got {order!r}.")
    for name in DECIDED:
        if name in options:
            raise ConfigError(
                f"`{name}` is not an option of the provider: Megatron sets ranks and splits, and its loop repeats "
                "shuffled data. Remove it."
            )
    names = [option.name for option in declared(PackedLoaderOptions) if option.name not in (*DECIDED, *_OF_ENERGON)]
    known = [*names, "collator", *_OF_ORDER]
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
