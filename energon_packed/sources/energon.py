"""Energon datasets and Metadatasets in; the tars of a split, or the member datasets, out."""

import logging
from pathlib import Path
from typing import ClassVar

from energon_packed.errors import ConfigError, EnergonPackedError, SourceError
from energon_packed.metadatasets import NV_META, SPLIT_FILE, prepared_folder, read_metadataset
from energon_packed.sources.energon_layout import DATASET_FILE, split_of
from energon_packed.sources.folder_entries import walk
from energon_packed.sources.webdataset import WebDatasetSource

DEFAULT_SPLIT = "train"
_LOG = logging.getLogger(__name__)


class EnergonSource(WebDatasetSource):
    """A tar of an Energon dataset; the split is train by default."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    has_splits: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether the folder, or its `webdataset` folder, contains `.nv-meta`."""
        return prepared_folder(path) is not None

    @classmethod
    def files(cls, path: Path, split: str | None = None) -> list[Path]:
        """List the tars of the split, in order, without the tars that split.yaml excludes."""
        # `matches` has found it.
        folder = prepared_folder(path)
        assert folder is not None
        if not (folder / NV_META / SPLIT_FILE).is_file():
            if split is not None:
                raise SourceError(f"{folder} has no {NV_META}/split.yaml, so no split {split!r}. Run energon prepare.")
            return _present(sorted(folder / name for name, _ in walk(folder) if name.endswith(".tar")), folder)
        try:
            names = split_of(folder).required(split or DEFAULT_SPLIT, "source_split")
        except ConfigError as error:
            raise SourceError(str(error)) from error
        return _present([folder / name for name in names], folder)

    @classmethod
    def unlisted(cls, path: Path) -> list[str]:
        """Names of the tars that split.yaml neither lists nor excludes, such as tars that were added later."""
        folder = prepared_folder(path)
        if folder is None or not (folder / NV_META / SPLIT_FILE).is_file():
            return []
        split = split_of(folder)
        known = {folder / name for names in (split.excluded, *split.parts.values()) for name in names}
        tars = (tar for tar in sorted(folder.glob("**/*.tar")) if not tar.name.startswith("."))
        return [tar.relative_to(path).as_posix() for tar in tars if tar not in known]


def metadataset_members(path: Path, split: str | None) -> list[tuple[Path, str]]:
    """List (folder or file, split) of each dataset of a Metadataset, in order; nested Metadatasets are expanded.

    Args:
        path: the YAML file.
        split: split of the Metadataset; None for train.

    Raises:
        SourceError: the errors of `Metadataset.leaves`, or the file uses `dataset_config`.
    """
    try:
        leaves = read_metadataset(path).leaves(split or DEFAULT_SPLIT)
    except EnergonPackedError as error:
        remedy = f". Pass a list of datasets as --config {path}." if "unknown key 'datasets'" in str(error) else ""
        raise SourceError(f"{error}{remedy}") from error
    # Ignoring it would read the dataset by other rules than Energon.
    for leaf in leaves:
        if leaf.dataset_config not in (None, DATASET_FILE):
            raise SourceError(
                f"{path} sets 'dataset_config' of {leaf.path}, which selects code or fields of Energon. Pass "
                "its datasets as separate inputs."
            )
    _LOG.warning("%s: the weights and repetitions of its datasets are ignored; each sample is packed once", path)
    return [(leaf.path, leaf.split_part) for leaf in leaves]


def _present(tars: list[Path], folder: Path) -> list[Path]:
    if missing := [tar for tar in tars if not tar.is_file()]:
        raise SourceError(
            f"{missing[0]}, one of {len(missing)} missing shards of {folder / NV_META / SPLIT_FILE}, does not exist; "
            "copy the complete folder, or exclude them there"
        )
    if not tars:
        raise SourceError(f"{folder} has no .tar file")
    return tars
