"""Writer of weighted Metadatasets. Input: dataset folders, other Metadatasets and weights. Output: a Metadataset YAML.

    read_input         one folder or Metadataset to a `BlendInput`: counts, settings and shards of a split
    make_blend         checks that the inputs are compatible, and computes the weights: a `Blend`
    render             `Blend` to YAML text, with the source of each weight as a comment
    write_metadataset  writes that text to a file

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
from energon_packed.storage import as_path, energon_url, is_remote

Subflavor = str | int | float | bool
WeightBy = Literal["samples", "packs", "tokens", "records", "equal"]
WEIGHT_BY: tuple[WeightBy, ...] = ("samples", "packs", "tokens", "records", "equal")
Schema = Literal["v2", "v1"]
_UNEVEN = 1.05  # weights by samples are uneven above this ratio of samples per pack between two inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendInput:
    """One input of a blend: a dataset folder, or another Metadataset.

    Attributes:
        path: folder with `.nv-meta`, or a YAML file.
        split: split to read.
        packs, samples, tokens: totals of that split; tokens is None if not recorded.
        records: input records of all splits, including rejected records; None if not recorded.
        counted_by: source of the counts.
        settings: settings that must match between inputs, by name; None if unknown.
        shards: stems of its shards; unique across inputs.
        mode: `weight` or `repetitions`, the draw mode of a Metadataset; None for a single dataset.
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
    """Read counts and settings of `split` in a dataset folder, or in all datasets of a Metadataset.

    Raises:
        ConfigError: the split is empty.
        FormatError: `path` is not a dataset, or not a Metadataset that Energon can read.
    """
    path = as_path(path)
    refuse_remote(path, or_object=True)
    if path.is_file():
        return _read_metadataset(path, split)
    folder = dataset_folder(path)
    manifest = PackingManifest.load_if_there(folder)
    if manifest is None:
        return _scan(folder, split)
    read_split(folder).required(split)  # its error lists the splits with packs
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
    """Sum the counts of all datasets that a Metadataset references."""
    metadataset = read_metadataset(path)
    leaves = metadataset.leaves(split)
    try:
        inputs = [read_input(leaf.path, leaf.split_part) for leaf in leaves]
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"{path} references a dataset that cannot be used: {error}") from error
    _check_settings(inputs)  # here as well: the sum has the settings of its first dataset only
    mode = metadataset.mode(split)
    return BlendInput(
        path=path,
        split=split,
        packs=sum(dataset.packs for dataset in inputs),
        samples=sum(dataset.samples for dataset in inputs),
        tokens=_sum_known([dataset.tokens for dataset in inputs]),
        records=_sum_known([dataset.records for dataset in inputs]),
        counted_by=f"sum of {len(inputs)} datasets",
        settings=inputs[0].settings,
        shards=frozenset(shard for dataset in inputs for shard in dataset.shards),
        mode=None if mode == "once" else mode,
    )


def _sum_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum; None if a count is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _scan(folder: Path, split: str) -> BlendInput:
    """Count a dataset packed by other tools, from its indexes and the JSON part of each pack."""
    tars = shards_in_split(folder, split)
    reader = ShardReader(tars)
    codec = codec_of(reader[0])  # of the first pack: a dataset has one flavor
    packs = (reader.part(pack, codec.lengths_part) for pack in range(len(reader)))
    lengths = [length for raw in packs for length in codec.lengths(raw)]
    return BlendInput(
        path=folder,
        split=split,
        packs=len(reader),
        samples=len(lengths),
        tokens=_sum_known(lengths),
        counted_by="counted in the tars, no packing.json",
        settings={"seq_len": None, "tokenizer": None, "flavor": codec.sample_class},
        shards=frozenset(tar.stem for tar in tars),
    )


def has_split(path: str | Path, split: str) -> bool:
    """Return whether a dataset folder has packs in `split`, or a Metadataset defines that split.

    Raises:
        FormatError: `path` is not a dataset.
    """
    if as_path(path).is_file():
        return (
            split in read_metadataset(path, trusted=True).splits
        )  # trusted, as only the names of the splits are used
    folder = dataset_folder(path)
    manifest = PackingManifest.load_if_there(folder)
    return bool(read_split(folder).shards(split)) if manifest is None else manifest.packs_in(split) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Contents of a Metadataset.

    Attributes:
        train: weighted inputs.
        val: inputs of the validation split, each read once.
        schema: `v2`, or `v1` for Energon releases without MetadatasetV2.
        epochized: each epoch contains every pack `weight` times; otherwise packs are drawn indefinitely.
        subflavors: attached to every sample; subflavors of an input override them.
    """

    train: Sequence[BlendInput]
    val: Sequence[BlendInput] = ()
    schema: Schema = "v2"
    epochized: bool = False
    subflavors: Mapping[str, Subflavor] = field(default_factory=dict)

    def times_seen(self) -> list[float]:
        """Return the epochs over each input per epoch of the largest input (0 if never drawn), or its repetitions."""
        if self.epochized:
            return [dataset.weight for dataset in self.train]
        return epochs_by_weight([dataset.weight for dataset in self.train], [dataset.packs for dataset in self.train])

    def warnings(self) -> list[str]:
        """Return warnings about a valid blend."""
        per_pack = [dataset.samples_per_pack for dataset in self.train]
        quantities = [dataset.weighed_by for dataset in self.train if dataset.weighed_by in ("samples", "records")]
        if not quantities or max(per_pack) <= _UNEVEN * min(per_pack):
            return []
        return [
            f"samples per pack range from {min(per_pack):.2f} to {max(per_pack):.2f} between inputs, so weights by "
            f"{quantities[0]} repeat some inputs more often than others; set `weight_by` to 'packs' for even coverage"
        ]


def epochs_by_weight(weights: Sequence[float], packs: Sequence[int]) -> list[float]:
    """Return the epochs over each input per epoch of the largest input with a nonzero weight.

    An epoch of the largest input, of `count` packs and weight w, needs count / w draws; an input of weight v and n
    packs then has count / w * v / n epochs.

    Args:
        weights: shares of draws, not all 0.
        packs: packs of each input, at least 1.
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
        inputs: (dataset folder or Metadataset, weight or None). If any input has a weight, None means 1.
        val: inputs of the validation split; defaults to the `val` splits of `inputs`.
        weight_by: quantity that default weights are proportional to; `records` counts all input records, including
            rejected records.
        split_from: split of the inputs used for training.
        schema: `v2`, or `v1` for Energon releases without MetadatasetV2.
        epochized: weights are repetitions per epoch, 1 by default; requires `v2`.
        subflavors: attached to every sample; values are strings, numbers or booleans.
        input_subflavors: by path of an input, attached to its samples; they override `subflavors`.

    Raises:
        ConfigError: incompatible inputs or invalid weights; the message names them.
        FormatError: an input is not a dataset.
    """
    if not inputs:
        raise ConfigError("no input datasets; pass at least one dataset folder")
    if epochized and schema == "v1":
        raise ConfigError("`epochized` requires `schema` 'v2'; v1 supports only draws by weight")
    train = [read_input(path, split_from) for path, _ in inputs]
    # Settings first: their error explains more than equal shard names do. Again below, with the validation inputs.
    _check_settings(train)
    _check_together(train)
    train = _weighed(train, [weight for _, weight in inputs], weight_by, epochized)
    val_paths = [as_path(path) for path in val]
    if val_paths:
        # A dataset packed for validation alone has all its packs in `train`.
        splits = ["val" if path.is_file() or has_split(path, "val") else "train" for path in val_paths]
        validation = [read_input(path, split) for path, split in zip(val_paths, splits, strict=True)]
    else:
        paths = [dataset.path for dataset in train if split_from != "val" and has_split(dataset.path, "val")]
        validation = [read_input(path, "val") for path in paths]
    _check_together(validation)
    _check_held_out(train, validation)
    own = _own_subflavors(input_subflavors or {}, [*train, *validation])
    train, validation = (
        [replace(dataset, subflavors=own.get(dataset.path.resolve(), {})) for dataset in inputs]
        for inputs in (train, validation)
    )
    _check_settings([*train, *validation])
    _check_modes(train, "repetitions" if epochized else "weight")
    # Validation is written as repetitions (each pack once); schema v1 has draws by weight only.
    _check_modes(validation, "weight" if schema == "v1" else "repetitions")
    return Blend(train=train, val=validation, schema=schema, epochized=epochized, subflavors=dict(subflavors or {}))


def _own_subflavors(
    subflavors: Mapping[str | Path, Mapping[str, Subflavor]], inputs: Sequence[BlendInput]
) -> dict[Path, Mapping[str, Subflavor]]:
    """Return the subflavors by the resolved path of their input."""
    known = {dataset.path.resolve() for dataset in inputs}
    resolved = {}
    for path, values in subflavors.items():
        folders = as_path(path).resolve(), (as_path(path) / "webdataset").resolve()
        matches = [folder for folder in folders if folder in known]
        if not matches:
            raise ConfigError(
                f"{path} has subflavors, but is not an input; inputs: {', '.join(str(i.path) for i in inputs)}"
            )
        resolved[matches[0]] = values
    return resolved


def _weighed(
    inputs: Sequence[BlendInput], weights: Sequence[float | None], weight_by: WeightBy, epochized: bool
) -> list[BlendInput]:
    """Return the inputs with their weights: the explicit weights if there are any, else by `weight_by`."""
    if any(weight is not None for weight in weights):
        explicit = [1.0 if weight is None else weight for weight in weights]
        for dataset, weight in zip(inputs, explicit, strict=True):
            if not math.isfinite(weight) or weight < 0:
                raise ConfigError(f"the weight of {dataset.path} must be a finite number >= 0, got {weight:g}")
        if not any(explicit):
            raise ConfigError("all weights are 0; set at least one weight above 0")
        return [replace(dataset, weight=w, weighed_by="given") for dataset, w in zip(inputs, explicit, strict=True)]
    if epochized or weight_by == "equal":
        source = "once" if epochized else "equal"
        return [replace(dataset, weight=1.0, weighed_by=source) for dataset in inputs]
    if weight_by == "tokens" and (unknown := [dataset.path for dataset in inputs if dataset.tokens is None]):
        raise ConfigError(
            f"{unknown[0]} has no recorded lengths, so its token count is unknown; set `weight_by` to 'samples'"
        )
    if weight_by == "records" and (unknown := [dataset.path for dataset in inputs if dataset.records is None]):
        raise ConfigError(
            f"{unknown[0]} has no packing.json, so its number of records is unknown; set `weight_by` to 'samples'"
        )
    return [
        replace(dataset, weight=float(getattr(dataset, weight_by) or 0), weighed_by=weight_by) for dataset in inputs
    ]


def render(blend: Blend, out: Path, *, absolute: bool = False) -> str:
    """Return the YAML text, with comments on the source of each weight.

    Args:
        blend: from `make_blend`.
        out: output file; relative paths start from its folder. Datasets in another place than its disk or bucket have
            absolute paths or msc:// URLs.
        absolute: write absolute paths.
    """
    name = "MetadatasetV2" if blend.schema == "v2" else "Metadataset"
    meaning = "repetitions are per epoch" if blend.epochized else "weights are shares of the packs drawn"
    lines = [
        f"# Generated by energon-packed metadataset. Energon draws packs, not samples: {meaning}.",
        "__module__: megatron.energon",
        f"__class__: {name}",
        "splits:",
        "  train:",
    ]
    list_key = "datasets" if blend.schema == "v1" else "blend_epochized" if blend.epochized else "blend"
    lines.append(f"    {list_key}:")
    for dataset, times in zip(blend.train, blend.times_seen(), strict=True):
        counts = f"{dataset.packs:,} packs, {dataset.samples:,} samples ({dataset.counted_by})"
        often = "" if blend.epochized else f"; {times:.3g} epochs per epoch of the largest input"
        lines.append(f"      # {counts}; weight: {dataset.weighed_by}{often}")
        key = "repetitions" if blend.epochized else "weight"
        if dataset.weight == 0:  # kept as a comment: the file shows that the input was left out on purpose
            lines.append(f"      # - path: {dataset.path}    excluded: Energon does not accept a {key} of 0")
            continue
        lines += _entry(dataset, out, absolute, "train", {key: _number(dataset.weight)}, blend.subflavors)
    if blend.val:
        lines.append("  val:")
        lines.append("    datasets:" if blend.schema == "v1" else "    blend_epochized:")
        for dataset in blend.val:
            lines.append(f"      # {dataset.packs:,} packs ({dataset.counted_by}), each read once")
            lines += _entry(dataset, out, absolute, "val", {}, blend.subflavors)
    return "\n".join(lines) + "\n"


def write_metadataset(blend: Blend, out: Path, *, absolute: bool = False) -> None:
    """Write the YAML file.

    Raises:
        ConfigError: `out` is an input, an input references it, or it does not end in .yaml.
    """
    out = as_path(out)
    refuse_remote(out, or_object=True)
    if out.suffix != ".yaml":
        raise ConfigError(f"{out} must end in .yaml; Energon reads only such files as a Metadataset")
    for path in (dataset.path for dataset in (*blend.train, *blend.val)):
        if path.is_file() and out.resolve() in (file.resolve() for file in read_metadataset(path).files()):
            raise ConfigError(f"{out} would include itself through {path}; write the blend to another file")
    atomic_write(out, render(blend, out, absolute=absolute).encode())


def _entry(
    dataset: BlendInput,
    out: Path,
    absolute: bool,
    split: str,
    numbers: Mapping[str, object],
    subflavors: Mapping[str, Subflavor],
) -> list[str]:
    """Return the YAML lines of a reference."""
    target = dataset.path.resolve()
    folder = out.resolve().parent
    is_url = is_remote(target) or is_remote(folder)
    if absolute or (is_url and target.parts[:2] != folder.parts[:2]):  # another bucket, or one of them is a disk
        path = energon_url(target)
    else:
        path = (
            os.path.relpath("/".join(target.parts), "/".join(folder.parts))
            if is_url
            else os.path.relpath(target, folder)
        )
    value: dict[str, object] = {"path": path}
    if dataset.split != split:
        value["split_part"] = dataset.split
    value |= numbers
    # Repeated at every reference: a Metadataset cannot set subflavors of a whole split.
    if subflavors or dataset.subflavors:
        value["subflavors"] = {**subflavors, **dataset.subflavors}
    text = yaml.safe_dump([value], sort_keys=False, allow_unicode=True, width=10_000)
    return ["      " + line for line in text.splitlines()]


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.12g}")


def _check_together(inputs: Sequence[BlendInput]) -> None:
    """Reject inputs that repeat the same packs or share pack keys."""
    twice = [path for path, count in Counter(dataset.path.resolve() for dataset in inputs).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is listed twice; list it once with a larger weight")
    owner: dict[str, Path] = {}
    for dataset in inputs:
        for shard in dataset.shards:
            if shard in owner:  # equal names mean an equal `shard_prefix`, which keys start with
                raise ConfigError(
                    f"{owner[shard]} and {dataset.path} both have a shard {shard}, so their keys collide; repack "
                    "one of them with a different `shard_prefix`"
                )
            owner[shard] = dataset.path


def _check_held_out(train: Sequence[BlendInput], val: Sequence[BlendInput]) -> None:
    """Reject validation inputs that overlap with training inputs."""
    for held_out in val:
        for dataset in train:
            if shared := held_out.shards & dataset.shards:
                raise ConfigError(
                    f"the validation data {held_out.path} and the training data {dataset.path} share the shard "
                    f"{min(shared)}; pack with `split` train=0.98,val=0.02 or use other "
                    "validation data"
                )


def _check_modes(inputs: Sequence[BlendInput], mode: str) -> None:
    """Reject a Metadataset whose draw mode differs from the blend's; Energon does not support mixing them."""
    for dataset in inputs:
        if dataset.mode not in (None, mode):
            kinds = {"weight": "by weight, indefinitely", "repetitions": "in epochs"}
            raise ConfigError(
                f"{dataset.path} draws {kinds[dataset.mode]}, but this blend draws {kinds[mode]}; list its datasets "
                "directly"
            )


def _check_settings(inputs: Sequence[BlendInput]) -> None:
    """Reject inputs packed with different settings; the message lists all settings in which two inputs differ."""
    # All pairs rather than the first input against the rest: a setting that is unknown in the first input would hide a
    # difference between the others.
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
