"""Folders and Hugging Face Hub names in; the list of their data files out.

    folder of data files   .tar, .parquet, .arrow, .jsonl ..., sorted, of a single format, subfolders included
    imagefolder            its metadata.jsonl or metadata.csv, not the images
    org/name               the dataset in the caches of `datasets` and `huggingface_hub`; nothing is downloaded

If file or folder names contain train, validation or test, a single split is read.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from energon_packed.errors import SourceError

_log = logging.getLogger(__name__)
_METADATA = ("metadata.jsonl", "metadata.csv")
_FORMATS = {
    ".tar": (".tar", ".tar.gz", ".tgz"),
    ".parquet": (".parquet",),
    ".arrow": (".arrow", ".feather"),
    ".jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst", ".json.gz", ".json.zst"),
    ".csv": (".csv", ".tsv"),
}
_LAST_RESORT = (".json",)  # beside other data files, it describes them
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "config.json")
_MAY_BE_DATA = re.compile(r"\.(jsonl?|ndjson|csv|tsv)(\.\w+)?$", re.IGNORECASE)
_SPLIT = re.compile(r"(?:^|[-_./])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_./\d]|$)")
_SAME = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation", "testing": "test"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def folder_files(folder: Path, split: str | None) -> list[Path]:
    """List the data files of a folder, sorted.

    Raises:
        SourceError: the folder has no data files, several formats, or several splits and `split` is None.
    """
    names = _names(folder)
    metadata = [name for name in names if name.rpartition("/")[2] in _METADATA]
    others = [name for name in names if name not in metadata]
    by_format = {kind: [n for n in others if n.lower().endswith(ends)] for kind, ends in _FORMATS.items()}
    by_format = {kind: files for kind, files in by_format.items() if files}
    if metadata and by_format:
        raise SourceError(
            f"{folder} contains {metadata[0]}, which describes images, and {' and '.join(by_format)} files. "
            "Pass either of them."
        )
    if metadata:
        return _in_split(folder, metadata, split)
    if len(by_format) > 1:
        raise SourceError(
            f"{folder} contains {' and '.join(by_format)} files. Pass the files of a single format, or a glob."
        )
    # .json files count only without other data files: beside them they are metadata.
    files = next(iter(by_format.values()), None) or [
        n for n in names if n.lower().endswith(_LAST_RESORT) and n.rpartition("/")[2] not in _NOT_DATA
    ]
    if not files:
        raise SourceError(
            f"{folder} is a folder without a Hugging Face state.json, an Energon .nv-meta, or files of "
            f"{', '.join(_FORMATS)}; pass files or a glob"
        )
    read = set(files)
    _warn_of_others(folder, [name for name in others if name not in read])
    return _in_split(folder, files, split)


def _warn_of_others(folder: Path, names: Sequence[str]) -> None:
    """Warn about skipped files that may contain records."""
    left = [name for name in names if _MAY_BE_DATA.search(name) and name.rpartition("/")[2] not in _NOT_DATA]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        _log.warning("%s: %s%s not read; pass data files of several formats by name", folder, left[0], more)


def hub_folder(name: str) -> Path | None:
    """Find a Hugging Face Hub dataset in the caches of this machine; None if `name` is not of the form org/name.

    Raises:
        SourceError: the dataset is not in a cache, or has several configurations.
    """
    if not _HUB_NAME.fullmatch(name):
        return None
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")).expanduser()
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")) / name.replace("/", "___")
    configs = sorted({info.parent.parent.parent for info in prepared.glob("*/*/*/dataset_info.json")})
    if len(configs) > 1:
        raise SourceError(
            f"{name} has the configurations {', '.join(config.name for config in configs)}. Pass the folder of "
            f"a single configuration, such as {configs[0]}."
        )
    if configs:
        return max(configs[0].glob("*/*/dataset_info.json"), key=os.path.getmtime).parent
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"datasets--{name.replace('/', '--')}"
    # The newest snapshot is what `hf download` fetched last.
    if snapshots := sorted((hub / "snapshots").glob("*"), key=os.path.getmtime):
        return snapshots[-1]
    raise SourceError(
        f"{name}: no such file, and no dataset of that name in the Hugging Face caches. Download it with "
        f"hf download --repo-type dataset {name}"
    )


def _names(folder: Path) -> list[str]:
    """List the files below a folder, by relative path, without hidden files and the caches of `datasets.map`."""
    names = []
    for parent, folders, files in os.walk(folder):
        # In place: os.walk then skips the removed folders.
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        base = os.path.relpath(parent, folder)
        for name in files:
            if not name.startswith((".", "cache-", "tmp")):
                names.append(name if base == "." else f"{base}/{name}")
    return sorted(names)


def _in_split(folder: Path, names: Sequence[str], split: str | None) -> list[Path]:
    """Select the files of a split, if file names contain splits."""
    splits = {name: _split_of(name) for name in names}
    there = sorted({name_split for name_split in splits.values() if name_split is not None})
    if split is None:
        if len(there) > 1:
            raise SourceError(f"{folder} has the splits {', '.join(there)}; set `source_split` to one of them")
        return [folder / name for name in names]
    # Reading all files instead could mix validation data into training.
    if not there:
        raise SourceError(
            f"{folder} has no splits: no file name contains train, validation or test. Remove `source_split`."
        )
    wanted = _SAME.get(split, split)
    if wanted not in there:
        raise SourceError(f"{folder} has no split {split!r}; set `source_split` to one of: {', '.join(there)}")
    return [folder / name for name in names if splits[name] == wanted]


def _split_of(name: str) -> str | None:
    match = _SPLIT.search(name.lower())
    return _SAME.get(match[1], match[1]) if match else None
