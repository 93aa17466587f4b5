"""Distributors: data to the items of each rank and worker, in an order that resumes.

| module | content |
|---|---|
| base.py | Distributor, the base class, and Item |
| datasets.py | map-style datasets, iterables, and files that are each read by one worker |
| records.py | raw records of the sources that `pack` reads |
| energon.py | packs in the order of Energon's loader |
| mixture.py | several distributors by weight |
| schedule.py | weights that change during training |
"""

from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.distributors.datasets import FileShardDistributor, IterableDistributor, MapDistributor
from energon_packed.loading.distributors.energon import EnergonDistributor
from energon_packed.loading.distributors.mixture import MixtureDistributor

__all__ = [
    "Distributor",
    "EnergonDistributor",
    "FileShardDistributor",
    "Item",
    "IterableDistributor",
    "MapDistributor",
    "MixtureDistributor",
]
