"""Packers: lengths of buffered samples to groups of samples, one group for each row.

| module | content |
|---|---|
| base.py | Packer, the base class with the limits of a row |
| simple.py | PlannedPacker, SequentialPacker, SimpleBatcher: rows of consecutive items |
| pool.py | PoolPacker, BalancedPoolPacker: best fit over a buffer |
"""

from energon_packed.loading.packers.base import Packer, Sizes
from energon_packed.loading.packers.pool import BalancedPoolPacker, PoolPacker
from energon_packed.loading.packers.simple import PlannedPacker, SequentialPacker, SimpleBatcher

__all__ = ["BalancedPoolPacker", "Packer", "PlannedPacker", "PoolPacker", "SequentialPacker", "SimpleBatcher", "Sizes"]
