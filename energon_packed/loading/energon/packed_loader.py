"""A packed dataset to a loader of padding-free batches: `get_packed_loader`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import torch

from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError
from energon_packed.loading.collator import Collator, PaddingFreeCollator
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.distributors.energon import EnergonDistributor
from energon_packed.loading.energon.config import LoaderConfig, LoaderSettings
from energon_packed.loading.energon.ranks import check_every_worker_has_packs
from energon_packed.loading.manifests import LoadedSplit, common_seq_len, loaded_splits, processor_for
from energon_packed.loading.packers.base import Packer
from energon_packed.loading.packers.pool import BalancedPoolPacker, PoolPacker
from energon_packed.loading.packers.simple import SimpleBatcher
from energon_packed.options import check_type, make
from energon_packed.storage import as_path

_log = logging.getLogger(__name__)


def get_packed_loader(
    path: str | Path,
    encoder: Processor | None = None,
    *,
    config: LoaderConfig | None = None,
    collator: Collator | None = None,
    packer: Packer | None = None,
    **settings: Unpack[LoaderSettings],
) -> DataflowLoader:
    """Return a DataflowLoader that yields one padding-free PackedBatch per micro batch, in Energon's order.

        loader = get_packed_loader("out", encoder, micro_batch_size=2, epochs=1)
        for batch in loader:
            loss = model(**batch.transformers_inputs()).loss

    Args:
        path: folder that `energon-packed pack` wrote (`out` or `out/webdataset`), or an Energon Metadataset YAML.
        encoder: the Processor that the dataset was packed with; None for PackedTokensSample data without images,
            which contains the tokens.
        config: all settings in one object.
        collator: joins samples into a row; by default without padding.
        packer: groups samples on the fly; by default best fit decreasing.
        settings: the fields of `LoaderConfig`, instead of `config`. By default, the loader repeats without end:
            `epochs=1` reads every pack once.

    Raises:
        ConfigError: settings contradict each other or the dataset.
        FormatError: `path` is not a packed dataset.
    """
    if config is not None and settings:
        raise ConfigError(f"Pass either `config` or settings such as `{next(iter(settings))}`, not both.")
    if "balance" in settings:
        raise ConfigError(
            "`balance` is not an option of get_packed_loader, as Energon decides the packs of each step. Use "
            "DataflowLoader(MapDistributor(PackedDataset(PATH, ENCODER), balance=...))."
        )
    check_type("config", config, LoaderConfig, "Pass LoaderConfig(...), or its fields as settings.")
    check_type("collator", collator, Collator, "Pass a Collator, such as PaddingFreeCollator().")
    check_type("packer", packer, Packer, "Pass a Packer, such as PoolPacker(4096).")
    config = config or make(LoaderConfig, dict(settings))
    splits = loaded_splits(path, config.split, trusted=config.trust_sample_loader)
    seq_len = common_seq_len(splits, config.seq_len)
    processor = processor_for(splits, encoder, check=config.check_encoder)
    collator = collator or PaddingFreeCollator()
    if isinstance(collator, PaddingFreeCollator):
        _warn_about_padding(collator, splits)
    distributor = EnergonDistributor.of(path, config, splits, processor, _packer_of(packer, config, seq_len))
    if config.one_pass and as_path(path).is_file():
        distributor.identity()  # raises for a blend that draws by weight
    loader = DataflowLoader(
        distributor,
        processor,
        SimpleBatcher(config.micro_batch_size),
        collator,
        num_workers=config.num_workers,
        rank=config.rank,
        world_size=config.world_size,
        seed=config.seed,
        max_failures=config.max_failures,
        epoch_end=config.epoch_end,
        check_lengths=config.check_lengths,
        order_log=config.order_log,
        timeout=config.timeout,
        pin_memory=torch.cuda.is_available(),
    )
    if config.epochs is None:
        check_every_worker_has_packs(splits, loader.place[1], config.num_workers)
    return loader


def _packer_of(packer: Packer | None, config: LoaderConfig, seq_len: int | None) -> Packer | None:
    if packer is not None and packer.max_patches is not None:
        raise ConfigError(
            "`max_patches` needs the pixels of a sample, which are not loaded when Energon packs. Use `max_images`, "
            "or a DataflowLoader over EnergonDistributor."
        )
    if packer is not None and packer.overlong != "error":
        raise ConfigError(
            f"`overlong` of a packer must be 'error' under Energon, got {packer.overlong!r}. Pack offline with this "
            "`overlong`, or set `max_failures` to skip samples that fit no row."
        )
    if isinstance(packer, BalancedPoolPacker):
        raise ConfigError(
            "BalancedPoolPacker has no effect here, as Energon decides when rows leave its buffer. Use PoolPacker, or "
            "a DataflowLoader."
        )
    if packer is not None or not config.on_the_fly:
        return packer
    if seq_len is None:
        raise ConfigError("packing on the fly needs `seq_len`, as no dataset has a packing.json. Pass `seq_len`.")
    return PoolPacker(seq_len)


def _warn_about_padding(collator: PaddingFreeCollator, splits: Sequence[LoadedSplit]) -> None:
    for split in splits:
        manifest = split.manifest
        if manifest is not None and manifest.pad_multiple % collator.pad_multiple:
            _log.warning(
                "%s was packed with pad_multiple %d and is padded to multiples of %d, so rows can be longer than "
                "seq_len %d; pack with that pad_multiple",
                split.path,
                manifest.pad_multiple,
                collator.pad_multiple,
                manifest.seq_len,
            )
            return
