"""The YAML of a blend, with comments that say where each weight comes from.

Source of the format: `Metadataset` (v1) and `MetadatasetV2` of megatron-energon 7.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from energon_packed.errors import ConfigError
from energon_packed.metadataset.blend import Blend
from energon_packed.metadataset.inputs import BlendInput
from energon_packed.shards.files import write_whole


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
        ConfigError: `out` is one of the inputs, or one of them leads to it; or its name is not that of a YAML file.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{out} must end in .yaml, or Energon will not read it as a Metadataset")
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
