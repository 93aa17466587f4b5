"""A packed dataset to a loader of padding-free batches: `get_packed_loader`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError
from energon_packed.keywords import PackedLoaderKeywords
from energon_packed.loading.collation.collator import Collator, PaddingFreeCollator
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.datasets.manifests import LoadedSplit, common_seq_len, loaded_splits, processor_for
from energon_packed.loading.distributors.energon import EnergonDistributor
from energon_packed.loading.energon.ranks import check_every_worker_has_packs
from energon_packed.loading.options import LoaderOptions, PackedLoaderOptions
from energon_packed.loading.packers.base import Packer
from energon_packed.loading.packers.pool import BalancedPoolPacker, PoolPacker
from energon_packed.loading.packers.simple import SimpleBatcher
from energon_packed.metadatasets import is_metadataset
from energon_packed.options import check_type, make, values_of
from energon_packed.storage import as_path

_log = logging.getLogger(__name__)
_REFUSED = {
    "balance": "get_packed_loader, as Energon decides the packs of each step. Use "
    "DataflowLoader(MapDistributor(PackedDataset(PATH, ENCODER), balance=...)).",
}


def get_packed_loader(
    path: str | Path,
    encoder: Processor | None = None,
    *,
    collator: Collator | None = None,
    packer: Packer | None = None,
    **options: Unpack[PackedLoaderKeywords],
) -> DataflowLoader:
    """Return a DataflowLoader that yields one padding-free PackedBatch per micro batch, in Energon's order.

        loader = get_packed_loader("out", encoder, micro_batch_size=2, epochs=1)
        for batch in loader:
            loss = model(**batch.transformers_inputs()).loss

    Args:
        path: folder that `energon-packed pack` wrote (`out` or `out/webdataset`), or an Energon Metadataset YAML.
        encoder: the Processor that the dataset was packed with; None for PackedTokensSample data without images,
            which contains the tokens.
        collator: as for DataflowLoader.
        packer: groups samples on the fly; by default best fit decreasing.
        options: the fields of `PackedLoaderOptions`. By default, the loader repeats without end: `epochs=1` reads
            every pack once.

    Raises:
        ConfigError: options contradict each other or the dataset.
        FormatError: `path` is not a packed dataset.
    """
    check_type("collator", collator, Collator, "Pass a Collator, such as PaddingFreeCollator().")
    check_type("packer", packer, Packer, "Pass a Packer, such as PoolPacker(4096).")
    config = make(PackedLoaderOptions, options, refused=_REFUSED)
    splits = loaded_splits(path, config.split, trusted=config.trust_sample_loader)
    processor = processor_for(splits, encoder, check=config.check_encoder)
    _warn_about_padding(collator, splits)
    packer = _packer_of(packer, config, common_seq_len(splits, config.seq_len))
    distributor = EnergonDistributor.of(path, config, splits, processor, packer)
    if config.one_pass and is_metadataset(as_path(path)):
        distributor.identity()  # raises for a blend that draws by weight
    of_loader: Any = values_of(LoaderOptions, config)
    loader = DataflowLoader(distributor, processor, SimpleBatcher(config.micro_batch_size), collator, **of_loader)
    if config.epochs is None:
        check_every_worker_has_packs(splits, loader.place[1], config.num_workers)
    return loader


def _packer_of(packer: Packer | None, config: PackedLoaderOptions, seq_len: int | None) -> Packer | None:
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


def _warn_about_padding(collator: Collator | None, splits: Sequence[LoadedSplit]) -> None:
    if not isinstance(collator, PaddingFreeCollator):  # the default adds no padding
        return
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
