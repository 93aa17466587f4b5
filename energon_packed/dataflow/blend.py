"""Blends as an epoch of known length: how many packs of each dataset, and which ones."""

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.manifests import LoadedSplit

Int64 = npt.NDArray[np.int64]


def packs_of_epoch(blend: list[LoadedSplit], packs: list[int]) -> list[int]:
    """Packs that an epoch has of each dataset.

    By repetitions, their product with the packs there are. By weight, an epoch is as long as all datasets together,
    and each has its share of it (largest remainders), so a dataset of a large weight is repeated, and one of a small
    weight is sampled.

    Args:
        blend: D datasets.
        packs: D numbers, packs in each.
    """
    if all(one.weight is None for one in blend):
        return [int((one.repetitions or 1) * count) for one, count in zip(blend, packs, strict=True)]
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
