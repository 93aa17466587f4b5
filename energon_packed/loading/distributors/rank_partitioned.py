"""Several sources to the ranks of a run: each rank reads one source, by ratios."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.loading.datasets.map_data import HasItems
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.distributors.datasets import IterableDistributor, MapDistributor
from energon_packed.loading.ranks import ShardSpec, resolve_rank
from energon_packed.options import short


def allocate_ranks(ratios: Sequence[float], ranks: int) -> list[int]:
    """Return the number of ranks of each source: at least 1, and otherwise as close to the ratios as possible.

    Every source gets the integer part of its share. The ranks that are left go to the largest fractions; ranks that
    are missing, as small sources have 1, come from the sources furthest above their share.

    Args:
        ratios: K numbers above 0.
        ranks: at least K.
    """
    shares = [ratio / math.fsum(ratios) * ranks for ratio in ratios]
    counts = [max(1, int(share)) for share in shares]
    by_fraction = sorted(range(len(ratios)), key=lambda i: counts[i] - shares[i])
    for index in by_fraction[: max(0, ranks - sum(counts))]:
        counts[index] += 1
    while sum(counts) > ranks:
        above = [i for i, count in enumerate(counts) if count > 1]
        counts[max(above, key=lambda i: (counts[i] - shares[i], counts[i]))] -= 1
    return counts


class RankPartitionedDistributor(Distributor):
    """Assign whole ranks to sources by ratio; the ranks of a source share its items.

        RankPartitionedDistributor({
            "images": {"dataset": images, "ratio": 3},      # 6 of 8 ranks
            "videos": {"dataset": videos, "ratio": 1},      # 2 of 8 ranks
        })

    A rank without a batch at the end of an epoch gets a row without targets until all ranks end (`epoch_end`). Pass
    `MapDistributor(dataset, repeat=True)` to repeat smaller sources indefinitely.

    Args:
        sources: `dataset` and `ratio` by name. A dataset is a Distributor, a map-style dataset, or an iterable;
            sources with the ratio 0 are left out.
        world_size: data-parallel world size of the loader; by default from torch.distributed.

    Attributes:
        ranks: number of ranks of each source, by name.

    Raises:
        ConfigError: a ratio is invalid, or there are fewer ranks than sources.

    Examples:
        >>> sources = {"a": {"dataset": ["x", "y"], "ratio": 2}, "b": {"dataset": ["z"], "ratio": 1}}
        >>> distributor = RankPartitionedDistributor(sources, world_size=3)
        >>> distributor.ranks
        {'a': 2, 'b': 1}
        >>> [item.value for item in distributor.items(ShardSpec(index=2, num_shards=3), 0)]
        ['z']
    """

    def __init__(self, sources: Mapping[str, Mapping[str, Any]], *, world_size: int | None = None) -> None:
        for name, source in sources.items():
            if not isinstance(source, Mapping) or set(source) != {"dataset", "ratio"}:
                raise ConfigError(f"Source {name!r} must be a mapping of `dataset` and `ratio`, got {short(source)}.")
            if not (source["ratio"] >= 0 and math.isfinite(source["ratio"])):
                raise ConfigError(f"The ratio of {name!r} must be at least 0 and finite, got {source['ratio']}.")
        read = {name: source for name, source in sources.items() if source["ratio"]}
        # A rank is not needed, only the number of ranks.
        self.world_size = resolve_rank(None if world_size is None else 0, world_size)[1]
        if not 1 <= len(read) <= self.world_size:
            raise ConfigError(
                f"There must be 1 to {self.world_size} sources with a ratio above 0, as many as ranks (`world_size`), "
                f"got {len(read)}. Use more ranks, or MixtureDistributor, with which each rank reads all sources."
            )
        counts = allocate_ranks([float(source["ratio"]) for source in read.values()], self.world_size)
        self.ranks = dict(zip(read, counts, strict=True))
        self.distributors = [_distributor(source["dataset"]) for source in read.values()]
        self.can_seek = all(inner.can_seek for inner in self.distributors)
        self.infinite = any(inner.infinite for inner in self.distributors)
        self.repeats = any(inner.repeats for inner in self.distributors)
        self.readers = [reader for inner in self.distributors for reader in inner.readers]
        self.read_ahead = min(inner.read_ahead for inner in self.distributors)

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield the items of the shard in the source of its rank."""
        inner, own = self._of(shard)
        return inner.items(own, start)

    def read_many(self, shard: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read items of the source again."""
        inner, own = self._of(shard)
        return inner.read_many(own, keys)

    def count(self, shard: ShardSpec) -> int | None:
        """Return the number of items of a shard, as its source."""
        inner, own = self._of(shard)
        return inner.count(own)

    def identity(self) -> dict[str, Any]:
        """Return the ranks and the identity of each source."""
        return super().identity() | {"ranks": self.ranks, "of": [inner.identity() for inner in self.distributors]}

    def _of(self, shard: ShardSpec) -> tuple[Distributor, ShardSpec]:
        """Return the source of a shard, and the shard among the shards of that source."""
        workers, rest = divmod(shard.num_shards, self.world_size)
        if rest or not workers:
            raise ConfigError(
                f"`world_size` of RankPartitionedDistributor is {self.world_size}, and the loader has another. Pass "
                "the `world_size` of the loader."
            )
        ends = list(accumulate(self.ranks.values()))
        source = bisect_right(ends, shard.index // workers)
        ranks = list(self.ranks.values())[source]
        first = (ends[source] - ranks) * workers
        return self.distributors[source], replace(shard, index=shard.index - first, num_shards=ranks * workers)


def _distributor(dataset: Any) -> Distributor:
    """Return the distributor of a dataset."""
    if isinstance(dataset, Distributor):
        return dataset
    return MapDistributor(dataset) if isinstance(dataset, HasItems) else IterableDistributor(dataset)
