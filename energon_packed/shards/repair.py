"""`make_nv_meta`. Input: a folder of existing tars. Output: indexes and `.nv-meta`; the tars stay as they are."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_packed.errors import ConfigError, FormatError
from energon_packed.formats import codec_for, codec_of
from energon_packed.formats.references import MEDIA_PART, complete_parts
from energon_packed.metadatasets import NV_META, SPLIT_FILE, SplitFile, read_split
from energon_packed.shards.index import write_tar_index
from energon_packed.shards.manifest import FILE_NAME, OtherVersionError, PackingManifest
from energon_packed.shards.media_yaml import write_media_yaml
from energon_packed.shards.nv_meta import SPLITS, split_ranges, write_nv_meta
from energon_packed.shards.scan import scan_tar
from energon_packed.shards.tar import ShardRows, ShardSummary

_SHARD = re.compile(r"(.+)-\d{6}\.tar")  # name of a shard of `pack`, whose keys start with the same prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedFolder:
    """Result of `make_nv_meta`.

    Attributes:
        folder: the folder of the tars.
        sample_class: flavor in dataset.yaml.
        shards: the tars, with their packs.
        splits: shard names by split.
        kept_split: split.yaml listed all tars, and was kept.
        dropped_manifest: packing.json did not describe these shards, and was renamed to packing.json.stale.
    """

    folder: Path
    sample_class: str
    shards: list[ShardSummary]
    splits: dict[str, list[str]]
    kept_split: bool
    dropped_manifest: bool


def make_nv_meta(
    folder: Path, sample_class: str | None = None, *, split: Mapping[str, float] | None = None, seed: int = 0
) -> RepairedFolder:
    """Write or replace `.tar.idx` files and `.nv-meta` of a folder of tars.

    The tars were written by energon-packed, LLaVA-OneVision-1.5, LLaVA-OneVision-2 or LoongForge (`formats`). A
    dataset.yaml that names the class of another package is replaced, unless packing.json shows that `pack` wrote it.

    Args:
        folder: folder with `*.tar`, or the output folder above it. Splits and exclusions of an existing split.yaml are
            kept; tars that it does not list are added to `train`. If packs have references to media, media.yaml is
            written beside a folder `webdataset`.
        sample_class: flavor; by default it is recognized by the parts of the first pack.
        split: share of the shards in each split, which replaces an existing split.yaml; adds up to 1.
        seed: random seed for the shards of each split.

    Raises:
        FormatError: there is no tar, a tar has faulty members, a key is in two tars, or a pack is not of the flavor.
            Also if split.yaml is invalid or has splits of other names, or packing.json has another format version.
            Nothing is written in these cases.
        ConfigError: the flavor is unknown; a share is less than a shard; or `split` is None, and shards of several
            outputs of `pack` are listed nowhere.
    """
    if not any(folder.glob("*.tar")) and any((folder / "webdataset").glob("*.tar")):
        folder = folder / "webdataset"
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise FormatError(f"{folder} contains no .tar files; pass the folder of the shards")
    summaries, first_packs, has_references = _checked(tars)
    codec = codec_for(sample_class) if sample_class else codec_of(first_packs[0])
    # One pack of each tar: tars of several flavors in a folder are the likely mistake, and packs of a tar are alike.
    for tar, pack in zip(tars, first_packs, strict=True):
        try:
            codec.read(complete_parts(pack, set()))  # the tars are indexed, not the images they refer to
        except FormatError as error:
            raise FormatError(f"{tar}: {pack['__key__']} is not a {codec.sample_class}: {error}") from error
    existing = read_split(folder) if (folder / NV_META / SPLIT_FILE).is_file() else None
    if split is not None:
        splits, kept = _drawn_splits([tar.name for tar in tars], split, seed), False
    else:
        splits, kept = _splits(folder, [tar.name for tar in tars], existing.parts if existing else {})
        _check_outputs({tar.name: str(pack["__key__"]) for tar, pack in zip(tars, first_packs, strict=True)}, existing)
    manifest = _manifest_of(folder, summaries, splits)
    stale = manifest is None and (folder / NV_META / FILE_NAME).is_file()
    # All checks are done; files are changed only after this line. Headers are read again rather than kept in memory:
    # index rows have an entry for every member.
    for index in folder.glob("*.tar.idx"):
        if not index.with_suffix("").is_file():
            index.unlink()
    if stale:
        (folder / NV_META / FILE_NAME).rename(folder / NV_META / f"{FILE_NAME}.stale")
    for tar in tars:
        write_tar_index(tar, scan_tar(tar).rows())
    write_nv_meta(
        folder,
        codec=codec,
        shards=summaries,
        rows=(scan_tar(tar).rows() for tar in tars),
        splits=splits,
        exclude=existing.exclude_patterns if existing else [],
        dataset_module=manifest.dataset_module if manifest is not None else None,
    )
    if has_references and folder.name == "webdataset":
        write_media_yaml(folder)
    return RepairedFolder(
        folder=folder,
        sample_class=codec.sample_class,
        shards=summaries,
        splits=splits,
        kept_split=kept,
        dropped_manifest=stale,
    )


def _checked(tars: list[Path]) -> tuple[list[ShardSummary], list[dict[str, Any]], bool]:
    """Check every tar, and return its summary and first pack, and whether a pack has references to media.

    Only the rows of the current tar are in memory.
    """
    summaries, first_packs, has_references = [], [], False
    owner: dict[str, str] = {}
    for tar in tars:
        scan = scan_tar(tar)
        rows = scan.rows()
        for key in rows.keys:  # index.sqlite has a unique index of keys
            if key in owner:
                raise FormatError(f"key {key} is in {owner[key]} and in {tar.name}; keys must be unique in a dataset")
            owner[key] = tar.name
        summaries.append(ShardSummary(rows.name, rows.size, _digest(rows), len(rows.keys)))
        first_packs.append(next(scan.packs()))
        has_references |= any(part == MEDIA_PART for _, part, _, _ in rows.parts)
    return summaries, first_packs, has_references


def _digest(rows: ShardRows) -> str:
    """Return a hash of names, keys and offsets, for index.uuid; hashing the contents would read all of the data."""
    return hashlib.sha256(repr((rows.name, rows.size, rows.keys, rows.parts)).encode()).hexdigest()


def _splits(folder: Path, names: list[str], existing: Mapping[str, list[str]]) -> tuple[dict[str, list[str]], bool]:
    """Return the shards by split, new shards in `train`, and whether the existing split.yaml listed all of them.

    Raises:
        FormatError: split.yaml has other splits, which would be lost.
    """
    if unknown := set(existing) - set(SPLITS):
        raise FormatError(
            f"split.yaml of {folder} has the split {sorted(unknown)[0]}, which is not one of {', '.join(SPLITS)}; "
            "rename it, or delete the file to train on everything"
        )
    known = {name for shards in existing.values() for name in shards}
    if missing := sorted(known - set(names)):
        raise FormatError(
            f"split.yaml of {folder} lists {len(missing)} of {len(known)} shards that are missing, such as "
            f"{missing[0]}. Copy the whole folder, or remove them from split.yaml."
        )
    splits = {split: [name for name in shards if name in names] for split, shards in existing.items()}
    new = [name for name in names if name not in known]
    splits["train"] = [*splits.get("train", []), *new]
    return splits, not new


def _drawn_splits(names: Sequence[str], split: Mapping[str, float], seed: int) -> dict[str, list[str]]:
    order = np.random.default_rng(seed).permutation(len(names)).tolist()
    splits = {name: order[start:stop] for name, (start, stop) in split_ranges(len(names), split).items()}
    if empty := [name for name, share in split.items() if share and not splits[name]]:
        raise ConfigError(
            f"`split` must give each split at least one of {len(names)} shards, got {empty[0]}={split[empty[0]]:g}. "
            "Use a larger share, or pack again with `split`, which divides packs."
        )
    return {name: [names[index] for index in sorted(chosen)] for name, chosen in splits.items()}


def _check_outputs(keys: Mapping[str, str], existing: SplitFile | None) -> None:
    """Refuse shards of several outputs of `pack` without a split: their validation shards would be trained on.

    Args:
        keys: the first key of each shard.
        existing: split.yaml, which lists shards of known splits.
    """
    known = {name for shards in (existing.parts if existing else {}).values() for name in shards}
    output_of = {name: match[1] for name, key in keys.items() if (match := _SHARD.fullmatch(name))
                 and key.startswith(f"{match[1]}_")}  # fmt: skip
    outputs = sorted({*output_of.values()})
    if len(outputs) > 1 and {output_of[n] for n in output_of.keys() - known} - {output_of.get(n) for n in known}:
        raise ConfigError(
            f"`split` must be set for shards of several outputs of pack ({', '.join(outputs[:3])}): no split.yaml "
            "lists their validation shards, which would become training data. Blend the outputs with metadataset, "
            "which reads their splits, or set `split`, to train=1 if all shards are training data."
        )


def _manifest_of(folder: Path, summaries: list[ShardSummary], splits: dict[str, list[str]]) -> PackingManifest | None:
    """Return the manifest if it describes these shards; None otherwise."""
    try:
        manifest = PackingManifest.load_if_there(folder)
    except OtherVersionError:  # cannot be compared, and must not be renamed
        raise
    except FormatError:
        return None
    split_of = {name: split for split, names in splits.items() for name in names}
    recorded = {(entry.name, entry.bytes, entry.packs, entry.split) for entry in manifest.shards} if manifest else {}
    return manifest if recorded == {(s.name, s.size, s.packs, split_of[s.name]) for s in summaries} else None
