"""From what a user names (files, folders, globs) to Sources: the container classes, tried in order."""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.errors import SourceError
from energon_packed.files import irregular_kind
from energon_packed.metadatasets import is_metadataset
from energon_packed.records import Adapter, FieldMap
from energon_packed.sources.arrow import ArrowSource, ParquetSource
from energon_packed.sources.base import Source
from energon_packed.sources.config import Reading, SourceConfig, plain
from energon_packed.sources.csv import CsvSource
from energon_packed.sources.energon import EnergonSource, metadataset_members
from energon_packed.sources.folders import folder_files, hub_folder
from energon_packed.sources.imagefolder import HuggingFaceSource, ImageFolderCsvSource, ImageFolderSource
from energon_packed.sources.json import CompressedJsonlSource, CompressedJsonSource, JsonlSource, JsonSource
from energon_packed.sources.webdataset import WebDatasetSource

SOURCES: list[type[Source]] = [
    ImageFolderSource,
    ImageFolderCsvSource,
    JsonlSource,
    CompressedJsonlSource,
    JsonSource,
    CompressedJsonSource,
    ParquetSource,
    ArrowSource,
    CsvSource,
    HuggingFaceSource,
    EnergonSource,
    WebDatasetSource,
]
_IMAGE_FOLDERS = (ImageFolderSource, ImageFolderCsvSource)  # their paths start from the folder of the metadata
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
    inputs: Iterable[str | Path | SourceConfig],
    *,
    work_dir: Path,
    image_root: Path | None = None,
    part: tuple[int, int] | None = None,
    split: str | None = None,
    seed: int = 0,
    trust_sample_loader: bool = False,
) -> list[Source]:
    """Sources for files, globs and folders, in the order given; the files of a glob or folder by name.

    Args:
        inputs: paths or glob patterns, or such with settings of their own. A weight above 1 opens files repeatedly.
        work_dir: folder for converted copies of formats without random access.
        image_root: folder of relative media paths; by default the folder of each input.
        part: (I, N) opens the I-th of N parts of about the same number of bytes. The parts of one input have every
            record once.
        split: of Energon datasets (train by default) and of Hugging Face datasets with several splits.
        seed: decides which records a fractional weight takes.
        trust_sample_loader: run the sample_loader.py of Energon datasets.

    Raises:
        SourceError: nothing matches, a format is unknown, or a file is broken or named twice; a part is empty.
    """
    configs = [one if isinstance(one, SourceConfig) else SourceConfig(path=(str(one),)) for one in inputs]
    files: list[_File] = []
    for number, config in enumerate(configs):
        with _naming(config):
            files += _files(number, config, split, seed)
    _refuse_twice(files)
    if not files:
        raise SourceError(f"no input file; pass one or more of {known_formats()}")
    if split is not None and not any(_has_splits(file.found) for file in files):
        raise SourceError(f"`source_split` is {split!r}, but no input has splits; leave it out, or name a folder")
    sources = []
    for file, share in zip(files, _shares([file.found[1] for file in files], part), strict=True):
        if share is None:
            continue
        config = configs[file.reading.config]
        kind, path, folder = file.found
        root = next((one for one in (config.image_root, image_root, folder) if one is not None), None)
        options: dict[str, Any] = {"work_dir": work_dir / "converted", "image_root": root}
        if kind.has_sample_loader:
            options |= {"trust_sample_loader": trust_sample_loader, "for_adapter": file.reading.adapter is not None}
        with _naming(config):
            _refuse_irregular(path)
            source = kind.open(path, **options)
        source.share, source.reading = share, file.reading
        sources.append(source)
    if not sources:
        raise SourceError(f"part {part[0]}/{part[1]} of the input is empty; use fewer parts" if part else "no input")
    return sources


@dataclass(frozen=True, slots=True)
class _File:
    """A file to open, and how its records are read."""

    found: Found
    reading: Reading


def _files(number: int, config: SourceConfig, split: str | None, seed: int) -> Iterator[_File]:
    """The files of one config, all of them once for each repetition."""
    wanted = config.source_split or split
    found = [one for given in config.path for one in _found(given, wanted)]
    if config.source_split is not None and not any(map(_has_splits, found)):
        raise SourceError(
            f"`source_split` is {wanted!r}, but {config.path[0]} has no splits; leave it out, or name a folder"
        )
    for copy, fraction in enumerate(config.repetitions):
        for place, one in enumerate(found):
            yield _File(
                one,
                Reading(
                    config=number,
                    field_map=None if config.map is None else FieldMap.parse(config.map),
                    adapter=None if config.adapter is None else Adapter(config.adapter),
                    copy=copy,
                    fraction=fraction,
                    salt="" if fraction == 1 else f"{seed} {number} {place}",
                ),
            )


def _refuse_twice(files: list[_File]) -> None:
    """Refuse a file that is named twice, unless its records are read in two ways."""
    seen: set[tuple[str, FieldMap | None, Adapter | None]] = set()
    for file in files:
        key = (os.path.realpath(file.found[1]), file.reading.field_map, file.reading.adapter)
        if file.reading.copy == 0 and key in seen:
            raise SourceError(
                f"{file.found[1]} is named twice; every record would be packed twice: name it once, with a weight in "
                "sources if that is meant"
            )
        seen.add(key)


def _has_splits(found: Found) -> bool:
    kind, _, folder = found
    return kind.has_splits or kind in _IMAGE_FOLDERS or folder is not None


@contextmanager
def _naming(config: SourceConfig) -> Iterator[None]:
    """Errors about a source with settings of its own name it."""
    try:
        yield
    except SourceError as error:
        if not config.label:
            raise
        raise SourceError(f"{config.label}: {plain(str(error))}") from error


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


def _refuse_irregular(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{str(path)!r} is not UTF-8; rename it, as the files that we write name it") from error
    kind = irregular_kind(path.stat().st_mode)
    if kind is not None and not path.is_dir():
        raise SourceError(
            f"{path} is {kind}, not a regular file; write its content to a file, as it is read repeatedly"
        )


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
    if pattern.startswith("~/") and not Path(pattern).exists():  # a config file is read by no shell
        pattern = os.path.expanduser(pattern)
    if Path(pattern).exists():
        return [Path(pattern)]
    matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not matches and (folder := hub_folder(pattern)) is not None:
        return [folder]
    if not matches:
        raise SourceError(f"nothing matches {pattern}" if glob.has_magic(pattern) else f"{pattern}: no such file")
    return matches
