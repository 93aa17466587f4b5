"""Distributors: which items does this share read, in what order, and from where does it resume.

base.py              Distributor, Item: counts, guards and re-reads
map.py               map-style datasets, a permutation every epoch
iterable.py          any stream, dealt item by item
rank_partitioned.py  files or shards, dealt part by part
mixture.py           several distributors by ratio; weights that learn: bandit.py, from which item on: schedule.py
energon.py           packs in Energon's own order
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
