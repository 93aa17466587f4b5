"""Hugging Face `save_to_disk` folders: the Arrow streams that state.json lists."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from energon_packed.errors import SourceError
from energon_packed.foreign import check_inner
from energon_packed.sources.arrow import ArrowSource


class HuggingFaceSource(ArrowSource):
    """One Arrow file of a folder that `datasets.Dataset.save_to_disk` wrote."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    has_splits: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Folders with state.json or dataset_dict.json."""
        return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    @classmethod
    def files(cls, path: Path, split: str | None = None) -> list[Path]:
        """The Arrow files, in order; of a DatasetDict, those of one split."""
        if (path / "dataset_dict.json").is_file():
            splits = _read(path / "dataset_dict.json", lambda value: value["splits"])[0]
            if split not in splits:
                what = f"has no split {split!r}; it holds" if split is not None else "holds the splits"
                raise SourceError(f"{path} {what} {', '.join(splits)}; set `source_split` to one of them")
            path /= split
        names, state = _read(path / "state.json", lambda value: [entry["filename"] for entry in value["_data_files"]])
        if not names:
            raise SourceError(f"{path / 'state.json'} lists no data files; save the dataset again")
        if state.get("_indices_data_files"):
            raise SourceError(f"{path} has an indices mapping; save it again after dataset.flatten_indices()")
        return [path / name for name in names]


def _read(file: Path, named: Callable[[Any], list[str]]) -> tuple[list[str], dict[str, Any]]:
    """Names of files or folders that a file has, and all of its content.

    Raises:
        SourceError: it cannot be read, or a name leads out of the folder.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        names = named(value)
        if not isinstance(names, list):
            raise TypeError("its names are not a list")
        check_inner(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{file} is not that of a Hugging Face dataset: {error!r}") from error
    return names, value
