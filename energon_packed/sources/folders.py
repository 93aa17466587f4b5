"""Folders and Hugging Face Hub names in; the list of their data files, and of the entries that are not read, out.

    folder of data files   .tar, .parquet, .arrow, .jsonl ..., sorted, of a single format, subfolders included
    imagefolder            its metadata.jsonl, .csv or .parquet, not the media files
    media with captions    the folders with them, if there are no data files
    org/name               the dataset in the caches of `datasets` and `huggingface_hub`; nothing is downloaded

If file or folder names contain train, validation or test, a single split is read.

Every entry is read, or reported with the reason why not. One rule decides which entries stop the run: those that may
contain records and cannot be read, which are compressed and archived data, folders that cannot be listed, and links
that cannot be followed.
"""

import logging
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from energon_packed.errors import SourceError
from energon_packed.files import irregular_kind, visible
from energon_packed.sources.folder_entries import (
    CAPTION_FILES,
    CAPTIONED_FILES,
    EXPECTED_KINDS,
    conversion_command,
    ignored_kind,
    walk,
)
from energon_packed.sources.json import COMPRESSIONS
from energon_packed.storage import is_remote

_log = logging.getLogger(__name__)
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_FORMATS = {
    ".tar": (".tar",),
    ".parquet": (".parquet",),
    ".arrow": (".arrow", ".feather"),
    ".jsonl": (
        *(".jsonl", ".ndjson"),
        *(f"{kind}{compression}" for kind in (".jsonl", ".ndjson", ".json") for compression in COMPRESSIONS),
    ),
    ".csv": (".csv", ".tsv"),
    ".trans.txt": (".trans.txt",),  # LibriSpeech
    "wav.scp": ("wav.scp",),  # Kaldi
}
_KALDI = "wav.scp"
_OF_KALDI = ("text", "segments", "utt2spk", "spk2utt", "utt2dur", "reco2dur", "spk2gender", "utt2num_frames")
_LAST_RESORT = ".json"  # beside other data files, it describes them
_DATA = (*(end for ends in _FORMATS.values() for end in ends), _LAST_RESORT)
_MEDIA, _UNKNOWN = "media", "unknown type"
_OTHER_SPLIT = "of another split"
_MOST_SHOWN = 3  # names in a message
Skipped = dict[str, list[str]]
"""Names of the entries that are not read, by reason."""
_SPLIT = re.compile(r"(?:^|[-_./])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_./\d]|$)")
_SAME = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation", "testing": "test"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_data(name: str) -> bool:
    """Whether a file of this name is read, if it is in an input folder."""
    return name.lower().endswith(_DATA)


def folder_files(folder: Path, split: str | None) -> tuple[list[Path], Skipped]:
    """List the data files of a folder, sorted, and its other entries; the others are logged in one line.

    Raises:
        SourceError: the folder has no data files, several formats, an entry that may contain records and cannot be
            read, or several splits and `split` is None.
    """
    skipped: Skipped = defaultdict(list)
    names: list[str] = []
    unreadable: dict[str, str] = {}
    for name, mode in sorted(walk(folder)):
        base = name.rpartition("/")[2]
        has_data = is_data(base)
        irregular = None if has_data else irregular_kind(mode)
        if kind := irregular or ignored_kind(base, is_data=has_data):
            skipped[kind].append(name)
        elif has_data:
            names.append(name)
        elif (command := conversion_command(base)) is None:
            skipped[_UNKNOWN].append(name)
        # Archives of other splits contain no records of this split.
        elif split is not None and _split_of(name) not in (None, _SAME.get(split, split)):
            skipped[_OTHER_SPLIT].append(name)
        else:
            unreadable[name] = command
    _refuse_unreadable(folder, unreadable)
    _remove_kaldi(names, skipped)
    captioned = {} if names or is_remote(folder) else _captioned(skipped)
    files = _in_split(folder, sorted(captioned) or _data_files(folder, names, skipped), split, skipped)
    if captioned:
        files = sorted({file.parent for file in files})
        _remove_captioned({str(file.relative_to(folder)).removeprefix(".") for file in files}, captioned, skipped)
    log_skipped(folder, skipped)
    return files, skipped


def _remove_kaldi(names: Sequence[str], skipped: Skipped) -> None:
    """Remove the files beside a wav.scp, which are read with it or describe the speakers."""
    folders = {os.path.dirname(name) for name in names if os.path.basename(name) == _KALDI}
    others = {os.path.join(folder, name) for folder in folders for name in _OF_KALDI}
    if folders and _UNKNOWN in skipped:
        skipped[_UNKNOWN] = [name for name in skipped[_UNKNOWN] if name not in others]
        if not skipped[_UNKNOWN]:
            del skipped[_UNKNOWN]


def _captioned(skipped: Skipped) -> dict[str, list[str]]:
    """Find media files with captions of the same name among the entries: name of the file -> its captions."""
    texts: dict[str, list[str]] = defaultdict(list)
    for stem, name in _stems(skipped, _UNKNOWN, CAPTION_FILES):
        texts[stem].append(name)
    return {name: texts[stem] for stem, name in _stems(skipped, _MEDIA, CAPTIONED_FILES) if stem in texts}


def _stems(skipped: Skipped, reason: str, suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(os.path.splitext(name)[0], name) for name in skipped.get(reason, ()) if name.lower().endswith(suffixes)]


def _remove_captioned(folders: set[str], captioned: Mapping[str, list[str]], skipped: Skipped) -> None:
    """Remove captions, and the media files of their folders, from the entries that are not read."""
    entries = [*_stems(skipped, _MEDIA, CAPTIONED_FILES), *_stems(skipped, _UNKNOWN, CAPTION_FILES)]
    inside = {name for _, name in entries if os.path.dirname(name) in folders}
    read = {*captioned, *inside, *(text for texts in captioned.values() for text in texts)}
    for reason in (_MEDIA, _UNKNOWN):
        skipped[reason] = [name for name in skipped[reason] if name not in read]
        if not skipped[reason]:
            del skipped[reason]


def _data_files(folder: Path, names: Sequence[str], skipped: Skipped) -> Sequence[str]:
    """Select the files of the single format of a folder, or the metadata of its images."""
    metadata = [name for name in names if name.rpartition("/")[2] in _METADATA]
    others = [name for name in names if name not in metadata]
    by_format = {kind: [n for n in others if n.lower().endswith(ends)] for kind, ends in _FORMATS.items()}
    by_format = {kind: files for kind, files in by_format.items() if files}
    if metadata and by_format:
        raise SourceError(
            f"{folder} contains {metadata[0]}, which describes media files, and {' and '.join(by_format)} files. "
            "Pass either of them."
        )
    if len(by_format) > 1:
        raise SourceError(
            f"{folder} contains {' and '.join(by_format)} files. Pass the files of a single format, or a glob."
        )
    if not names:
        raise SourceError(
            f"{folder} is a folder without a Hugging Face state.json, an Energon .nv-meta, or files of "
            f"{', '.join(_FORMATS)}, or media files with captions of the same name in .txt files; pass files or a glob"
        )
    # .json files count only without other data files: beside them they are metadata.
    files: Sequence[str] = metadata or next(iter(by_format.values()), [*names])
    if beside := sorted({*names}.difference(files)):
        skipped["JSON beside data files"] = beside
    return files


def _refuse_unreadable(folder: Path, commands: Mapping[str, str]) -> None:
    """Refuse entries that may contain records, by their names, with the command that converts each."""
    if commands:
        lines = [f"{_shown(name)} ({command} {_shown(shlex.quote(name))})" for name, command in commands.items()]
        raise SourceError(
            f"{folder} contains compressed or archived files that are not read: {_shortened(lines)}. Run the command "
            "and remove the original, or pass the data files by name."
        )


def log_skipped(folder: Path, skipped: Mapping[str, Sequence[str]]) -> None:
    """Log the entries that are not read: a warning if some of them may contain records."""
    if not skipped:
        return
    reasons = "; ".join(f"{reason} ({_shortened([*map(_shown, names)])})" for reason, names in skipped.items())
    if skipped.keys() <= {*EXPECTED_KINDS, _OTHER_SPLIT}:
        _log.info("%s: entries not read as input: %s", folder, reasons)
    else:
        _log.warning("%s: entries not read as input: %s. Pass data files among them by name", folder, reasons)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN:,} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _shown(name: str) -> str:
    return visible(name, keep="")


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


def _in_split(folder: Path, names: Sequence[str], split: str | None, skipped: Skipped) -> list[Path]:
    """Select the files of a split, if file names contain splits; add the other files to `skipped`."""
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
    for name, name_split in splits.items():
        if name_split != wanted:
            skipped[_OTHER_SPLIT if name_split else "name without a split"].append(name)
    return [folder / name for name in names if splits[name] == wanted]


def _split_of(name: str) -> str | None:
    match = _SPLIT.search(name.lower())
    return _SAME.get(match[1], match[1]) if match else None
