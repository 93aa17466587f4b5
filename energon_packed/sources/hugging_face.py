"""Hugging Face `save_to_disk` folders: the Arrow streams that state.json lists."""

import json
from pathlib import Path
from typing import ClassVar

from energon_packed.errors import SourceError
from energon_packed.sources.arrow import ArrowSource


class HuggingFaceSource(ArrowSource):
    """One Arrow file of a folder that `datasets.Dataset.save_to_disk` wrote."""

    suffixes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Folders with state.json or dataset_dict.json."""
        return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    @classmethod
    def files(cls, path: Path) -> list[Path]:
        """The Arrow files, in order."""
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
            raise SourceError(
                f"{path} holds the splits {', '.join(splits)}; name one, such as {path / str(splits[0])}"
            )
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            files = [path / entry["filename"] for entry in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{path / 'state.json'} is not that of a Hugging Face dataset: {error!r}") from error
        if state.get("_indices_data_files"):
            raise SourceError(f"{path} has an indices mapping; save it again after dataset.flatten_indices()")
        return files
