"""From what a user names (files, folders, globs) to Sources."""

import codecs
import glob
import json
from collections.abc import Iterable
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


def open_sources(inputs: Iterable[str | Path], *, work_dir: Path, image_root: Path | None = None) -> list[Source]:
    """Sources for files, globs and Hugging Face folders, in the order given; a glob's files by name.

    Args:
        inputs: paths or glob patterns.
        work_dir: folder for converted copies of formats without random access.
        image_root: folder of relative media paths; by default the folder of each input file.

    Raises:
        SourceError: nothing matches, a format is unknown, or a file is broken or named twice.
    """
    sources: list[Source] = []
    seen: set[Path] = set()
    for given in inputs:
        for path in _expand(str(given)):
            real = path.resolve()
            if real in seen:
                raise SourceError(f"{path} is named twice; every record would be packed twice")
            seen.add(real)
            sources += _open(path, work_dir / "converted", image_root)
    if not sources:
        raise SourceError(f"no input file; give one or more of {FORMATS}")
    return sources


def _expand(pattern: str) -> list[Path]:
    if Path(pattern).exists():
        return [Path(pattern)]
    matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not matches:
        raise SourceError(f"nothing matches {pattern}" if glob.has_magic(pattern) else f"{pattern}: no such file")
    return matches


def _open(path: Path, copies: Path, root: Path | None) -> list[Source]:
    if path.is_dir():
        return _open_folder(path, root)
    name = path.name.lower()
    if name.endswith((".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson.gz")):
        return [JsonlSource(path, data=converted(path, copies, ".jsonl", unpack), image_root=root)]
    if name.endswith((".jsonl", ".ndjson")):
        return [JsonlSource(path, image_root=root)]
    if name.endswith(".json"):
        if _starts_with(path) != b"[":
            return [JsonlSource(path, image_root=root)]
        return [JsonlSource(path, data=converted(path, copies, ".jsonl", json_array_to_jsonl), image_root=root)]
    if name.endswith((".arrow", ".feather")):
        return [ArrowSource(path, image_root=root)]
    if name.endswith(".parquet"):
        return [ArrowSource(path, data=converted(path, copies, ".arrow", parquet_to_arrow), image_root=root)]
    if name.endswith(".csv"):
        data = converted(path, copies, ".arrow", csv_to_arrow)
        return [ArrowSource(path, data=data, image_root=root, json_cells=True)]
    raise SourceError(f"{path} has an unknown format; known are {FORMATS}")


def _open_folder(path: Path, root: Path | None) -> list[Source]:
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
    return [ArrowSource(file, image_root=root if root is not None else path) for file in files]


def _starts_with(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
