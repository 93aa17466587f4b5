"""Energon datasets: the tars of one split of a folder with `.nv-meta`, and the members of a Metadataset YAML."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from energon_packed.errors import SourceError
from energon_packed.foreign import read_yaml
from energon_packed.sources.energon_layout import NV_META, read_split
from energon_packed.sources.webdataset import WebDatasetSource

DEFAULT_SPLIT = "train"
_LOG = logging.getLogger(__name__)
_BLENDS = ("blend", "blend_epochized", "datasets")
_REFUSED = ("subset", "dataset_config", "split_config", "join")
_DEEPEST = 16  # Metadatasets inside Metadatasets


class EnergonSource(WebDatasetSource):
    """One tar of an Energon dataset; `split` names which of its splits is read, train by default."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    has_splits: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Folders with `.nv-meta`, in them or in their `webdataset` folder."""
        return _dataset(path) is not None

    @classmethod
    def files(cls, path: Path, split: str | None = None) -> list[Path]:
        """The tars of the split, in order, without those that split.yaml excludes."""
        folder = _dataset(path)
        assert folder is not None
        splits, excluded = read_split(folder)
        if not splits:
            if split is not None:
                raise SourceError(f"{folder} has no {NV_META}/split.yaml, so no split {split!r}; run energon prepare")
            return _present(sorted(folder.glob("**/*.tar")), folder)
        names = [name for name in splits.get(split or DEFAULT_SPLIT, []) if name not in excluded]
        if not names:
            there = ", ".join(name for name, shards in splits.items() if shards) or "none"
            raise SourceError(
                f"{folder} has no shards in split {split or DEFAULT_SPLIT!r}; set `source_split` to one of: {there}"
            )
        return _present([folder / name for name in names], folder)


def metadataset_members(path: Path, split: str | None, depth: int = 0) -> Iterator[tuple[Path, str]]:
    """(folder or file, split) of each dataset of a Metadataset, in order, nested ones in their place.

    Args:
        path: the YAML file.
        split: of the Metadataset; None for train.
        depth: of `path` inside other Metadatasets.

    Raises:
        SourceError: the file is no Metadataset, has no such split, or uses what cannot be followed.
    """
    wanted = split or DEFAULT_SPLIT
    try:
        value = read_yaml(path)
        splits = value["splits"]
        part = splits.get(wanted)
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} is not a Metadataset: {type(error).__name__} {error}") from error
    if part is None:
        raise SourceError(f"{path} has no split {wanted!r}; set `source_split` to one of: {', '.join(splits)}")
    if depth > _DEEPEST:
        raise SourceError(f"{path} contains itself")
    _LOG.warning("%s: the weights and repetitions of its datasets are ignored; each sample is packed once", path)
    for reference in _references(path, part):
        member = path.parent / str(reference["path"])
        split_part = str(reference.get("split_part") or wanted)
        if is_metadataset(member):
            yield from metadataset_members(member, split_part, depth + 1)
        else:
            yield member, split_part


def is_metadataset(path: Path) -> bool:
    """Whether a file is a YAML file, as a Metadataset is."""
    return path.suffix.lower() in (".yaml", ".yml") and path.is_file()


def _references(path: Path, value: Any) -> Iterator[dict[str, Any]]:
    """The dataset references of a split: one, or those of a blend."""
    if not isinstance(value, dict):
        raise SourceError(f"{path} is not a Metadataset: a dataset is {type(value).__name__}, not an object")
    if used := [name for name in _REFUSED if value.get(name) is not None]:
        raise SourceError(f"{path} uses {used[0]}, which cannot be followed; pass its datasets one by one")
    inner = next((value[name] for name in _BLENDS if value.get(name)), None)
    if inner is not None:
        for item in inner:
            yield from _references(path, item)
    elif value.get("path"):
        yield value
    else:
        raise SourceError(f"{path} has a dataset without a path")


def _dataset(path: Path) -> Path | None:
    return next((folder for folder in (path, path / "webdataset") if (folder / NV_META).is_dir()), None)


def _present(tars: list[Path], folder: Path) -> list[Path]:
    if missing := [tar for tar in tars if not tar.is_file()]:
        raise SourceError(
            f"{missing[0]} is missing, and {len(missing) - 1} other shards of {folder / NV_META / 'split.yaml'}; copy "
            "the complete folder, or exclude them there"
            if len(missing) > 1
            else f"{missing[0]} of {folder / NV_META / 'split.yaml'} is missing; copy it, or exclude it there"
        )
    if not tars:
        raise SourceError(f"{folder} has no .tar file")
    return tars
