"""From what a user names (files, folders, globs) to Sources."""

import codecs
import glob
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from energon_packed.errors import SourceError
from energon_packed.sources.arrow import ArrowSource
from energon_packed.sources.base import Source
from energon_packed.sources.convert import (
    converted,
    csv_to_arrow,
    json_array_to_jsonl,
    parquet_to_arrow,
    unpack,
)
from energon_packed.sources.jsonl import JsonlSource

FORMATS = ".jsonl .jsonl.gz .jsonl.zst .json .parquet .arrow .feather .csv and Hugging Face save_to_disk folders"


def open_sources(
    inputs: Iterable[str | Path],
    *,
    work_dir: Path,
    image_root: Path | None = None,
    part: tuple[int, int] | None = None,
) -> list[Source]:
    """Sources for files, globs and Hugging Face folders, in the order given; a glob's files by name.

    Args:
        inputs: paths or glob patterns.
        work_dir: folder for converted copies of formats without random access.
        image_root: folder of relative media paths; by default the folder of each input file.
        part: (I, N) opens the I-th of N parts of about the same number of bytes. The parts of one input have every
            record once.

    Raises:
        SourceError: nothing matches, a format is unknown, or a file is broken or named twice; a part is empty.
    """
    files = [found for given in inputs for path in _expand(str(given)) for found in _files(path)]
    seen: set[Path] = set()
    for path, _ in files:
        real = path.resolve()
        if real in seen:
            raise SourceError(f"{path} is named twice; every record would be packed twice")
        seen.add(real)
    if not files:
        raise SourceError(f"no input file; give one or more of {FORMATS}")
    sources = []
    for (path, folder), share in zip(files, _shares([path for path, _ in files], part), strict=True):
        if share is not None:
            source = _open(path, work_dir / "converted", image_root if image_root is not None else folder)
            source.share = share
            sources.append(source)
    if not sources:
        raise SourceError(f"part {part[0]}/{part[1]} of the input is empty; use fewer parts" if part else "no input")
    return sources


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
    if Path(pattern).exists():
        return [Path(pattern)]
    matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not matches:
        raise SourceError(f"nothing matches {pattern}" if glob.has_magic(pattern) else f"{pattern}: no such file")
    return matches


def _open(path: Path, copies: Path, root: Path | None) -> Source:
    name = path.name.lower()
    if name.endswith((".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson.gz")):
        return JsonlSource(path, data=converted(path, copies, ".jsonl", unpack), image_root=root)
    if name.endswith((".jsonl", ".ndjson")):
        return JsonlSource(path, image_root=root)
    if name.endswith(".json"):
        if _starts_with(path) != b"[":
            return JsonlSource(path, image_root=root)
        return JsonlSource(path, data=converted(path, copies, ".jsonl", json_array_to_jsonl), image_root=root)
    if name.endswith((".arrow", ".feather")):
        return ArrowSource(path, image_root=root)
    if name.endswith(".parquet"):
        return ArrowSource(path, data=converted(path, copies, ".arrow", parquet_to_arrow), image_root=root)
    if name.endswith(".csv"):
        data = converted(path, copies, ".arrow", csv_to_arrow)
        return ArrowSource(path, data=data, image_root=root, json_cells=True)
    raise SourceError(f"{path} has an unknown format; known are {FORMATS}")


def _files(path: Path) -> list[tuple[Path, Path | None]]:
    """(file, folder of its relative media where that is not its own) of a file or a Hugging Face folder."""
    if not path.is_dir():
        return [(path, None)]
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise SourceError(f"{path} holds the splits {', '.join(splits)}; name one, such as {path / str(splits[0])}")
    if not (path / "state.json").is_file():
        raise SourceError(f"{path} is a folder without a Hugging Face state.json; give files or a glob")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path / 'state.json'} is not that of a Hugging Face data set: {error!r}") from error
    if state.get("_indices_data_files"):
        raise SourceError(f"{path} holds an indices mapping; save it again after dataset.flatten_indices()")
    return [(file, path) for file in files]


def _starts_with(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
