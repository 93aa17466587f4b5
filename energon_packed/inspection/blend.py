"""What a Metadataset blends: its entries with counts, shares of draws, and how often each is seen."""

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
        path: as the file resolves it.
        mode: `weight`, `repetitions` or `once`.
        number: weight or repetitions.
        packs, samples: what it holds; None where it cannot be read.
        share: share of the draws, or of an epoch's packs.
        times: how often it is seen while the largest entry of the split is seen once, or in an epoch.
        problem: why it cannot be read.
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
    """Entries of a Metadataset YAML of either format; data sets that are not here keep their place.

    Raises:
        FormatError: the file is no Metadataset.
    """
    try:
        splits = yaml.safe_load(path.read_bytes())["splits"]
        entries = [entry for split, value in splits.items() for entry in _entries(path, str(split), value)]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is no Metadataset: {type(error).__name__} {error}") from error
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
    """With shares and times, where everything could be read."""
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
