"""imagefolder of Hugging Face datasets: metadata.jsonl or metadata.csv beside images, which `file_name` names."""

from pathlib import Path
from typing import Any

from energon_packed.errors import Reason, Reject
from energon_packed.sources.base import Row
from energon_packed.sources.csv import CsvSource
from energon_packed.sources.jsonl import JsonlSource

_FIELDS = {"file_name": "image", "file_names": "images"}
_ENDING = "_file_name"


class ImageFolderSource(JsonlSource):
    """A metadata.jsonl file; file names start from its folder."""

    suffixes = ()

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Files of that name."""
        return path.name == "metadata.jsonl"

    def row(self, held: tuple[int, bytes]) -> Row:
        """The line parsed."""
        return _with_images(super().row(held))


class ImageFolderCsvSource(CsvSource):
    """A metadata.csv file."""

    suffixes = ()

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Files of that name."""
        return path.name == "metadata.csv"

    json_columns = (*CsvSource.json_columns, "file_names")

    def _row(self, number: int, values: dict[str, Any] | Reject) -> Row:
        return _with_images(super()._row(number, values))


def _with_images(row: Row) -> Row:
    """A row whose file names are images; `image_file_name` is the column `image`."""
    record = row.record
    if not isinstance(record, dict):
        return row
    out: dict[str, Any] = {}
    for name, value in record.items():
        target = _FIELDS.get(name) or (name.removesuffix(_ENDING) if name.endswith(_ENDING) else name)
        if target != name and (target in record or target in out):
            detail = f"{name} and {target} both name images; keep one"
            return row._replace(record=None, reject=Reject(Reason.IMAGE_COUNT_MISMATCH, detail))
        out[target] = value
    # A column of texts beside images is their caption, as the reader of Hugging Face shows it.
    if isinstance(out.get("text"), str) and "image" in out and "captions" not in out and not _has_turns(out):
        out["captions"] = [out.pop("text")]
    if isinstance(out.get("caption"), str) and "captions" not in out and not _has_turns(out):
        out["captions"] = [out.pop("caption")]
    return row._replace(record=out)


def _has_turns(record: dict[str, Any]) -> bool:
    return any(record.get(name) for name in ("messages", "conversations", "conversation"))
