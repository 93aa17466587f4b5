"""The `.nv-meta` folder, which makes a folder of tars an Energon dataset.

dataset_folder, shards_in_split   path of a dataset to its shard folder and the tars of a split
write_nv_meta                     codec, shards, index rows and splits to all files of `.nv-meta` but packing.json
loader_files                      codec to the three files by which Energon loads the packs
"""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import atomic_write, check_regular_files
from energon_packed.formats import Codec
from energon_packed.metadatasets import NV_META, SplitFile, prepared_folder
from energon_packed.shards import standalone_loader
from energon_packed.shards.index import write_sqlite_index
from energon_packed.shards.tar import ShardRows, ShardSummary
from energon_packed.storage import as_path

CRUDE = "crude.yaml"
INFO = ".info.json"
OLD_INFO = ".info.yaml"  # of Energon before version 7
SPLITS = ("train", "val", "test")  # the names that Energon knows
# Fixed, so that index.uuid depends on the hashes of the shards alone.
_NAMESPACE = uuid.UUID("1e7d7c39-6f6c-5b0c-8d6c-6f4f0d1a7a11")
HEADER = "# Written by energon-packed.\n"
_LOADER = {name: f"sample_loader.py:{name}" for name in ("part_filter", "sample_loader")}  # keys of dataset.yaml


def dataset_folder(path: str | Path) -> Path:
    """Return the folder that contains `.nv-meta`: `path` or `path/webdataset`.

    Raises:
        FormatError: neither folder contains it, or it contains a FIFO or device, which would block.
    """
    root = as_path(path)
    if folder := prepared_folder(root):
        check_regular_files(folder)  # here, since datasets are opened through this function
        check_regular_files(folder / NV_META)
        return folder
    if root.is_file():
        raise FormatError(
            f"{root} is a file; pass a single dataset folder (get_packed_loader, PackedDataset, inspect, "
            "verify and report accept a Metadataset)"
        )
    if not root.exists():
        raise FormatError(f"{root} does not exist; pass a folder written by energon-packed")
    output = root.parent if root.name == "webdataset" else root
    if (output / ".work").exists():
        raise FormatError(f"{root} has no dataset yet; run energon-packed pack with `output_dir` {output}")
    if folder := next((folder for folder in (root, root / "webdataset") if any(folder.glob("*.tar"))), None):
        raise FormatError(f"{folder} has tars, but no {NV_META} folder; run energon-packed nv-meta {folder}")
    raise FormatError(
        f"{root} must be a dataset folder, got a folder without {NV_META} and tars. Pass a folder that energon-packed "
        "pack wrote."
    )


def shards_in_split(splits: SplitFile, split: str) -> list[Path]:
    """Return the tar files of `split`.

    Raises:
        ConfigError: the split is unknown or empty (the message lists the others), or single packs are excluded.
    """
    folder = splits.file.parents[1]
    if excluded := splits.excluded_packs:
        raise ConfigError(
            f"split.yaml of {folder} excludes single packs, such as {excluded[0]}, which only Energon's own loader "
            "supports; use get_packed_loader, or remove them from the tar"
        )
    return [folder / name for name in splits.required(split)]


def write_nv_meta(
    folder: Path,
    *,
    codec: Codec | None,
    shards: Sequence[ShardSummary],
    rows: Iterable[ShardRows],
    splits: Mapping[str, list[str]],
    exclude: Sequence[str] = (),
    dataset_module: str | None = None,
    staging: Path | None = None,
) -> None:
    """Write all files of `.nv-meta` but packing.json.

    Args:
        folder: the folder of the tars.
        codec: codec of the flavor; None for a dataset of files that other datasets refer to.
        shards: finished shards, in order.
        rows: index rows of each shard, in the same order; one shard is in memory at a time.
        splits: shard names of `train`, `val` and `test`; all three are always written, as Energon's tools expect
            them.
        exclude: names of shards, and `SHARD/KEY` of packs, that Energon skips.
        dataset_module: package whose sample class dataset.yaml names; None for energon-packed.
        staging: local folder for temporary files, if `folder` is in an object store.
    """
    meta = folder / NV_META
    parts = {name: list(splits.get(name, [])) for name in SPLITS}
    split = {"split_parts": parts, "exclude": list(exclude)}
    info = info_file({shard.name: shard.packs for shard in shards})
    for name, content in loader_files(codec, dataset_module).items():
        atomic_write(meta / name, content)
    atomic_write(meta / "split.yaml", yaml.safe_dump(split, sort_keys=False).encode())
    atomic_write(meta / INFO, info)
    if (codec is not None and codec.layout) or dataset_module or (meta / OLD_INFO).is_file():
        atomic_write(meta / OLD_INFO, yaml.safe_dump(json.loads(info), sort_keys=False).encode())
    atomic_write(meta / "index.uuid", index_uuid(shards))
    write_sqlite_index(meta / "index.sqlite", rows, staging)


def split_ranges(count: int, split: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Compute the range of `count` packs or shards in each split, by rounding the running total of the shares."""
    # The running total, not each share: rounded shares need not add up to the total.
    ends = np.rint(np.cumsum(list(split.values())) * count).astype(int).tolist()
    ends[-1] = count  # the total of the shares may be 0.9999999
    return {name: (start, end) for name, start, end in zip(split, [0, *ends], ends, strict=False)}


def index_uuid(shards: Sequence[ShardSummary]) -> bytes:
    """Return the content of `index.uuid`, which depends on the content of the shards alone."""
    return str(uuid.uuid5(_NAMESPACE, "".join(shard.sha256 for shard in shards))).encode()


def loader_files(codec: Codec | None, dataset_module: str | None = None) -> dict[str, bytes]:
    """Return the content of `sample_loader.py`, `dataset.yaml` and `crude.yaml`, equal for all datasets of a flavor.

    Args:
        codec: codec of the flavor. None for a dataset of files, which has only a `dataset.yaml`.
        dataset_module: package of the sample class. `sample_loader.py` then imports nothing of energon-packed, and
            Energon decodes the parts for it. None for the dataclasses of energon-packed.
    """
    # For users who read the raw parts: Energon reads crude.yaml if a Metadataset names it as `dataset_config`.
    crude: dict[str, Any] = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    if codec is None:
        return {"dataset.yaml": yaml_file(crude)}
    crude["subflavors"] = {"sample_class": codec.sample_class}
    files = {CRUDE: yaml_file(crude)}
    if dataset_module is not None:
        sample_type = {"__module__": dataset_module, "__class__": codec.sample_class}
        return files | {
            "sample_loader.py": Path(standalone_loader.__file__).read_bytes(),
            "dataset.yaml": yaml_file({"sample_type": sample_type, **_LOADER}),
        }
    loader = "".join(f"from {codec.flavor_module} import {name} as {name}\n" for name in _LOADER)
    dataset = {
        "sample_type": {"__module__": "energon_packed.flavors", "__class__": codec.flavor_class},
        **_LOADER,
        # Parts reach the loader as bytes: Energon's default decoder would turn images into tensors.
        "decoder": None,
    }
    return files | {
        "sample_loader.py": (HEADER + loader).encode(),
        "dataset.yaml": yaml_file(dataset),
    }


def info_file(packs: Mapping[str, int]) -> bytes:
    """Return the content of `.info.json`, with the number of packs by shard name."""
    return json.dumps({"energon_version": _energon_version(), "shard_counts": dict(packs)}, indent=2).encode()


def yaml_file(value: dict[str, Any]) -> bytes:
    """Return a mapping as YAML."""
    return (HEADER + yaml.safe_dump(value, sort_keys=False)).encode()


def _energon_version() -> str:
    try:
        return version("megatron-energon")
    except PackageNotFoundError:
        return "unknown"
