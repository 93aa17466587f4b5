"""BlendInput: counts and packing settings of one input of a blend."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.foreign import read_yaml
from energon_packed.formats import codec_of
from energon_packed.metadataset.checks import check_settings
from energon_packed.options import refuse_remote
from energon_packed.shards import PackingManifest
from energon_packed.shards.nv_meta import NV_META
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.split import dataset_folder, shard_names, shards_in_split

Subflavor = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendInput:
    """One input of a blend: a dataset folder, or another Metadataset.

    Attributes:
        path: folder with `.nv-meta`, or a YAML file.
        split: split to read.
        packs, samples, tokens: totals of that split; tokens is None if not recorded.
        records: input records that were packed from, rejected ones and all splits included; None if not recorded.
        counted_by: source of the counts.
        settings: settings that must match between inputs, by name; None if unknown.
        shards: stems of its shards; unique across inputs.
        mode: draw mode of a Metadataset: `weight` or `repetitions`; None for a single dataset.
        weight: share of draws, or repetitions per epoch.
        weighed_by: source of the weight.
        subflavors: attached to its samples.
    """

    path: Path
    split: str
    packs: int
    samples: int
    tokens: int | None
    records: int | None = None
    counted_by: str
    settings: Mapping[str, object]
    shards: frozenset[str]
    mode: str | None = None
    weight: float = 1.0
    weighed_by: str = "equal"
    subflavors: Mapping[str, Subflavor] = field(default_factory=dict)

    @property
    def samples_per_pack(self) -> float:
        """Mean number of samples in a pack."""
        return self.samples / self.packs


def read_input(path: str | Path, split: str) -> BlendInput:
    """Read counts and settings of one split of a dataset folder, or of all datasets in a Metadataset.

    Raises:
        ConfigError: the split is empty.
        FormatError: `path` is not a dataset, or not a Metadataset that Energon can read.
    """
    refuse_remote(path)
    given = Path(path)
    if given.is_file():
        return _read_metadataset(given, split)
    folder = dataset_folder(given)
    manifest = PackingManifest.load_if_there(folder)
    if manifest is None:
        return _scan(folder, split)
    shards = [shard for shard in manifest.shards if shard.split == split]
    if not sum(shard.packs for shard in shards):
        there = ", ".join(sorted({shard.split for shard in manifest.shards if shard.packs})) or "none"
        raise ConfigError(f"{folder} has no packs in split {split!r}; available: {there}")
    return BlendInput(
        path=folder,
        split=split,
        packs=sum(shard.packs for shard in shards),
        samples=sum(shard.samples for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        records=manifest.records,
        counted_by="packing.json",
        settings={
            "seq_len": manifest.seq_len,
            "tokenizer": manifest.tokenizer_fingerprint,
            "flavor": manifest.sample_class,
        },
        shards=frozenset(Path(shard.name).stem for shard in shards),
    )


def _read_metadataset(path: Path, split: str) -> BlendInput:
    """Sum over all datasets that a Metadataset references."""
    from energon_packed.dataflow.manifests import metadataset_leaves  # imports torch through Energon

    found = metadataset_leaves(path, split)
    try:
        leaves = [read_input(leaf, part) for leaf, part in found]
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"{path} references a dataset that cannot be used: {error}") from error
    if not leaves:
        raise ConfigError(f"{path} has no split {split!r}")
    check_settings(leaves)
    tokens, records = [leaf.tokens for leaf in leaves], [leaf.records for leaf in leaves]
    return BlendInput(
        path=path,
        split=split,
        packs=sum(leaf.packs for leaf in leaves),
        samples=sum(leaf.samples for leaf in leaves),
        tokens=None if None in tokens else sum(count for count in tokens if count is not None),
        records=None if None in records else sum(count for count in records if count is not None),
        counted_by=f"sum of {len(leaves)} datasets",
        settings=leaves[0].settings,
        shards=frozenset(shard for leaf in leaves for shard in leaf.shards),
        mode=_mode(path, split),
    )


def _mode(path: Path, split: str) -> str | None:
    """Draw mode of one split of a Metadataset."""
    value = read_yaml(path)["splits"].get(split) or {}
    if "blend_epochized" in value:
        return "repetitions"
    return "weight" if "blend" in value or "datasets" in value else None


def _scan(folder: Path, split: str) -> BlendInput:
    """Count a dataset packed by other tools, from its indexes and the JSON part of each pack."""
    tars = shards_in_split(folder, split)
    reader = ShardReader(tars)
    if not len(reader):
        raise ConfigError(f"{folder} has no packs in split {split!r}")
    codec = codec_of(reader[0])
    lengths = [one for pack in range(len(reader)) for one in codec.lengths(reader.part(pack, codec.lengths_part))]
    known = [length for length in lengths if length is not None]
    return BlendInput(
        path=folder,
        split=split,
        packs=len(reader),
        samples=len(lengths),
        tokens=sum(known) if len(known) == len(lengths) else None,
        counted_by="counted in the tars, no packing.json",
        settings={"seq_len": None, "tokenizer": None, "flavor": _flavor(folder)},
        shards=frozenset(tar.stem for tar in tars),
    )


def _flavor(folder: Path) -> object:
    try:
        return read_yaml(folder / NV_META / "dataset.yaml")["sample_type"]["__class__"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def has_split(path: str | Path, split: str) -> bool:
    """Whether a dataset folder has packs in `split`, or a Metadataset defines it.

    Raises:
        FormatError: `path` is not a dataset.
    """
    if Path(path).is_file():
        return split in (read_yaml(Path(path)).get("splits") or {})
    folder = dataset_folder(path)
    manifest = PackingManifest.load_if_there(folder)
    return bool(shard_names(folder).get(split)) if manifest is None else manifest.packs_in(split) > 0


def validation_split(path: Path) -> str:
    """`val` if the input has it, else `train`."""
    return "val" if path.is_file() or has_split(path, "val") else "train"
