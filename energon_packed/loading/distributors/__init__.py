"""Distributors: the items of each rank and worker, their order, and where they resume.

base.py: Distributor and Item. datasets.py: map-style datasets, iterables, and files that one worker reads each.
records.py: raw records. mixture.py: several distributors by ratio; schedule.py: ratios that are learned. energon.py:
packs in the order of Energon's loader.
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
