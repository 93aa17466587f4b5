"""Referenced media for Energon's own loaders. Input: a dataset folder. Output: two entries beside it.

    media.yaml              Metadataset of the splits, with an auxiliary dataset for each `source` of the locators
    media-index/.nv-meta/   index of the referenced members of tars, the auxiliary dataset `tars`

An index of the source folder is not used: it may be older than its tars, and lacks tars of other folders. Nothing is
written to the source folders.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.files import atomic_write, remove_tree
from energon_packed.formats.references import FILES, MEDIA_PART, STORED, TARS, read_locators
from energon_packed.metadatasets import NV_META, read_split
from energon_packed.records.media.reference import Locator
from energon_packed.shards.index import write_member_index
from energon_packed.shards.nv_meta import CRUDE, HEADER, INFO, info_file, yaml_file
from energon_packed.shards.reader import ShardReader
from energon_packed.storage import is_remote

MEDIA_YAML, MEDIA_INDEX = "media.yaml", "media-index"


def write_media_yaml(folder: Path) -> None:
    """Write media.yaml and media-index beside a dataset folder.

    Args:
        folder: the folder of the tars, with a complete `.nv-meta`.

    Raises:
        ConfigError: another file has the name media.yaml.
        FormatError: the part `media.json` of a pack is damaged.
        OSError: the disk is full, or fails.
    """
    out, splits = folder.parent, read_split(folder)
    refuse_other_media_yaml(out)
    sources: set[str] = set()
    tars: dict[str, int] = {}  # number by path

    def members() -> Iterator[tuple[int, str, str, int, int]]:
        for locator in _locators([folder / name for split in splits.parts for name in splits.shards(split)]):
            sources.add(str(locator.source))
            if locator.source == TARS:
                key, _, part = str(locator.member).rpartition(".")
                yield tars.setdefault(locator.file, len(tars)), key, part, locator.offset, locator.size

    index = out / MEDIA_INDEX
    write_member_index(index / NV_META / "index.sqlite", members())
    atomic_write(index / NV_META / INFO, info_file({_shard_name(tar, folder, index): 0 for tar in tars}))
    if not tars:
        _remove_index(index)
    # By name: a source of an untrusted dataset must not become a path.
    paths = {FILES: "filesystem:///", STORED: STORED, TARS: MEDIA_INDEX}
    content: dict[str, Any] = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {}}
    for split in filter(splits.shards, splits.parts):
        aux = {source: path for source, path in paths.items() if source in sources}
        content["splits"][split] = {"path": folder.name, "dataset_config": CRUDE} | ({"aux": aux} if aux else {})
    atomic_write(out / MEDIA_YAML, yaml_file(content))


def refuse_other_media_yaml(out: Path) -> None:
    """Refuse an output folder in which a user wrote a media.yaml.

    Raises:
        ConfigError: there is such a file.
    """
    if (out / MEDIA_YAML).is_file() and not _is_own(out / MEDIA_YAML):
        raise ConfigError(f"{out / MEDIA_YAML} is not a file of energon-packed, which needs the name. Move the file.")


def remove_media_yaml(out: Path) -> None:
    """Remove media.yaml and media-index of an earlier run; a file that a user wrote under this name stays."""
    file = out / MEDIA_YAML
    if file.is_file() and _is_own(file):
        _remove_index(out / MEDIA_INDEX)
        file.unlink()


def _is_own(file: Path) -> bool:
    return file.read_bytes().startswith(HEADER.encode())


def _remove_index(index: Path) -> None:
    remove_tree(index / NV_META)
    if not is_remote(index):
        with contextlib.suppress(OSError):  # it has files of the user
            index.rmdir()


def _locators(tars: list[Path]) -> Iterator[Locator]:
    reader = ShardReader(tars)
    for pack in range(len(reader)):
        raw = reader.part(pack, MEDIA_PART)
        if MEDIA_PART in raw:
            yield from filter(None, read_locators(raw).values())


def _shard_name(tar: str, folder: Path, index: Path) -> str:
    """Return the path of a tar, relative to the index if the output folder contains the tar."""
    path = os.path.normpath(folder.absolute() / tar)
    inside = Path(path).is_relative_to(folder.absolute().parent)
    return os.path.relpath(path, index.absolute()) if inside else path
