"""Shards of each split, from `.nv-meta/split.yaml` as written by energon-packed, `energon prepare` (`split_parts`) or
LLaVA-OneVision-2's packer (`split`)."""

from pathlib import Path

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.foreign import check_regular_files, inner_names, read_yaml
from energon_packed.shards.nv_meta import NV_META


def dataset_folder(path: str | Path) -> Path:
    """Folder that contains `.nv-meta`: `path` or `path/webdataset`.

    Raises:
        FormatError: neither folder contains it, or one of its files is a FIFO or device, which would be waited for.
    """
    root = Path(path)
    if root.is_file():
        raise FormatError(
            f"{root} is a file; pass a single dataset folder (get_packed_loader, PackedDataset, inspect, "
            "verify and report accept a Metadataset)"
        )
    for folder in (root, root / "webdataset"):
        if (folder / NV_META).is_dir():
            check_regular_files(folder)
            check_regular_files(folder / NV_META)
            return folder
    if not root.exists():
        raise FormatError(f"{root} does not exist; pass a folder written by energon-packed")
    raise FormatError(f"{root} has no {NV_META} folder; check that the build completed")


def shard_names(folder: Path, *, with_excluded: bool = False) -> dict[str, list[str]]:
    """Shard names of each split, in order, with brace ranges expanded and `exclude` applied.

    Raises:
        FormatError: split.yaml is missing or invalid, or names a file outside of the folder.
    """
    file = folder / NV_META / "split.yaml"
    try:
        value = read_yaml(file)
        listed = value["split_parts"] if "split_parts" in value else value["split"]
        parts = {str(name): inner_names(patterns or []) for name, patterns in listed.items()}
        excluded = set(inner_names(value.get("exclude") or []))
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{file} is not a valid split file: {type(error).__name__} {error}") from error
    return {split: [name for name in names if with_excluded or name not in excluded] for split, names in parts.items()}


def excluded_names(folder: Path) -> list[str]:
    """`exclude` of split.yaml: shard names, and `SHARD/KEY` for single packs."""
    try:
        return [str(name) for name in read_yaml(folder / NV_META / "split.yaml")["exclude"] or []]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return []


def shards_in_split(folder: Path, split: str) -> list[Path]:
    """Tar files of one split.

    Raises:
        ConfigError: the split is unknown or empty (the message lists the others), or single packs are excluded.
    """
    names = shard_names(folder)
    if single := [name for name in excluded_names(folder) if "/" in name]:
        raise ConfigError(
            f"split.yaml of {folder} excludes single packs, such as {single[0]}, which only Energon's own loader "
            "supports; use get_packed_loader, or remove them from the tar"
        )
    if not names.get(split):
        there = ", ".join(name for name, shards in names.items() if shards) or "none"
        raise ConfigError(f"{folder} has no shards in split {split!r}; available: {there}")
    return [folder / name for name in names[split]]
