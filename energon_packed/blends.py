"""Weighted blends of the outputs of several builds: counts, compatibility checks, weights and the Metadataset YAML.

Energon draws packs, so a weight is a share of the packs drawn. The resulting number of epochs over each input depends
on its number of packs; it is computed and reported.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.files import atomic_write
from energon_packed.formats import codec_of
from energon_packed.metadatasets import read_metadataset, read_split
from energon_packed.options import refuse_remote
from energon_packed.shards import PackingManifest
from energon_packed.shards.nv_meta import dataset_folder, shards_in_split
from energon_packed.shards.reader import ShardReader

Subflavor = str | int | float | bool
WeightBy = Literal["samples", "packs", "tokens", "records", "equal"]
WEIGHT_BY: tuple[WeightBy, ...] = ("samples", "packs", "tokens", "records", "equal")
Schema = Literal["v2", "v1"]
_UNEVEN = 1.05  # ratio of samples per pack between inputs above which weights by samples give uneven coverage


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
    read_split(folder).required(split)
    shards = [shard for shard in manifest.shards if shard.split == split]
    if not sum(shard.packs for shard in shards):
        raise ConfigError(
            f"{folder} has no packs in split {split!r} by packing.json; run energon-packed nv-meta on it"
        )
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
    metadataset = read_metadataset(path)
    found = metadataset.leaves(split)
    try:
        leaves = [read_input(leaf.path, leaf.split_part) for leaf in found]
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"{path} references a dataset that cannot be used: {error}") from error
    _check_settings(leaves)
    tokens, records = [leaf.tokens for leaf in leaves], [leaf.records for leaf in leaves]
    mode = metadataset.mode(split)
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
        mode=None if mode == "once" else mode,
    )


def _scan(folder: Path, split: str) -> BlendInput:
    """Count a dataset packed by other tools, from its indexes and the JSON part of each pack."""
    tars = shards_in_split(folder, split)
    reader = ShardReader(tars)
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
        settings={"seq_len": None, "tokenizer": None, "flavor": codec.sample_class},
        shards=frozenset(tar.stem for tar in tars),
    )


def has_split(path: str | Path, split: str) -> bool:
    """Whether a dataset folder has packs in `split`, or a Metadataset defines it.

    Raises:
        FormatError: `path` is not a dataset.
    """
    if Path(path).is_file():
        return split in read_metadataset(path, trusted=True).splits  # of which only the names are used
    folder = dataset_folder(path)
    manifest = PackingManifest.load_if_there(folder)
    return bool(read_split(folder).shards(split)) if manifest is None else manifest.packs_in(split) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Contents of a Metadataset.

    Attributes:
        train: weighted inputs.
        val: inputs of the validation split, each read once.
        schema: `v2`, or `v1` for code without MetadatasetV2.
        epochized: each epoch contains every pack `weight` times; otherwise packs are drawn indefinitely.
        subflavors: attached to every sample; those of an input win over them.
    """

    train: Sequence[BlendInput]
    val: Sequence[BlendInput] = ()
    schema: Schema = "v2"
    epochized: bool = False
    subflavors: Mapping[str, Subflavor] = field(default_factory=dict)

    def times_seen(self) -> list[float]:
        """Epochs over each input per epoch of the largest one (0 if never drawn), or repetitions if epochized."""
        if self.epochized:
            return [one.weight for one in self.train]
        return epochs_by_weight([one.weight for one in self.train], [one.packs for one in self.train])

    def warnings(self) -> list[str]:
        """Warnings about a valid blend."""
        found = []
        per_pack = [one.samples_per_pack for one in self.train]
        by = [one.weighed_by for one in self.train if one.weighed_by in ("samples", "records")]
        if by and max(per_pack) > _UNEVEN * min(per_pack):
            found.append(
                f"samples per pack range from {min(per_pack):.2f} to {max(per_pack):.2f} between inputs, so weights "
                f"by {by[0]} repeat some inputs more often than others; set `weight_by` to 'packs' for even coverage"
            )
        return found


def epochs_by_weight(weights: Sequence[float], packs: Sequence[int]) -> list[float]:
    """Epochs over each input per epoch of the largest input with a nonzero weight.

    Args:
        weights: shares of draws, not all 0.
        packs: number of packs of each input, at least 1.
    """
    count, weight = max((count, weight) for weight, count in zip(weights, packs, strict=True) if weight)
    draws = count / weight
    return [draws * weight / count for weight, count in zip(weights, packs, strict=True)]


def make_blend(
    inputs: Sequence[tuple[str | Path, float | None]],
    *,
    val: Iterable[str | Path] = (),
    weight_by: WeightBy = "samples",
    split_from: str = "train",
    schema: Schema = "v2",
    epochized: bool = False,
    subflavors: Mapping[str, Subflavor] | None = None,
    input_subflavors: Mapping[str | Path, Mapping[str, Subflavor]] | None = None,
) -> Blend:
    """Read the inputs, check their compatibility and assign weights.

    Args:
        inputs: (dataset folder or Metadataset, weight or None). Where one input has a weight, None is 1.
        val: inputs of the validation split; defaults to the `val` splits of `inputs`.
        weight_by: quantity that default weights are proportional to; `records` are all input records, rejected ones
            included.
        split_from: split of the inputs used for training.
        schema: `v2`, or `v1` for code without MetadatasetV2.
        epochized: weights are repetitions per epoch, 1 by default; requires `v2`.
        subflavors: attached to every sample: text, numbers or booleans.
        input_subflavors: by path of an input, attached to its samples; they win over `subflavors`.

    Raises:
        ConfigError: incompatible inputs or invalid weights; the message names them.
        FormatError: an input is not a dataset.
    """
    if not inputs:
        raise ConfigError("no input datasets; pass at least one dataset folder")
    if epochized and schema == "v1":
        raise ConfigError("`epochized` requires `schema` 'v2'; v1 supports only draws by weight")
    train = [read_input(path, split_from) for path, _ in inputs]
    _check_settings(train)
    _check_together(train)
    train = _weighed(train, [weight for _, weight in inputs], weight_by, epochized)
    given_val = [Path(path) for path in val]
    if given_val:
        splits = ["val" if path.is_file() or has_split(path, "val") else "train" for path in given_val]
        validation = [read_input(path, split) for path, split in zip(given_val, splits, strict=True)]
    else:
        have = [one.path for one in train if split_from != "val" and has_split(one.path, "val")]
        validation = [read_input(path, "val") for path in have]
    _check_together(validation)
    _check_held_out(train, validation)
    own = _own_subflavors(input_subflavors or {}, [*train, *validation])
    train = [replace(one, subflavors=own.get(one.path.resolve(), {})) for one in train]
    validation = [replace(one, subflavors=own.get(one.path.resolve(), {})) for one in validation]
    _check_settings([*train, *validation])
    _check_modes(train, "repetitions" if epochized else "weight")
    _check_modes(validation, "weight" if schema == "v1" else "repetitions")
    return Blend(train=train, val=validation, schema=schema, epochized=epochized, subflavors=dict(subflavors or {}))


def _own_subflavors(
    given: Mapping[str | Path, Mapping[str, Subflavor]], inputs: Sequence[BlendInput]
) -> dict[Path, Mapping[str, Subflavor]]:
    """Subflavors by the resolved path of an input."""
    known = {one.path.resolve() for one in inputs}
    found = {}
    for path, values in given.items():
        meant = [one for one in (Path(path).resolve(), (Path(path) / "webdataset").resolve()) if one in known]
        if not meant:
            raise ConfigError(
                f"{path} has subflavors, but is no input; inputs: {', '.join(str(i.path) for i in inputs)}"
            )
        found[meant[0]] = values
    return found


def _weighed(
    inputs: Sequence[BlendInput], weights: Sequence[float | None], weight_by: WeightBy, epochized: bool
) -> list[BlendInput]:
    given: list[float] = []
    if any(weight is not None for weight in weights):
        given = [1.0 if weight is None else weight for weight in weights]
    for one, weight in zip(inputs, given, strict=False):
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"the weight of {one.path} is {weight:g}; it must be a finite number >= 0")
    if given:
        if not any(given):
            raise ConfigError("all weights are 0; set at least one weight above 0")
        return [replace(one, weight=w, weighed_by="given") for one, w in zip(inputs, given, strict=True)]
    if epochized or weight_by == "equal":
        return [replace(one, weight=1.0, weighed_by="once" if epochized else "equal") for one in inputs]
    if weight_by == "tokens" and (unknown := [one.path for one in inputs if one.tokens is None]):
        raise ConfigError(
            f"{unknown[0]} has no recorded lengths, so its token count is unknown; set `weight_by` to 'samples'"
        )
    if weight_by == "records" and (unknown := [one.path for one in inputs if one.records is None]):
        raise ConfigError(
            f"{unknown[0]} has no packing.json, so its number of records is unknown; set `weight_by` to 'samples'"
        )
    counts = [int(getattr(one, weight_by) or 0) for one in inputs]
    return [replace(one, weight=float(count), weighed_by=weight_by) for one, count in zip(inputs, counts, strict=True)]


def render(blend: Blend, out: Path, *, absolute: bool = False) -> str:
    """Render the YAML text, with comments on the source of each weight.

    Args:
        blend: from `make_blend`.
        out: output file; relative paths start from its folder.
        absolute: write absolute paths.
    """
    name = "MetadatasetV2" if blend.schema == "v2" else "Metadataset"
    seen = blend.times_seen()
    what = "repetitions are per epoch" if blend.epochized else "weights are shares of the packs drawn"
    lines = [
        f"# Generated by energon-packed metadataset. Energon draws packs, not samples: {what}.",
        "__module__: megatron.energon",
        f"__class__: {name}",
        "splits:",
        "  train:",
    ]
    kind = "datasets" if blend.schema == "v1" else "blend_epochized" if blend.epochized else "blend"
    lines.append(f"    {kind}:")
    for one, times in zip(blend.train, seen, strict=True):
        counts = f"{one.packs:,} packs, {one.samples:,} samples ({one.counted_by})"
        often = "" if blend.epochized else f"; {times:.3g} epochs per epoch of the largest input"
        lines.append(f"      # {counts}; weight: {one.weighed_by}{often}")
        key = "repetitions" if blend.epochized else "weight"
        if one.weight == 0:
            lines.append(f"      # - path: {one.path}    excluded: Energon does not accept a {key} of 0")
            continue
        lines += _entry(one, out, absolute, "train", {key: _number(one.weight)}, blend.subflavors)
    if blend.val:
        lines.append("  val:")
        lines.append("    datasets:" if blend.schema == "v1" else "    blend_epochized:")
        for one in blend.val:
            lines.append(f"      # {one.packs:,} packs ({one.counted_by}), each read once")
            lines += _entry(one, out, absolute, "val", {}, blend.subflavors)
    return "\n".join(lines) + "\n"


def write_metadataset(blend: Blend, out: Path, *, absolute: bool = False) -> None:
    """Write the YAML file.

    Raises:
        ConfigError: `out` is an input, is referenced by one, or does not end in .yaml.
    """
    refuse_remote(out)
    if out.suffix != ".yaml":
        raise ConfigError(f"{out} must end in .yaml; Energon reads only such files as a Metadataset")
    for one in (*blend.train, *blend.val):
        if one.path.is_file() and out.resolve() in (file.resolve() for file in read_metadataset(one.path).files()):
            raise ConfigError(f"{out} would include itself through {one.path}; write the blend to another file")
    atomic_write(out, render(blend, out, absolute=absolute).encode())


def _entry(
    one: BlendInput,
    out: Path,
    absolute: bool,
    split: str,
    numbers: Mapping[str, object],
    flavors: Mapping[str, Subflavor],
) -> list[str]:
    target = one.path.resolve()
    path = str(target) if absolute else os.path.relpath(target, out.resolve().parent)
    value: dict[str, object] = {"path": path}
    if one.split != split:
        value["split_part"] = one.split
    value |= numbers
    if flavors or one.subflavors:
        value["subflavors"] = {**flavors, **one.subflavors}
    text = yaml.safe_dump([value], sort_keys=False, allow_unicode=True, width=10_000)
    return ["      " + line for line in text.splitlines()]


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.12g}")


def _check_together(inputs: Sequence[BlendInput]) -> None:
    """Reject inputs that repeat the same packs or share pack keys."""
    twice = [path for path, count in Counter(one.path.resolve() for one in inputs).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is listed twice; list it once with a larger weight")
    owner: dict[str, Path] = {}
    for one in inputs:
        for shard in one.shards:
            if shard in owner:
                raise ConfigError(
                    f"{owner[shard]} and {one.path} both have a shard {shard}, so their keys collide; repack "
                    "one of them with a different `shard_prefix`"
                )
            owner[shard] = one.path


def _check_held_out(train: Sequence[BlendInput], val: Sequence[BlendInput]) -> None:
    """Reject validation inputs that overlap with training inputs."""
    for one in val:
        for other in train:
            if one.shards & other.shards:
                raise ConfigError(
                    f"the validation data {one.path} and the training data {other.path} share the shard "
                    f"{min(one.shards & other.shards)}; pack with `split` train=0.98,val=0.02 or use other "
                    "validation data"
                )


def _check_modes(inputs: Sequence[BlendInput], mode: str) -> None:
    """Reject a Metadataset whose draw mode differs from the blend's; Energon does not support mixing them."""
    for one in inputs:
        if one.mode not in (None, mode):
            kinds = {"weight": "by weight, indefinitely", "repetitions": "in epochs"}
            raise ConfigError(
                f"{one.path} draws {kinds[one.mode]}, but this blend draws {kinds[mode]}; list its datasets directly"
            )


def _check_settings(inputs: Sequence[BlendInput]) -> None:
    """Reject inputs packed with different settings; the message lists all settings in which two inputs differ."""
    for first, second in combinations(inputs, 2):
        differ = [
            f"{name} {str(value)[:24]} and {str(second.settings[name])[:24]}"
            for name, value in first.settings.items()
            if None not in (value, second.settings.get(name)) and second.settings[name] != value
        ]
        if differ:
            prefix = " and a different `shard_prefix`" if first.shards & second.shards else ""
            raise ConfigError(
                f"{first.path} and {second.path} have {', '.join(differ)}; all inputs need the same, repack one of "
                f"them with the other's settings{prefix}"
            )
