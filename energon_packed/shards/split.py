"""Which shards are in a split: `.nv-meta/split.yaml`, as energon-packed or `energon prepare` wrote it."""

from pathlib import Path

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards.nv_meta import NV_META


def dataset_folder(path: str | Path) -> Path:
    """The folder with `.nv-meta`: `path` itself, or `path/webdataset`.

    Raises:
        FormatError: neither has one.
    """
    root = Path(path)
    if root.is_file():
        raise FormatError(
            f"{root} is a file, and one data set folder is needed here (get_packed_loader, inspect and report take a "
            "Metadataset)"
        )
    for folder in (root, root / "webdataset"):
        if (folder / NV_META).is_dir():
            return folder
    if not root.exists():
        raise FormatError(f"{root} does not exist; give a folder that energon-packed wrote")
    raise FormatError(f"{root} has no {NV_META} folder; was the build finished?")


def shard_names(folder: Path, *, with_excluded: bool = False) -> dict[str, list[str]]:
    """Shard names of each split, in order; names in `exclude` are left out, brace ranges are expanded.

    Raises:
        FormatError: split.yaml is missing or broken.
    """
    from braceexpand import braceexpand

    file = folder / NV_META / "split.yaml"
    try:
        value = yaml.safe_load(file.read_bytes())
        parts = {str(name): list(patterns or []) for name, patterns in value["split_parts"].items()}
        excluded = {name for pattern in value.get("exclude") or [] for name in braceexpand(str(pattern))}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{file} is no split file: {type(error).__name__} {error}") from error
    return {
        split: [
            name for pattern in patterns for name in braceexpand(str(pattern)) if with_excluded or name not in excluded
        ]
        for split, patterns in parts.items()
    }


def excluded_names(folder: Path) -> list[str]:
    """`exclude` of split.yaml: names of shards, and `SHARD/KEY` for single packs."""
    try:
        return [str(name) for name in yaml.safe_load((folder / NV_META / "split.yaml").read_bytes())["exclude"] or []]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return []


def shards_in_split(folder: Path, split: str) -> list[Path]:
    """Tars of one split.

    Raises:
        ConfigError: the split is unknown or empty; the message names those that are not.
    """
    names = shard_names(folder)
    if single := [name for name in excluded_names(folder) if "/" in name]:
        raise ConfigError(
            f"split.yaml of {folder} excludes single packs, such as {single[0]}, which only Energon's own loader "
            "leaves out; use get_packed_loader, or take them out of the tar"
        )
    if not names.get(split):
        there = ", ".join(name for name, shards in names.items() if shards) or "none"
        raise ConfigError(f"{folder} has no shard in split {split!r}; it has {there}")
    return [folder / name for name in names[split]]
