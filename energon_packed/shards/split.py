"""The folder of a dataset of packs, and the tars of one of its splits."""

from pathlib import Path

from energon_packed.errors import ConfigError, FormatError
from energon_packed.foreign import check_regular_files
from energon_packed.metadatasets import NV_META, prepared_folder, read_split


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
    if folder := prepared_folder(root):
        check_regular_files(folder)
        check_regular_files(folder / NV_META)
        return folder
    if not root.exists():
        raise FormatError(f"{root} does not exist; pass a folder written by energon-packed")
    raise FormatError(f"{root} has no {NV_META} folder; check that the build completed")


def shards_in_split(folder: Path, split: str) -> list[Path]:
    """Tar files of one split.

    Raises:
        ConfigError: the split is unknown or empty (the message lists the others), or single packs are excluded.
    """
    found = read_split(folder)
    if single := found.excluded_packs:
        raise ConfigError(
            f"split.yaml of {folder} excludes single packs, such as {single[0]}, which only Energon's own loader "
            "supports; use get_packed_loader, or remove them from the tar"
        )
    return [folder / name for name in found.required(split)]
