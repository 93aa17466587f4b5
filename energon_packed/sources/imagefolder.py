"""Folders of Hugging Face datasets in; records with paths of media, or the rows of Arrow files, out.

imagefolder    metadata.jsonl, metadata.csv or metadata.parquet beside images, videos (videofolder) or audio files
               (audiofolder), which `file_name` refers to
captions       `x.png`, `x.mp4` or `x.wav` with its text in `x.txt`, `x.caption` or `x.text`, as in kohya's scripts
save_to_disk   the Arrow streams that state.json lists
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from energon_packed.errors import Reason, Reject, SourceError
from energon_packed.files import check_inner, of_type
from energon_packed.records.media.kinds import AUDIO, VIDEO
from energon_packed.sources.arrow import ArrowSource, ParquetSource
from energon_packed.sources.base import Source, SourceRecord
from energon_packed.sources.convert import not_utf8
from energon_packed.sources.csv import CsvSource
from energon_packed.sources.folder_entries import CAPTIONED_FILES, ignored_kind, is_caption
from energon_packed.sources.json import JsonlSource
from energon_packed.sources.listed import ListedSource
from energon_packed.system import raise_resource_error

_FIELDS = {"file_name": "", "file_names": "s"}
_SUFFIX = "_file_name"


class MetadataSource(Source):
    """A metadata file; file names start from its folder.

    Attributes:
        name: name of the file.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str]

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether the file has the name."""
        return path.name == cls.name

    def row(self, entry: Any) -> SourceRecord:
        """Parse a record, and rename its columns with file names."""
        return _with_images(super().row(entry))


class ImageFolderSource(MetadataSource, JsonlSource):
    """A metadata.jsonl file."""

    name = "metadata.jsonl"


class ImageFolderCsvSource(MetadataSource, CsvSource):
    """A metadata.csv file."""

    name = "metadata.csv"
    json_columns = (*CsvSource.json_columns, "file_names")


class ImageFolderParquetSource(MetadataSource, ParquetSource):
    """A metadata.parquet file."""

    name = "metadata.parquet"


def _with_images(row: SourceRecord) -> SourceRecord:
    """Rename file name columns to media columns: `file_name` to `image`, `video` or `audio`, `x_file_name` to `x`."""
    record = row.record
    if not isinstance(record, dict):
        return row
    out: dict[str, Any] = {}
    for name, value in record.items():
        if name in _FIELDS:
            target = _kind(value) + _FIELDS[name]
        else:
            target = name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) else name
        # Neither column is preferred silently.
        if target != name and (target in record or target in out):
            kind = "videos" if "video" in target else "audio files" if "audio" in target else "images"
            detail = f"{name} and {target} both name {kind}; keep one"
            return row._replace(record=None, reject=Reject(Reason.IMAGE_COUNT_MISMATCH, detail))
        out[target] = value
    # The imagefolder reader of Hugging Face documents a text column as the caption of the image.
    has_media = "image" in out or "video" in out
    if has_media and isinstance(out.get("text"), str) and "captions" not in out and not _has_turns(out):
        out["captions"] = [out.pop("text")]
    if isinstance(out.get("caption"), str) and "captions" not in out and not _has_turns(out):
        out["captions"] = [out.pop("caption")]
    return row._replace(record=out)


def _kind(value: Any) -> str:
    """Return the field of a file name, or of the first of a list: `image`, `video` or `audio`."""
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, str):
        return "image"
    return "video" if VIDEO.has_suffix(first) else "audio" if AUDIO.has_suffix(first) else "image"


def _has_turns(record: dict[str, Any]) -> bool:
    return any(record.get(name) for name in ("messages", "conversations", "conversation"))


class CaptionFolderSource(ListedSource):
    """The images, videos and audio files of a folder, each with its text in a file of the same name; no subfolders.

    A media file without a text is a record that is rejected, and so is a text without a media file.
    """

    suffixes = ()

    @classmethod
    def open(cls, path: Path, *, work_dir: Path, image_root: Path | None = None) -> Source:
        """Open the folder, from which its media paths start."""
        return super().open(path, work_dir=work_dir, image_root=path)

    @classmethod
    def records(cls, path: Path) -> Iterator[dict[str, Any]]:
        """Yield a record per media file or text without one, in the order of the names.

        Raises:
            SourceError: a caption cannot be read.
        """
        names = sorted(os.listdir(path))
        media = [name for name in names if name.lower().endswith(CAPTIONED_FILES) and not name.startswith(".")]
        captions: dict[str, list[str]] = {}
        for name in names:
            if is_caption(name):
                captions.setdefault(os.path.splitext(name)[0], []).append(name)
        stems = {os.path.splitext(name)[0] for name in media}
        alone = {files[0] for stem, files in captions.items() if stem not in stems}
        for name in sorted([*media, *alone]):
            if name in alone:
                detail = f"{name} is a caption, and no media file has its name; add the file"
                yield {"id": name, "fault": (Reason.MISSING_IMAGE, detail)}
            else:
                own = _caption(path, name, captions.get(os.path.splitext(name)[0], []))
                yield {"id": name, _kind(name): name, **own}


def _caption(folder: Path, name: str, files: list[str]) -> dict[str, Any]:
    """Read the caption of a media file, or say why it has none."""
    if not files:
        detail = f"{name} has no caption; write it to {os.path.splitext(name)[0]}.txt"
    elif len(files) > 1:
        detail = f"{name} has {len(files)} captions, {' and '.join(files)}; keep one"
    else:
        try:
            return {"caption": (folder / files[0]).read_text(encoding="utf-8-sig").strip()}
        except UnicodeDecodeError as error:
            detail = f"{files[0]}: {not_utf8(error.object[error.start])}"
        except OSError as error:
            raise_resource_error(error, folder / files[0])
            raise SourceError(f"{folder / files[0]} cannot be read: {error.strerror}. Make it readable.") from error
    return {"fault": (Reason.MISSING_FIELD, detail)}


class HuggingFaceSource(ArrowSource):
    """An Arrow file of a folder written by `datasets.Dataset.save_to_disk`."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    has_splits: ClassVar[bool] = True

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether the folder has a state.json or dataset_dict.json."""
        return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    @classmethod
    def files(cls, path: Path, split: str | None = None) -> list[Path]:
        """List the Arrow files, in order; a DatasetDict needs a split."""
        if (path / "dataset_dict.json").is_file():
            # A DatasetDict has no default split: the order of its splits means nothing.
            splits = _read(path / "dataset_dict.json", lambda value: value["splits"])[0]
            if split not in splits:
                fault = f"has no split {split!r}; it has" if split is not None else "has the splits"
                raise SourceError(f"{path} {fault} {', '.join(splits)}; set `source_split` to one of them")
            path /= split
        names, state = _read(path / "state.json", _data_files)
        if not names:
            raise SourceError(f"{path / 'state.json'} lists no data files; save the dataset again")
        # An indices mapping selects and reorders rows; ignoring it would read other records.
        if state.get("_indices_data_files"):
            raise SourceError(f"{path} has an indices mapping; save it again after dataset.flatten_indices()")
        return [path / name for name in names]

    @classmethod
    def unlisted(cls, path: Path) -> list[str]:
        """Names of Arrow files that no state.json lists, but caches of `datasets.map`."""
        unlisted: list[str] = []
        states = [path / "state.json"] if (path / "state.json").is_file() else sorted(path.glob("*/state.json"))
        for state in states:
            listed = _read(state, _data_files)[0]
            unlisted += [
                file.relative_to(path).as_posix()
                for file in sorted(state.parent.glob("*.arrow"))
                if file.name not in listed and ignored_kind(file.name, is_data=True) is None
            ]
        return unlisted


def _data_files(state: dict[str, Any]) -> list[str]:
    return [of_type(entry, dict)["filename"] for entry in of_type(state["_data_files"], list)]


def _read(file: Path, named: Callable[[Any], list[str]]) -> tuple[list[str], dict[str, Any]]:
    """Read the file names in a JSON file, and its whole content.

    Raises:
        SourceError: the file cannot be read, or a name points outside the folder.
    """
    try:
        value = of_type(json.loads(file.read_text(encoding="utf-8")), dict)
        names = of_type(named(value), list, "the list of names")
        check_inner(names)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise_resource_error(error, file)
        raise SourceError(f"{file} is not a file of a Hugging Face dataset: {error!r}") from error
    return names, value
