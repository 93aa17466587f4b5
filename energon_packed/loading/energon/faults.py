"""Errors of Energon to errors that name the damaged file, or the pack.

Energon does not validate its files, and fails with the first error that the damage causes: `ReadError: bad checksum`,
`issubclass() arg 1 must be a class`. Only after such an error, `raise_with_file_name` checks the files one by one.

| function | error |
|---|---|
| raise_with_file_name | of creating or reading a dataset |
| own_error | of this package, which Energon wrapped |
| key_and_sources, raise_with_location | of a single pack, in Energon's `global_error_handler` |
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.dataset_config import get_dataset_from_config
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta, get_info_shard_files
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData

from energon_packed.errors import DataChangedError, EnergonPackedError, FormatError, ResourceError
from energon_packed.flavors.base import FatalDataChangedError, FatalResourceError
from energon_packed.loading.datasets.manifests import LoadedSplit, OpenedSplits, loaded_splits
from energon_packed.loading.process import PackAt
from energon_packed.loading.sample_errors import add_location
from energon_packed.metadatasets import NV_META
from energon_packed.shards.nv_meta import shards_in_split
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.scan import scan_tar
from energon_packed.storage import as_path, energon_url
from energon_packed.system import raise_resource_error


@contextmanager
def raise_with_file_name(path: str | Path, split: str, opened: OpenedSplits | None = None) -> Iterator[None]:
    """Turn an error of Energon into an error that names the damaged file, if a file is damaged.

    Args:
        path: dataset folder, or Metadataset.
        split: `train`, `val` or `test`.
        opened: the tars as they were when the loader was created.

    Raises:
        FormatError: a file is damaged; the message names it and the remedy.
        DataChangedError: a file was replaced, changed or removed.
    """
    try:
        yield
    except ImportError:  # a package that is not installed: the file is intact
        raise
    except Exception as error:
        if known := own_error(error):
            raise known from error
        if isinstance(error, EnergonPackedError):
            raise
        raise_resource_error(error, getattr(error, "filename", None) or path)  # no file is damaged
        if opened is not None:
            opened.check_all()
        if fault := _fault(as_path(path), split):
            raise FormatError(f"{fault} ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error
        raise


def own_error(error: BaseException) -> EnergonPackedError | None:
    """Return the error of this package that stopped Energon, which raises a long FatalSampleError in its place."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FatalDataChangedError):
            return DataChangedError(str(cause))
        if isinstance(cause, FatalResourceError):
            return ResourceError(str(cause))
        cause = cause.__cause__ or cause.__context__
    return None


def key_and_sources(sample: Any, sources: Any = None) -> tuple[Any, Any]:
    """Return `__key__` and `__sources__` of a sample in any form that Energon passes to its error handlers."""
    while isinstance(sample, RawSampleData | list | tuple) and sample:
        sample = sample.data if isinstance(sample, RawSampleData) else sample[0]
    if isinstance(sample, dict):
        return sample.get("__key__"), sources or sample.get("__sources__")
    return sample.__key__, sources or sample.__sources__


def raise_with_location(error: Exception, sample: Any, sources: Any = None) -> None:
    """Raise the error of a sample, with its location: the `global_error_handler` if no failure is skipped.

    Raises:
        Exception: the error.
    """
    raise add_location(error, PackAt.of(*key_and_sources(sample, sources))) from error


def _fault(path: Path, split: str) -> str | None:
    """Return the damaged file and the remedy; None if all files are intact."""
    try:
        splits = loaded_splits(path, split)
    except EnergonPackedError as error:
        return str(error)
    return next((fault for part in splits if (fault := _fault_in(part))), None)


def _fault_in(part: LoadedSplit) -> str | None:
    folder, split = part.path, part.split
    try:
        shards = shards_in_split(part.listed, split)
        ShardReader(shards)
    except EnergonPackedError as error:
        return str(error)
    # By Energon's own functions, which accept less than all JSON and YAML. The last function reads all three files.
    path, alone = EPath(energon_url(folder)), WorkerConfig(rank=0, world_size=1, num_workers=0)
    reads: dict[str, Callable[[], object]] = {
        ".info.json": lambda: get_info_shard_files(path),
        "split.yaml": lambda: WebdatasetMeta.from_config(path, split_part=split),
        "dataset.yaml": lambda: get_dataset_from_config(path, split_part=split, worker_config=alone),
    }
    for name, read in reads.items():
        try:
            read()
        except Exception as error:  # a damaged file can raise any exception
            return (
                f"Energon cannot read {folder / NV_META / name}, or a file or class that it names: "
                f"{type(error).__name__} {' '.join(str(error).split())[:200]}; run energon-packed nv-meta {folder}, "
                "or copy the file again"
            )
    for tar in shards:
        try:
            expected = np.array(scan_tar(tar).rows().offsets, dtype="<u8").tobytes()
        except (EnergonPackedError, OSError) as error:
            return f"{error}; energon-packed verify {folder} lists all damage: copy or pack the shard again"
        index = tar.with_suffix(".tar.idx")
        if index.read_bytes() != expected:
            return f"{index} does not match {tar.name}; run energon-packed nv-meta {folder}"
    return None
