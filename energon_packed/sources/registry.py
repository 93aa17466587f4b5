"""From what a user names (files, folders, globs) to Sources: the container classes, tried in order."""

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from energon_packed.errors import SourceError
from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source
from energon_packed.sources.csv import CsvSource
from energon_packed.sources.energon import EnergonSource, is_metadataset, metadataset_members
from energon_packed.sources.folders import folder_files, hub_folder
from energon_packed.sources.hugging_face import HuggingFaceSource
from energon_packed.sources.imagefolder import ImageFolderCsvSource, ImageFolderSource
from energon_packed.sources.json import JsonSource
from energon_packed.sources.jsonl import CompressedJsonlSource, JsonlSource
from energon_packed.sources.parquet import ParquetSource
from energon_packed.sources.webdataset import WebDatasetSource

SOURCES: list[type[Source]] = [
    ImageFolderSource,
    ImageFolderCsvSource,
    JsonlSource,
    CompressedJsonlSource,
    JsonSource,
    ParquetSource,
    ArrowSource,
    CsvSource,
    HuggingFaceSource,
    EnergonSource,
    WebDatasetSource,
]
_IMAGE_FOLDERS = (ImageFolderSource, ImageFolderCsvSource)  # their paths start from the folder of the metadata
_REMOTE = re.compile(r"(s3|gs|gcs|hf|https?|msc|az|abfss?):/", re.IGNORECASE)
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
Found = tuple[type[Source], Path, Path | None]
"""The class of a file, the file, and the folder that its relative media paths start from, if not its own."""


def register_source(source: type[Source]) -> type[Source]:
    """Add a container format of your own (a class decorator); it is tried before the built-in ones."""
    SOURCES.insert(0, source)
    return source


def known_formats() -> str:
    """Endings and folders that can be read, for messages."""
    suffixes = [suffix for source in SOURCES for suffix in source.suffixes]
    return (
        f"{' '.join(suffixes)}, folders of them, Hugging Face save_to_disk folders, Energon datasets and Metadatasets"
    )


def open_sources(
    inputs: Iterable[str | Path],
    *,
    work_dir: Path,
    image_root: Path | None = None,
    part: tuple[int, int] | None = None,
    split: str | None = None,
) -> list[Source]:
    """Sources for files, globs and folders, in the order given; the files of a glob or folder by name.

    Args:
        inputs: paths or glob patterns.
        work_dir: folder for converted copies of formats without random access.
        image_root: folder of relative media paths; by default the folder of each input.
        part: (I, N) opens the I-th of N parts of about the same number of bytes. The parts of one input have every
            record once.
        split: of Energon datasets (train by default) and of Hugging Face datasets with several splits.

    Raises:
        SourceError: nothing matches, a format is unknown, or a file is broken or named twice; a part is empty.
    """
    files = [found for given in inputs for found in _found(str(given), split)]
    seen: set[Path] = set()
    for _, file, _ in files:
        if (real := file.resolve()) in seen:
            raise SourceError(f"{file} is named twice; every record would be packed twice")
        seen.add(real)
    if not files:
        raise SourceError(f"no input file; pass one or more of {known_formats()}")
    if split is not None and not any(k.has_splits or k in _IMAGE_FOLDERS or folder for k, _, folder in files):
        raise SourceError(f"`source_split` is {split!r}, but no input has splits; leave it out, or name a folder")
    sources = []
    for (kind, file, folder), share in zip(files, _shares([file for _, file, _ in files], part), strict=True):
        if share is not None:
            root = image_root if image_root is not None else folder
            source = kind.open(file, work_dir=work_dir / "converted", image_root=root)
            source.share = share
            sources.append(source)
    if not sources:
        raise SourceError(f"part {part[0]}/{part[1]} of the input is empty; use fewer parts" if part else "no input")
    return sources


def _found(given: str, split: str | None) -> Iterator[Found]:
    """What one input stands for."""
    for path in _expand(given):
        if is_metadataset(path) and not any(kind.matches(path) for kind in SOURCES):
            for member, member_split in metadataset_members(path, split):
                yield from _found(str(member), member_split)
            continue
        kind = _kind_of(path)
        if kind is not None:
            for file in kind.files(path) if split is None else kind.files(path, split):
                yield kind, file, path if path.is_dir() else None
            continue
        for file in folder_files(path, split):
            inner = _kind_of(file)
            assert inner is not None, file
            yield inner, file, None if inner in _IMAGE_FOLDERS else path


def _kind_of(path: Path) -> type[Source] | None:
    """The class that reads a path; None for a folder that none knows."""
    for kind in SOURCES:
        if kind.matches(path):
            return kind
    if path.is_dir():
        return None
    if path.name.lower().endswith(_COMPRESSED_TARS):
        raise SourceError(
            f"{path} is a compressed tar, which cannot be read by offsets; decompress it (gunzip, zstd -d)"
        )
    raise SourceError(f"{path} has an unknown format; known formats: {known_formats()}")


def _shares(paths: list[Path], part: tuple[int, int] | None) -> Iterator[tuple[int, int, int] | None]:
    """What a part has of each file, as `Source.share`; None for nothing."""
    number, count = part or (0, 1)
    sizes = [path.stat().st_size for path in paths]
    begin, end = (sum(sizes) * edge // count for edge in (number, number + 1))
    start = 0
    for size in sizes:
        first, last = max(begin - start, 0), min(end - start, size)
        yield (first, last, size) if first < last else (None if part or size else (0, 1, 1))
        start += size


def _expand(pattern: str) -> list[Path]:
    if _REMOTE.match(pattern):
        raise SourceError(f"{pattern} is remote; only local files are read: download or mount it, and pass its path")
    if Path(pattern).exists():
        return [Path(pattern)]
    matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not matches and (folder := hub_folder(pattern)) is not None:
        return [folder]
    if not matches:
        raise SourceError(f"nothing matches {pattern}" if glob.has_magic(pattern) else f"{pattern}: no such file")
    return matches
