"""Distributors: the items of each rank and worker, their order, and where they resume.

base.py              Distributor, Item: checks the numbers of items and reads items again
map.py               MapDistributor: map-style datasets, in one order for all ranks
iterable.py          IterableDistributor: a stream, of which each worker reads every n-th item
rank_partitioned.py  RankPartitioned: files, each read by one worker
records.py           the records of all sources, for PackedIterableDataset
mixture.py           several distributors by ratio; bandit.py: learned weights; schedule.py: where they apply
energon.py           packs in the order of Energon's loader
"""

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.distributors.energon import EnergonDistributor
from energon_packed.dataflow.distributors.iterable import IterableDistributor
from energon_packed.dataflow.distributors.map import MapDistributor
from energon_packed.dataflow.distributors.mixture import MixtureDistributor
from energon_packed.dataflow.distributors.rank_partitioned import RankPartitioned

__all__ = [
    "Distributor",
    "EnergonDistributor",
    "Item",
    "IterableDistributor",
    "MapDistributor",
    "MixtureDistributor",
    "RankPartitioned",
]
