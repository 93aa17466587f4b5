"""Blend: weighted inputs and the resulting epochs over each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from energon_packed.errors import ConfigError
from energon_packed.metadataset.checks import check_held_out, check_modes, check_settings, check_together
from energon_packed.metadataset.inputs import BlendInput, Subflavor, has_split, read_input, validation_split

WeightBy = Literal["samples", "packs", "tokens", "records", "equal"]
WEIGHT_BY: tuple[WeightBy, ...] = ("samples", "packs", "tokens", "records", "equal")
Schema = Literal["v2", "v1"]
_UNEVEN = 1.05  # ratio of samples per pack between inputs above which weights by samples give uneven coverage


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
    check_settings(train)
    check_together(train)
    train = _weighed(train, [weight for _, weight in inputs], weight_by, epochized)
    given_val = [Path(path) for path in val]
    if given_val:
        validation = [read_input(path, validation_split(path)) for path in given_val]
    else:
        have = [one.path for one in train if split_from != "val" and has_split(one.path, "val")]
        validation = [read_input(path, "val") for path in have]
    check_together(validation)
    check_held_out(train, validation)
    own = _own_subflavors(input_subflavors or {}, [*train, *validation])
    train = [replace(one, subflavors=own.get(one.path.resolve(), {})) for one in train]
    validation = [replace(one, subflavors=own.get(one.path.resolve(), {})) for one in validation]
    check_settings([*train, *validation])
    check_modes(train, "repetitions" if epochized else "weight")
    check_modes(validation, "weight" if schema == "v1" else "repetitions")
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
