"""Weighted Metadatasets over the outputs of several builds, with their counts read and their settings compared.

Energon draws packs: a weight is a share of draws. How often a data set is then seen depends on how many packs it has,
so that is worked out and told.

Source of the format: `Metadataset` (v1) and `MetadatasetV2` of megatron-energon 7.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import orjson
import yaml

from energon_packed.errors import ConfigError, FormatError
from energon_packed.shards import PackingManifest
from energon_packed.shards.files import write_whole
from energon_packed.shards.layouts.base import read_json
from energon_packed.shards.nv_meta import NV_META
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.split import dataset_folder, shard_names, shards_in_split

WeightBy = Literal["samples", "packs", "tokens", "equal"]
WEIGHT_BY: tuple[WeightBy, ...] = ("samples", "packs", "tokens", "equal")
Schema = Literal["v2", "v1"]
_UNEVEN = 1.05  # samples per pack of one input over that of another, from which weights by samples mislead


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendInput:
    """One input of a blend: a data set folder, or another Metadataset.

    Attributes:
        path: folder with `.nv-meta`, or a YAML file.
        split: which of its splits is read.
        packs, samples, tokens: what that split holds; tokens is None where nobody recorded them.
        counted_by: where the counts come from.
        settings: what inputs of one blend must have in common, by name; None where unknown.
        shards: stems of its shards, which must not occur in another input.
        mode: how a Metadataset draws inside: `weight` or `repetitions`; None for one data set.
        weight: share of draws, or repetitions in an epoch.
        weighed_by: where the weight comes from.
    """

    path: Path
    split: str
    packs: int
    samples: int
    tokens: int | None
    counted_by: str
    settings: Mapping[str, object]
    shards: frozenset[str]
    mode: str | None = None
    weight: float = 1.0
    weighed_by: str = "equal"

    @property
    def samples_per_pack(self) -> float:
        """Mean number of samples in a pack."""
        return self.samples / self.packs


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """What a Metadataset is made of.

    Attributes:
        train: inputs with their weights.
        val: inputs of the validation split, each read once.
        schema: `v2`, or `v1` for older code.
        epochized: each epoch holds every pack `weight` times, instead of drawing for ever.
        subflavors: handed to every sample.
    """

    train: Sequence[BlendInput]
    val: Sequence[BlendInput] = ()
    schema: Schema = "v2"
    epochized: bool = False
    subflavors: Mapping[str, str] = field(default_factory=dict)

    def times_seen(self) -> list[float]:
        """How often each input is seen while the one with the most packs is seen once (0 where it is never drawn)."""
        if self.epochized:
            return [one.weight for one in self.train]
        largest = max((one for one in self.train if one.weight), key=lambda one: one.packs)
        draws = largest.packs / largest.weight
        return [draws * one.weight / one.packs for one in self.train]

    def warnings(self) -> list[str]:
        """What its user should know: nothing that makes it wrong."""
        found = []
        per_pack = [one.samples_per_pack for one in self.train]
        by_samples = any(one.weighed_by == "samples" for one in self.train)
        if by_samples and max(per_pack) > _UNEVEN * min(per_pack):
            found.append(
                f"samples per pack differ from {min(per_pack):.2f} to {max(per_pack):.2f} between inputs: weights by "
                "samples then repeat the packs of some inputs more than those of others; --weight-by packs covers all "
                "evenly"
            )
        return found


def make_blend(
    inputs: Sequence[tuple[str | Path, float | None]],
    *,
    val: Iterable[str | Path] = (),
    weight_by: WeightBy = "samples",
    split_from: str = "train",
    schema: Schema = "v2",
    epochized: bool = False,
    subflavors: Mapping[str, str] | None = None,
) -> Blend:
    """Read the inputs, compare them and give them weights.

    Args:
        inputs: (data set folder or Metadataset, weight or None). Either all have a weight or none has.
        val: inputs of the validation split; without any, the `val` splits of the inputs are taken.
        weight_by: what weights are proportional to where none are given.
        split_from: split of the inputs that is trained on.
        schema: `v2`, or `v1` for code that knows no MetadatasetV2.
        epochized: weights are repetitions in an epoch, 1 where none are given; needs `v2`.
        subflavors: handed to every sample.

    Raises:
        ConfigError: inputs that do not go together, or weights that make no blend; the message names them.
        FormatError: an input is no data set.
    """
    if not inputs:
        raise ConfigError("no input; give at least one data set folder")
    if epochized and schema == "v1":
        raise ConfigError("an epochized blend needs --schema v2; v1 can only draw by weight")
    train = [read_input(path, split_from) for path, _ in inputs]
    _check_together(train)
    train = _weighed(train, [weight for _, weight in inputs], weight_by, epochized)
    given_val = [Path(path) for path in val]
    if given_val:
        validation = [read_input(path, _val_split(path)) for path in given_val]
    else:
        have = [one.path for one in train if one.path.is_dir() and split_from != "val" and _has(one.path, "val")]
        validation = [read_input(path, "val") for path in have]
    _check_together(validation)
    _check_held_out(train, validation)
    _check_settings([*train, *validation])
    _check_modes(train, "repetitions" if epochized else "weight")
    _check_modes(validation, "weight" if schema == "v1" else "repetitions")
    return Blend(train=train, val=validation, schema=schema, epochized=epochized, subflavors=dict(subflavors or {}))


def read_input(path: str | Path, split: str) -> BlendInput:
    """Counts and settings of one split of a data set folder, or of all that a Metadataset refers to.

    Raises:
        ConfigError: the split is empty.
        FormatError: there is no data set, or no Metadataset that Energon can read.
    """
    given = Path(path)
    if given.is_file():
        return _read_metadataset(given, split)
    folder = dataset_folder(given)
    try:
        manifest = PackingManifest.load(folder)
    except FormatError:
        return _scan(folder, split)
    shards = [shard for shard in manifest.shards if shard.split == split]
    if not sum(shard.packs for shard in shards):
        there = ", ".join(sorted({shard.split for shard in manifest.shards if shard.packs})) or "none"
        raise ConfigError(f"{folder} has no packs in split {split!r}; it has {there}")
    return BlendInput(
        path=folder,
        split=split,
        packs=sum(shard.packs for shard in shards),
        samples=sum(shard.samples for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        counted_by="packing.json",
        settings={
            "seq_len": manifest.seq_len,
            "tokenizer": manifest.tokenizer_fingerprint,
            "flavor": manifest.sample_class,
        },
        shards=frozenset(Path(shard.name).stem for shard in shards),
    )


def render(blend: Blend, out: Path, *, absolute: bool = False) -> str:
    """The YAML text, with comments that say where each weight comes from.

    Args:
        blend: from `make_blend`.
        out: the file it is for, which relative paths start from.
        absolute: write absolute paths.
    """
    name = "MetadatasetV2" if blend.schema == "v2" else "Metadataset"
    seen = blend.times_seen()
    what = "repetitions are times in an epoch" if blend.epochized else "weights are shares of the packs drawn"
    lines = [
        f"# Made by energon-packed metadataset. Energon draws packs, not samples: {what}.",
        "__module__: megatron.energon",
        f"__class__: {name}",
        "splits:",
        "  train:",
    ]
    kind = "datasets" if blend.schema == "v1" else "blend_epochized" if blend.epochized else "blend"
    lines.append(f"    {kind}:")
    for one, times in zip(blend.train, seen, strict=True):
        counts = f"{one.packs:,} packs, {one.samples:,} samples ({one.counted_by})"
        often = "" if blend.epochized else f"; seen {times:.3g} times while the largest is seen once"
        lines.append(f"      # {counts}; weight: {one.weighed_by}{often}")
        key = "repetitions" if blend.epochized else "weight"
        if one.weight == 0:
            lines.append(f"      # - path: {one.path}    left out: Energon takes no {key} of 0")
            continue
        lines += _entry(one, out, absolute, "train", {key: _number(one.weight)}, blend.subflavors)
    if blend.val:
        lines.append("  val:")
        lines.append("    datasets:" if blend.schema == "v1" else "    blend_epochized:")
        for one in blend.val:
            lines.append(f"      # {one.packs:,} packs ({one.counted_by}), each once")
            lines += _entry(one, out, absolute, "val", {}, blend.subflavors)
    return "\n".join(lines) + "\n"


def write_metadataset(blend: Blend, out: Path, *, absolute: bool = False) -> None:
    """Write the YAML file.

    Raises:
        ConfigError: `out` is one of the inputs, or one of them leads to it.
    """
    for one in (*blend.train, *blend.val):
        if out.resolve() in _referred(one.path):
            raise ConfigError(f"{out} is an input of itself, through {one.path}; write the blend to another file")
    write_whole(out, render(blend, out, absolute=absolute).encode())


def _entry(
    one: BlendInput, out: Path, absolute: bool, split: str, numbers: Mapping[str, object], flavors: Mapping[str, str]
) -> list[str]:
    target = one.path.resolve()
    path = str(target) if absolute else os.path.relpath(target, out.resolve().parent)
    value: dict[str, object] = {"path": path}
    if one.split != split:
        value["split_part"] = one.split
    value |= numbers
    if flavors:
        value["subflavors"] = dict(flavors)
    text = yaml.safe_dump([value], sort_keys=False, allow_unicode=True, width=10_000)
    return ["      " + line for line in text.splitlines()]


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.12g}")


# --- reading inputs ------------------------------------------------------------------------------------------------


def _read_metadataset(path: Path, split: str) -> BlendInput:
    """The sum of all data sets that a Metadataset refers to."""
    from megatron.energon.metadataset.loader import traverse_metadataset

    try:
        found = traverse_metadataset(path.resolve(), split_part=split)
        leaves = [read_input(Path(str(leaf.path)), leaf.split_part or split) for leaf in found]
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"{path} refers to a data set that cannot be used: {error}") from error
    except Exception as error:  # Energon raises what its parsers raise
        raise FormatError(
            f"{path} is no Metadataset that Energon can read: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    if not leaves:
        raise ConfigError(f"{path} has no split {split!r}")
    _check_settings(leaves)
    tokens = [leaf.tokens for leaf in leaves]
    return BlendInput(
        path=path,
        split=split,
        packs=sum(leaf.packs for leaf in leaves),
        samples=sum(leaf.samples for leaf in leaves),
        tokens=None if None in tokens else sum(count for count in tokens if count is not None),
        counted_by=f"sum of {len(leaves)} data sets",
        settings=leaves[0].settings,
        shards=frozenset(shard for leaf in leaves for shard in leaf.shards),
        mode=_mode(path, split),
    )


def _mode(path: Path, split: str) -> str | None:
    """How a Metadataset draws inside a split."""
    value = yaml.safe_load(path.read_bytes())["splits"].get(split) or {}
    if "blend_epochized" in value:
        return "repetitions"
    return "weight" if "blend" in value or "datasets" in value else None


def _referred(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """A Metadataset and all files that it leads to."""
    seen = set() if seen is None else seen
    if path.resolve() in seen or not path.is_file():
        return seen
    seen.add(path.resolve())
    try:
        text = json.dumps(yaml.safe_load(path.read_bytes()))
    except (yaml.YAMLError, TypeError, ValueError):
        return seen
    for found in re.findall(r'"path": "([^"]+)"', text):
        _referred(path.parent / found, seen)
    return seen


def _scan(folder: Path, split: str) -> BlendInput:
    """Counts of a data set that other tools packed, from its indexes and the json of each pack."""
    tars = shards_in_split(folder, split)
    reader = ShardReader(tars)
    if not len(reader):
        raise ConfigError(f"{folder} has no packs in split {split!r}")
    samples, tokens = 0, 0
    known = True
    for pack in range(len(reader)):
        value = read_json(reader.part(pack, "json"))
        lengths = value.get("lengths")
        samples += int(value.get("sample_count") or len(value.get("captions") or value.get("samples") or [0]))
        known = known and isinstance(lengths, list)
        tokens += sum(lengths) if isinstance(lengths, list) else 0
    return BlendInput(
        path=folder,
        split=split,
        packs=len(reader),
        samples=samples,
        tokens=tokens if known else None,
        counted_by="counted in the tars, as there is no packing.json",
        settings={"seq_len": None, "tokenizer": None, "flavor": _flavor(folder)},
        shards=frozenset(tar.stem for tar in tars),
    )


def _flavor(folder: Path) -> object:
    try:
        return yaml.safe_load((folder / NV_META / "dataset.yaml").read_bytes())["sample_type"]["__class__"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def _has(folder: Path, split: str) -> bool:
    names = shard_names(folder).get(split, [])
    try:
        return PackingManifest.load(folder).packs_in(split) > 0
    except (FormatError, orjson.JSONDecodeError):
        return bool(names)


def _val_split(path: Path) -> str:
    """`val` where the input has it, else all that it has for training."""
    return "val" if path.is_file() or _has(dataset_folder(path), "val") else "train"


# --- comparing and weighing ----------------------------------------------------------------------------------------


def _check_together(inputs: Sequence[BlendInput]) -> None:
    """Refuse what would show the same packs twice, or give two packs one name."""
    twice = [path for path, count in Counter(one.path.resolve() for one in inputs).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is given twice; give it once, with a larger weight")
    owner: dict[str, Path] = {}
    for one in inputs:
        for shard in one.shards:
            if shard in owner:
                raise ConfigError(
                    f"{owner[shard]} and {one.path} both have a shard {shard}, so their keys are the same; pack "
                    "one of them again with another --shard-prefix"
                )
            owner[shard] = one.path


def _check_held_out(train: Sequence[BlendInput], val: Sequence[BlendInput]) -> None:
    """Refuse validation on what is trained on."""
    for one in val:
        for other in train:
            if one.shards & other.shards:
                raise ConfigError(
                    f"the validation data {one.path} and the training data {other.path} share the shard "
                    f"{min(one.shards & other.shards)}; pack with --split train=0.98,val=0.02, or hold out other data"
                )


def _check_modes(inputs: Sequence[BlendInput], mode: str) -> None:
    """Refuse a Metadataset that draws in another way than the blend: Energon does not mix them."""
    for one in inputs:
        if one.mode not in (None, mode):
            kinds = {"weight": "by weight, for ever", "repetitions": "in epochs"}
            raise ConfigError(
                f"{one.path} draws {kinds[one.mode]}, and this blend {kinds[mode]}; give its data sets themselves"
            )


def _check_settings(inputs: Sequence[BlendInput]) -> None:
    known: dict[str, tuple[object, Path]] = {}
    for one in inputs:
        for name, value in one.settings.items():
            if value is None:
                continue
            first, path = known.setdefault(name, (value, one.path))
            if first != value:
                short = [str(v)[:24] for v in (first, value)]
                raise ConfigError(
                    f"{path} has {name} {short[0]} and {one.path} has {short[1]}; a blend needs one {name}, pack "
                    "one of them again"
                )


def _weighed(
    inputs: Sequence[BlendInput], weights: Sequence[float | None], weight_by: WeightBy, epochized: bool
) -> list[BlendInput]:
    missing = [one.path for one, weight in zip(inputs, weights, strict=True) if weight is None]
    given = [weight for weight in weights if weight is not None]
    if missing and given:
        raise ConfigError(f"{missing[0]} has no weight while others have; give all of them =WEIGHT, or none")
    for one, weight in zip(inputs, given, strict=False):
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"the weight of {one.path} is {weight:g}; it must be a number of at least 0")
    if given:
        if not any(given):
            raise ConfigError("all weights are 0; nothing would be drawn")
        return [replace(one, weight=w, weighed_by="given") for one, w in zip(inputs, given, strict=True)]
    if epochized or weight_by == "equal":
        return [replace(one, weight=1.0, weighed_by="once" if epochized else "equal") for one in inputs]
    if weight_by == "tokens" and (unknown := [one.path for one in inputs if one.tokens is None]):
        raise ConfigError(f"{unknown[0]} records no lengths, so its tokens are unknown; use --weight-by samples")
    counts = [{"samples": one.samples, "packs": one.packs, "tokens": one.tokens or 0}[weight_by] for one in inputs]
    return [replace(one, weight=float(count), weighed_by=weight_by) for one, count in zip(inputs, counts, strict=True)]
