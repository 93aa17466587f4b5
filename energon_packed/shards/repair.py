"""`make_nv_meta`: indexes and `.nv-meta` for a folder of tars that are there already, without rewriting them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards.index import write_tar_index
from energon_packed.shards.layouts import layout_for, sample_class_of
from energon_packed.shards.nv_meta import write_nv_meta
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.scan import scan_tar
from energon_packed.shards.split import dataset_folder, shard_names
from energon_packed.shards.tar import ShardRows, ShardSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedFolder:
    """What was written.

    Attributes:
        folder: the folder of the tars.
        sample_class: flavor in dataset.yaml.
        shards: the tars, with their packs.
        splits: shard names by split.
        kept_split: an existing split.yaml was kept.
    """

    folder: Path
    sample_class: str
    shards: list[ShardSummary]
    splits: dict[str, list[str]]
    kept_split: bool


def make_nv_meta(folder: Path, sample_class: str | None = None) -> RepairedFolder:
    """Write or replace `.tar.idx` files and `.nv-meta` of a folder of tars in one of our layouts.

    Args:
        folder: with `*.tar`, or the output folder above it. An existing split.yaml is kept where it names all tars;
            otherwise all are for training.
        sample_class: flavor; None finds it by the parts of the first pack.

    Raises:
        FormatError: there is no tar, a tar has faulty members, a key is in two tars, or a pack is not of the flavor.
            Nothing is written then.
        ConfigError: an unknown flavor.
    """
    if not any(folder.glob("*.tar")) and any((folder / "webdataset").glob("*.tar")):
        folder = folder / "webdataset"
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise FormatError(f"{folder} holds no .tar files; give the folder of the shards")
    summaries, first_packs = _checked(tars)
    sample_class = sample_class or sample_class_of(first_packs[0])
    layout = layout_for(sample_class)
    for tar, pack in zip(tars, first_packs, strict=True):
        try:
            layout.read(pack)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            detail = str(error) if isinstance(error, FormatError) else f"{type(error).__name__} {error}"
            raise FormatError(f"{tar}: {pack['__key__']} is no {sample_class}: {detail}") from error
    splits, kept = _splits(folder, [tar.name for tar in tars])
    for tar in tars:
        write_tar_index(tar, scan_tar(tar).rows())
    write_nv_meta(
        folder,
        sample_class=sample_class,
        loader_module=layout.loader_module,
        shards=summaries,
        rows=(scan_tar(tar).rows() for tar in tars),
        splits=splits,
    )
    return RepairedFolder(folder=folder, sample_class=sample_class, shards=summaries, splits=splits, kept_split=kept)


def _checked(tars: list[Path]) -> tuple[list[ShardSummary], list[dict[str, Any]]]:
    """Summary and first pack of every tar, with its faults looked for; one tar's rows are held at a time."""
    summaries, first_packs = [], []
    owner: dict[str, str] = {}
    for tar in tars:
        rows = scan_tar(tar).rows()
        for key in rows.keys:
            if key in owner:
                raise FormatError(f"key {key} is in {owner[key]} and in {tar.name}; keys must be unique in a data set")
            owner[key] = tar.name
        summaries.append(ShardSummary(rows.name, rows.size, _digest(rows), len(rows.keys)))
        first_packs.append(ShardReader.from_offsets({tar: rows.offsets})[0])
    return summaries, first_packs


def _digest(rows: ShardRows) -> str:
    """Tells two folders apart, from names and places alone."""
    return hashlib.sha256(repr((rows.name, rows.size, rows.keys, rows.parts)).encode()).hexdigest()


def _splits(folder: Path, names: list[str]) -> tuple[dict[str, list[str]], bool]:
    try:
        found = shard_names(dataset_folder(folder))
    except (FormatError, ConfigError):
        return {"train": names}, False
    if sorted(name for shards in found.values() for name in shards) == names and set(found) <= {
        "train",
        "val",
        "test",
    }:
        return found, True
    return {"train": names}, False
