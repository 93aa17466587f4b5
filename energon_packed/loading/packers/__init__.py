"""Packers: which samples share a row.

base.py: Packer, with its limits. simple.py: packs made offline, consecutive samples, a fixed number of items.
pool.py: best fit over a buffer, also with rows of similar cost on all ranks. buffer.py: samples without a row.
"""

from energon_packed.loading.packers.base import Packer, Sizes
from energon_packed.loading.packers.pool import BalancedPoolPacker, PoolPacker
from energon_packed.loading.packers.simple import PlannedPacker, SequentialPacker, SimpleBatcher

__all__ = ["BalancedPoolPacker", "Packer", "PlannedPacker", "PoolPacker", "SequentialPacker", "SimpleBatcher", "Sizes"]
