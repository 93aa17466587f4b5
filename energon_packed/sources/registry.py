"""`open_sources`: files, globs, folders and Hub names in, opened Sources out; the file formats are tried in order."""

import difflib
import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, IgnoredEntries, SourceError
from energon_packed.files import irregular_kind, link_refused, visible
from energon_packed.metadatasets import is_metadataset
from energon_packed.records import Adapter, FieldMap
from energon_packed.sources.arrow import ArrowSource, ParquetSource
from energon_packed.sources.base import Source
from energon_packed.sources.config import Reading, SourceConfig, plain
from energon_packed.sources.csv import CsvSource
from energon_packed.sources.energon import EnergonSource, metadataset_members
from energon_packed.sources.folder_entries import conversion_command
from energon_packed.sources.folders import Skipped, folder_files, hub_folder, is_data, log_skipped
from energon_packed.sources.imagefolder import (
    CaptionFolderSource,
    HuggingFaceSource,
    ImageFolderCsvSource,
    ImageFolderParquetSource,
    ImageFolderSource,
    MetadataSource,
)
from energon_packed.sources.json import JsonlSource, JsonSource
from energon_packed.sources.speech import CommonVoiceSource, KaldiSource, LibriSpeechSource
from energon_packed.sources.webdataset import WebDatasetSource
from energon_packed.storage import RemotePath, as_path, is_remote

SOURCES: list[type[Source]] = [
    ImageFolderSource,
    ImageFolderCsvSource,
    ImageFolderParquetSource,
    JsonlSource,
    JsonSource,
    ParquetSource,
    ArrowSource,
    CommonVoiceSource,
    CsvSource,
    LibriSpeechSource,
    KaldiSource,
    WebDatasetSource,  # formats by suffix come first, as the others look for files inside the path
    HuggingFaceSource,
    EnergonSource,
]
_FILE_FORMATS = frozenset(kind for kind in SOURCES if not kind.has_splits)  # a folder data.parquet is not one file
_UNLISTED = "not listed by the dataset"
_MOST_EXAMPLES = 5  # entries of a reason in packing.json
Match = tuple[type[Source], Path, Path | None]
"""The class of a file, the file, and the folder that its relative media paths start from, if it is another folder."""


def register_source(source: type[Source]) -> type[Source]:
    """Class decorator that registers a custom file format; it is tried before the built-in formats."""
    SOURCES.insert(0, source)
    return source


def known_formats() -> str:
    """List the file extensions and folders that can be read, for messages."""
    suffixes = [suffix for source in SOURCES for suffix in source.suffixes]
    return (
        f"{' '.join(suffixes)}, folders of them, folders of media files with captions in .txt files, Hugging Face "
        "save_to_disk folders, Energon datasets and Metadatasets"
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
    links: bool = True,
    ignored: list[IgnoredEntries] | None = None,
) -> list[Source]:
    """Open files, globs and folders, in the order of `inputs`; the files of a glob or folder are sorted by name.

    Args:
        inputs: paths, glob patterns, or SourceConfigs. A weight above 1 opens files repeatedly.
        work_dir: folder for converted copies of formats without random access.
        image_root: folder of relative media paths; by default the folder of each input.
        part: (I, N) opens the I-th of N input parts, which have about equal numbers of bytes of each input. Each
            record is in exactly one part.
        split: split of Energon datasets (train by default) and of Hugging Face datasets with several splits.
        seed: seed of the selection for fractional weights.
        trust_sample_loader: run the sample_loader.py of Energon datasets.
        links: follow symbolic links in media paths, and read linked files of folders and globs.
        ignored: the entries of input folders that are not read are added.

    Raises:
        SourceError: no file matches, a format is unknown, a file is damaged or listed twice, or a part is empty.
    """
    configs = [entry if isinstance(entry, SourceConfig) else SourceConfig(path=(str(entry),)) for entry in inputs]
    files: list[tuple[Match, Reading]] = []
    skipped: dict[Path, Skipped] = {}
    for index, config in enumerate(configs):
        with _naming(config):
            if not links:
                _refuse_links(config.path)
            files += _files_of(index, config, split, seed, skipped)
    if ignored is not None:
        ignored += _ignored(skipped)
    _refuse_twice(files)
    if not files:
        raise SourceError(f"no input file. Pass one or more of {known_formats()}.")
    if split is not None and not any(_has_splits(match) for match, _ in files):
        raise SourceError(
            f"`source_split` is {split!r}, but no input has splits. Remove it, or pass a folder that has."
        )
    sources = []
    for ((kind, path, folder), reading), share in zip(files, _shares(files, part), strict=True):
        if share is None:
            continue
        config = configs[reading.config]
        root = next((entry for entry in (config.image_root, image_root, folder) if entry is not None), None)
        options: dict[str, Any] = {"work_dir": work_dir / "converted", "image_root": root}
        if kind.has_sample_loader:
            options |= {"trust_sample_loader": trust_sample_loader, "for_adapter": reading.adapter is not None}
        with _naming(config):
            _refuse_irregular(path)
            # Only after the check: opening a FIFO would block.
            source = kind.open(path, **options)
        source.share, source.reading, source.links = share, reading, links
        sources.append(source)
    if not sources:
        raise SourceError(f"part {part[0]}/{part[1]} of the input is empty; use fewer parts" if part else "no input")
    return sources


def _files_of(
    index: int, config: SourceConfig, split: str | None, seed: int, skipped: dict[Path, Skipped]
) -> Iterator[tuple[Match, Reading]]:
    """List the files of a config, all of them again for each repetition, and the settings for their records."""
    wanted = config.source_split or split
    matches = [match for pattern in config.path for match in _matches(pattern, wanted, skipped)]
    if config.source_split is not None and not any(map(_has_splits, matches)):
        raise SourceError(
            f"`source_split` is {wanted!r}, but {config.path[0]} has no splits. Remove it, or pass a folder that has."
        )
    field_map = None if config.map is None else FieldMap.parse(config.map)
    adapter = None if config.adapter is None else Adapter(config.adapter)
    for copy, fraction in enumerate(config.repetitions):
        for position, match in enumerate(matches):
            salt = "" if fraction == 1 else f"{seed} {index} {position}"
            yield match, Reading(index, field_map, adapter, copy, fraction, salt)


def refuse_outputs(configs: Iterable[SourceConfig], written: Mapping[str, Iterable[Path]]) -> None:
    """Refuse outputs that the next run would read: in a folder of the input, or with names that match a pattern.

    Args:
        configs: the inputs.
        written: examples of the files that the run writes, by option.

    Raises:
        ConfigError: the message names the option and the input.
    """
    patterns = [pattern for config in configs for pattern in config.path]
    for name, files in written.items():
        for pattern, file in [(pattern, file) for pattern in patterns for file in files if is_data(file.name)]:
            if _would_read(pattern, file):
                raise ConfigError(
                    f"`{name}` must be outside the input {pattern}, got {file}. The next run would read it as an "
                    "input: use another folder."
                )


def _would_read(pattern: str, file: Path) -> bool:
    """Whether an input folder or pattern has a file, once it is written."""
    path, target = as_path(os.path.expanduser(pattern)), _real(file)
    if path.exists():
        if not path.is_dir() or is_metadataset(path) or _kind_of(path) is not None:  # formats that list their files
            return False
        inner = target[len(_real(path)) :] if target[: len(_real(path))] == _real(path) else ()
        return bool(inner) and not any(name.startswith(".") for name in inner)
    fixed = next((count for count, name in enumerate(path.parts) if glob.has_magic(name)), len(path.parts))
    names = (*_real(type(path)(*path.parts[:fixed])), *path.parts[fixed:])
    # A pattern that matches a folder reads its files.
    return any(_matches_names(names, target[:count]) for count in range(1, len(target) + 1))


def _real(path: Path) -> tuple[str, ...]:
    return path.resolve().parts


def _matches_names(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not pattern or not names:
        return (not pattern and not names) or pattern == ("**",)
    first, rest = pattern[0], pattern[1:]
    is_hidden = names[0].startswith(".") and not first.startswith(".")
    if first == "**":
        return _matches_names(rest, names) or (not is_hidden and _matches_names(pattern, names[1:]))
    return not is_hidden and fnmatch.fnmatchcase(names[0], first) and _matches_names(rest, names[1:])


def _refuse_links(patterns: Iterable[str]) -> None:
    """Refuse links in inputs, but not in the names that the user wrote.

    Raises:
        SourceError: a file of a folder or glob is a link.
    """
    for written, path in [(pattern, path) for pattern in patterns for path in _expand(pattern)]:
        if is_remote(path):
            continue
        count = next((index for index, name in enumerate(Path(written).parts) if glob.has_magic(name)), None)
        found = [] if count is None or str(path) == written else [path, *[*path.parents][::-1][count + 1 :]]
        for folder, folders, names in os.walk(path):
            found += [Path(folder, name) for name in (*folders, *names)]
        if (link := next((name for name in found if name.is_symlink()), None)) is not None:
            raise SourceError(str(link_refused(link)))


def _refuse_twice(files: list[tuple[Match, Reading]]) -> None:
    """Refuse a file that is listed twice, unless its records are read with different maps or adapters."""
    # The real path, so that two globs or a symbolic link to the same file are noticed.
    seen: set[tuple[str, FieldMap | None, Adapter | None]] = set()
    for (_, path, _), reading in files:
        key = (os.path.realpath(path), reading.field_map, reading.adapter)
        # Further copies of a weight repeat the same key on purpose.
        if reading.copy == 0 and key in seen:
            raise SourceError(
                f"{path} is listed twice, so every record would be packed twice. List it once; to repeat it "
                "on purpose, set its weight in sources."
            )
        seen.add(key)


def _has_splits(match: Match) -> bool:
    kind, _, folder = match
    return kind.has_splits or issubclass(kind, MetadataSource) or folder is not None


@contextmanager
def _naming(config: SourceConfig) -> Iterator[None]:
    """Prefix errors about a source with its label."""
    try:
        yield
    except SourceError as error:
        if not config.label:
            raise
        raise SourceError(f"{config.label}: {plain(str(error))}") from error


def _matches(pattern: str, split: str | None, skipped: dict[Path, Skipped]) -> Iterator[Match]:
    """List the files of an input path or pattern; a Metadataset yields the files of its members.

    The entries of a folder that are not read are added to `skipped`.
    """
    for path in _expand(pattern):
        # A class for .yaml files may be registered, and then comes first.
        if is_metadataset(path) and not any(kind.matches(path) for kind in SOURCES):
            for member, member_split in metadataset_members(path, split):
                yield from _matches(str(member), member_split, skipped)
            continue
        kind = _kind_of(path)
        if kind is not None:
            for file in kind.files(path) if split is None else kind.files(path, split):
                yield kind, file, path if path.is_dir() else None
            if path.is_dir() and (names := kind.unlisted(path)):
                log_skipped(path, {_UNLISTED: names})
                _skip(skipped, path, {_UNLISTED: names})
            continue
        files, others = folder_files(path, split)
        _skip(skipped, path, others)
        for file in files:
            inner = _kind_of(file) or CaptionFolderSource  # the only folders
            yield inner, file, None if issubclass(inner, MetadataSource) else path


def _skip(skipped: dict[Path, Skipped], folder: Path, others: Skipped) -> None:
    """Add entries of a folder; if several sources read it, such as two of its splits, the entries that none reads."""
    if folder in skipped:
        unread = {name for names in others.values() for name in names}
        others = {reason: [name for name in names if name in unread] for reason, names in skipped[folder].items()}
    skipped[folder] = others


def _ignored(skipped: Mapping[Path, Skipped]) -> Iterable[IgnoredEntries]:
    """Join the entries of all folders by reason."""
    joined: dict[str, IgnoredEntries] = {}
    for folder, reason, names in [(folder, *item) for folder, others in skipped.items() for item in others.items()]:
        if names:
            before = joined.get(reason, IgnoredEntries(reason=reason, count=0, examples=[]))
            shown = [visible(str(folder / name), keep="") for name in names[: _MOST_EXAMPLES - len(before.examples)]]
            joined[reason] = replace(before, count=before.count + len(names), examples=before.examples + shown)
    return joined.values()


def _kind_of(path: Path) -> type[Source] | None:
    """Find the class that reads a path; None for a folder that no class reads."""
    is_folder = path.is_dir()
    for kind in SOURCES:
        if not (is_folder and kind in _FILE_FORMATS) and kind.matches(path):
            return kind
    if is_folder:
        return None
    if command := conversion_command(path.name):
        raise SourceError(
            f"{path} is a compressed or archived file, which cannot be read by offsets. Decompress it: {command}."
        )
    raise SourceError(f"{path} has an unknown format; known formats: {known_formats()}")


def _refuse_irregular(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{str(path)!r} is not UTF-8; rename it, because packing.json contains the names of the inputs"
        ) from error
    kind = irregular_kind(path.stat().st_mode)
    if kind is not None and not path.is_dir():
        raise SourceError(
            f"{path} is {kind}, not a regular file. Write its content to a file, because inputs are read repeatedly."
        )


def _shares(files: list[tuple[Match, Reading]], part: tuple[int, int] | None) -> Iterator[tuple[int, int, int] | None]:
    """Compute the slice of each file in an input part, as `Source.share`; None for an empty slice.

    A part has an equal share of each input: packed alone, it then has the lengths of all of them to combine.
    """
    index, count = part or (0, 1)
    for _, of_input in groupby(files, lambda file: file[1].config):
        sizes = [path.stat().st_size for (_, path, _), _ in of_input]
        first_byte, last_byte = (sum(sizes) * edge // count for edge in (index, index + 1))
        start = 0
        for size in sizes:
            first, last = max(first_byte - start, 0), min(last_byte - start, size)
            # Empty files belong to every run without parts, so that they are reported.
            yield (first, last, size) if first < last else (None if part or size else (0, 1, 1))
            start += size


def _expand(pattern: str) -> list[Path]:
    if pattern.startswith("~/") and not Path(pattern).exists():  # in a config file no shell expands it
        pattern = os.path.expanduser(pattern)
    path = as_path(pattern)
    # Before glob: a name may contain brackets.
    if path.exists():
        return [path]
    _check_listable(pattern)
    found = _remote_matches(path) if isinstance(path, RemotePath) else map(Path, glob.glob(pattern, recursive=True))
    matches = sorted(found)
    # A local path always wins over a name of the Hub.
    if not matches and (folder := hub_folder(pattern)) is not None:
        return [folder]
    if not matches:
        if glob.has_magic(pattern):
            raise SourceError(f"nothing matches {pattern}. Check the folder and the pattern.")
        folder = Path(pattern).parent
        names = [] if is_remote(pattern) or not folder.is_dir() else [each.name for each in folder.iterdir()]
        close = difflib.get_close_matches(Path(pattern).name, names, 1, cutoff=0.85)  # names share their suffix
        raise SourceError(f"{pattern}: no such file. {f'Did you mean {close[0]}?' if close else 'Check the path.'}")
    return matches


def _remote_matches(pattern: RemotePath) -> Iterator[Path]:
    """List the objects and folders that match; as in `glob.glob`, wildcards match no hidden names.

    Raises:
        StorageError: the bucket does not exist, or cannot be listed.
    """
    bucket, names = RemotePath(*pattern.parts[:2]), pattern.parts[2:]
    if not glob.has_magic(str(pattern)):
        next(pattern.parent.iterdir(), None)  # a request for a missing object does not report a missing bucket
        return
    for match in bucket.glob("/".join(names)):
        if not any(name.startswith(".") and name not in names for name in match.parts):
            yield match


def _check_listable(pattern: str) -> None:
    """Refuse a pattern with a folder that cannot be listed; `glob` would skip its files.

    Raises:
        SourceError: a folder cannot be listed; the message names it.
    """
    parent, name = os.path.split(pattern)
    if is_remote(pattern):  # the listing of a store is complete, or raises
        return
    if not glob.has_magic(pattern) or parent == pattern:
        return
    _check_listable(parent)
    if not glob.has_magic(name):
        return
    for folder in glob.glob(parent, recursive=True) if parent else ["."]:
        if os.path.isdir(folder):
            try:
                os.scandir(folder).close()
            except OSError as error:
                raise SourceError(
                    f"{folder} cannot be listed: {error.strerror}. Make it readable, or pass a pattern without it."
                ) from error
