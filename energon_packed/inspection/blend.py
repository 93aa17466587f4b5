"""Entries of a Metadataset with counts, shares of draws and epochs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from energon_packed.errors import EnergonPackedError, FormatError
from energon_packed.metadataset import epochs_by_weight, read_input


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendEntry:
    """One entry of a split.

    Attributes:
        split: `train`, `val` or `test`.
        path: path resolved relative to the file.
        mode: `weight`, `repetitions` or `once`.
        number: weight or repetitions.
        packs, samples: counts; None if the entry cannot be read.
        share: share of the draws, or of an epoch's packs.
        times: epochs over it per epoch of the largest entry of the split, or repetitions per epoch.
        problem: why the entry cannot be read, or None.
    """

    split: str
    path: Path
    mode: str
    number: float
    packs: int | None
    samples: int | None
    share: float | None = None
    times: float | None = None
    problem: str | None = None


def read_blend(path: Path) -> list[BlendEntry]:
    """Read the entries of a Metadataset YAML (v1 or v2), including datasets that cannot be read.

    Raises:
        FormatError: the file is not a valid Metadataset.
    """
    try:
        splits = yaml.safe_load(path.read_bytes())["splits"]
        entries = [entry for split, value in splits.items() for entry in _entries(path, str(split), value)]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is not a valid Metadataset: {type(error).__name__} {error}") from error
    return [counted for split in splits for counted in _counted([e for e in entries if e.split == split])]


def _entries(file: Path, split: str, value: Any) -> Iterator[BlendEntry]:
    for key, mode in (("blend", "weight"), ("datasets", "weight"), ("blend_epochized", "repetitions")):
        if key in value:
            for item in value[key]:
                yield _entry(file, split, item, mode, float(item.get(mode, 1)))
            return
    yield _entry(file, split, value, "once", 1.0)


def _entry(file: Path, split: str, item: Any, mode: str, number: float) -> BlendEntry:
    path = file.parent / item["path"]
    packs = samples = problem = None
    try:
        found = read_input(path, item.get("split_part") or split)
        packs, samples = found.packs, found.samples
    except EnergonPackedError as error:
        problem = str(error)
    return BlendEntry(split=split, path=path, mode=mode, number=number, packs=packs, samples=samples, problem=problem)


def _counted(entries: list[BlendEntry]) -> Iterator[BlendEntry]:
    """Add shares and times if all entries could be read."""
    known = [entry for entry in entries if entry.packs]
    if len(known) != len(entries) or not entries:
        yield from entries
        return
    packs = [entry.packs or 0 for entry in entries]
    if entries[0].mode == "weight":
        weights = [entry.number for entry in entries]
        times = epochs_by_weight(weights, packs) if any(weights) else [0.0] * len(weights)
        for entry, seen in zip(entries, times, strict=True):
            yield replace(entry, share=entry.number / (sum(weights) or 1), times=seen)
    else:
        total = sum(entry.number * count for entry, count in zip(entries, packs, strict=True))
        for entry, count in zip(entries, packs, strict=True):
            yield replace(entry, share=entry.number * count / total, times=entry.number)
