"""Blends as an epoch of known length: how many packs of each dataset, and which ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.manifests import LoadedSplit
from energon_packed.dataflow.trust import check_trusted
from energon_packed.metadatasets import read_metadataset

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendedSplit:
    """One dataset of a blend.

    Attributes:
        split: the dataset, and which of its splits.
        subflavors: what the Metadatasets say of it.
        weight: share of the packs of an epoch, 0 to 1; None in a blend that counts repetitions.
        repetitions: how often an epoch has each of its packs; None in a blend by weight.
    """

    split: LoadedSplit
    subflavors: dict[str, Any]
    weight: float | None
    repetitions: float | None

    @property
    def times(self) -> float:
        """Repetitions; 1 where none are given."""
        return 1 if self.repetitions is None else self.repetitions


def blended_splits(path: Path, split: str, *, trusted: bool = False) -> list[BlendedSplit]:
    """What is read: one dataset folder, or all those behind a Metadataset YAML, nested ones included.

    Raises:
        FormatError: there is no dataset, or no Metadataset that Energon can read.
        ConfigError: as `Metadataset.leaves`; a dataset without packs in its split; code of a dataset behind a
            Metadataset that is not ours, and not `trusted`: no loader opens such a blend.
    """
    if not path.is_file():
        return [BlendedSplit(split=LoadedSplit.of_folder(path, split), subflavors={}, weight=None, repetitions=1)]
    leaves = read_metadataset(path, trusted=trusted).leaves(split)
    if not trusted:
        check_trusted(path)
    return [
        BlendedSplit(
            split=LoadedSplit.of_folder(leaf.path, leaf.split_part),
            subflavors=dict(leaf.subflavors),
            weight=leaf.weight,
            repetitions=leaf.repetitions,
        )
        for leaf in leaves
    ]


def packs_of_epoch(blend: list[BlendedSplit], packs: list[int]) -> list[int]:
    """Packs that an epoch has of each dataset.

    By repetitions, their product with the packs there are. By weight, an epoch is as long as all datasets together,
    and each has its share of it (largest remainders), so a dataset of a large weight is repeated, and one of a small
    weight is sampled.

    Args:
        blend: D datasets.
        packs: D numbers, packs in each.
    """
    if all(one.weight is None for one in blend):
        return [int(one.times * count) for one, count in zip(blend, packs, strict=True)]
    return by_weight([one.weight or 0.0 for one in blend], sum(packs))


def by_weight(weights: list[float], total: int) -> list[int]:
    """`total` divided by weights, with the sum `total`, by largest remainders."""
    exact = total * np.array(weights) / sum(weights)
    counts = np.floor(exact).astype(np.int64)
    for place in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[place] += 1
    return [int(count) for count in counts]


def drawn(packs: int, count: int, rng: np.random.Generator) -> Int64:
    """Numbers of `count` of `packs` packs, int64 (count,): every pack equally often, and a random few once more."""
    copies, rest = divmod(count, packs)
    return np.concatenate([np.tile(np.arange(packs), copies), np.sort(rng.permutation(packs)[:rest])])


def least_used(used: Int64, count: int, rng: np.random.Generator) -> Int64:
    """Numbers of `count` packs, int64 (count,): each is chosen when it is among the packs that came least.

    Args:
        used: int64 (P,), how often each pack was used.
        count: packs to choose; a pack is chosen repeatedly if there are fewer.
        rng: chooses among packs that were used equally often.
    """
    found, level = [np.zeros(0, dtype=np.int64)], int(used.min())
    while count > 0:
        ready = np.flatnonzero(used <= level)  # with the packs of the rounds before, which came once more in each
        chosen = ready if len(ready) <= count else rng.choice(ready, count, replace=False)
        found.append(chosen)
        count, level = count - len(chosen), level + 1
    return np.concatenate(found)
