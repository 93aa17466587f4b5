"""A packed folder or a Metadataset to Energon's dataset of one epoch: epoch_dataset."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig, get_train_dataset, get_val_dataset

from energon_packed.errors import ConfigError, FormatError
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.datasets.manifests import OpenedSplits
from energon_packed.loading.datasets.trust import check_trusted
from energon_packed.loading.energon.faults import raise_with_file_name
from energon_packed.loading.energon.pack_reader import read_whole_packs
from energon_packed.loading.energon.task_encoder import PackedTaskEncoder
from energon_packed.loading.options import PackedLoaderOptions
from energon_packed.metadatasets import NV_META
from energon_packed.shards.nv_meta import CRUDE, INFO, OLD_INFO
from energon_packed.storage import as_path, energon_url, map_paths

# Large, so that epoch 1 of a seed is not epoch 0 of the next seed.
_SEEDS_PER_EPOCH = 1_000_003
READING = threading.RLock()
"""Lock of a thread in which Energon reads: the index of the sample in progress is a variable of Energon's WorkerConfig
class, not of a loader."""
if hasattr(os, "register_at_fork"):  # a child that is forked during a read of another thread would inherit that index
    os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)


@contextmanager
def reading(config: WorkerConfig, sample_index: int) -> Iterator[None]:
    """Read a sample of a dataset directly, without a loader of Energon."""
    with READING:
        config.worker_activate(sample_index)
        try:
            yield
        finally:
            config.worker_deactivate()


def epoch_dataset(
    path: str | Path,
    config: PackedLoaderOptions,
    epoch: int,
    *,
    task_encoder: PackedTaskEncoder,
    worker_config: WorkerConfig,
    opened: OpenedSplits,
) -> "SavableDataset[PackedBatch]":
    """Create Energon's dataset of the batches of a rank in one epoch, or without end if `epochs` is None.

    Args:
        path: folder of shards, or a Metadataset YAML.
        config: of the loader.
        epoch: from 0.
        task_encoder: encodes packs and makes batches.
        worker_config: rank and world size.
        opened: the tars at the creation of the loader; they must be unchanged.

    Raises:
        ConfigError: a blend by weight has no epoch, a sample class cannot be imported, or code of a dataset is not
            trusted.
        FormatError: a folder is not indexed.
        DataChangedError: a tar was replaced or changed.
    """
    opened.check_all()
    _check_indexed(opened)
    # dataset.yaml names a sample class of another package, so `cook_pack` reads the parts.
    first = opened.splits[0]
    is_crude = first.path == as_path(path) and first.manifest is not None and first.manifest.dataset_module is not None
    dataset_config = CRUDE if is_crude else None
    if not config.trust_sample_loader:
        check_trusted(path, dataset_config=dataset_config)
    common: dict[str, Any] = {
        "split_part": config.split,
        # Energon repeats the same order in every epoch, so each epoch has a seed.
        "worker_config": replace(worker_config, seed_offset=config.seed + _SEEDS_PER_EPOCH * epoch),
        "batch_size": config.micro_batch_size,
        "batch_drop_last": config.epoch_end == "drop",
        "packing_buffer_size": config.packing_buffer_size,
        "task_encoder": task_encoder,
    }
    if dataset_config is not None:
        common["dataset_config"] = dataset_config
    try:
        with raise_with_file_name(path, config.split, opened):
            dataset = _dataset(path, config, common, one_pass=task_encoder.one_pass)
            read_whole_packs(dataset, opened)
            return dataset
    except ImportError as error:
        raise ConfigError(
            f"{path}: {error}. A dataset.yaml names that package: install it, run energon-packed nv-meta on "
            "the folder, or set `dataset_config: crude.yaml` in the Metadataset."
        ) from error


def _dataset(
    path: str | Path, config: PackedLoaderOptions, common: dict[str, Any], *, one_pass: bool
) -> "SavableDataset[PackedBatch]":
    url = energon_url(as_path(path))
    if not config.shuffle:
        return get_val_dataset(url, **common)
    try:
        return get_train_dataset(
            url,
            **common,
            shuffle_buffer_size=None if one_pass else config.shuffle_buffer_size,
            max_samples_per_sequence=None,
            repeat=not config.one_pass,
        )
    except AssertionError as error:  # Energon's check of a blend by weight without repetition
        if not config.one_pass or "weights" not in str(error):
            raise
        choice = "Remove `complete_epochs`" if config.complete_epochs else "Use `epochs=None`"
        raise ConfigError(
            f"{path} draws by weight indefinitely, so it has no epoch. {choice}, or create the blend with "
            "energon-packed metadataset --epochized (`shuffle=False` reads each input once)."
        ) from error


def _check_indexed(opened: OpenedSplits) -> None:
    folders = [split.path for split in opened.splits]
    for folder, is_indexed in zip(folders, map_paths(_is_indexed, folders), strict=True):
        if not is_indexed:
            raise FormatError(
                f"{folder} is not indexed: {NV_META} has no .info.json; run energon-packed nv-meta on it"
            )


def _is_indexed(folder: Path) -> bool:
    return any((folder / NV_META / name).is_file() for name in (INFO, OLD_INFO))
