"""Packers: which samples share a row.

base.py            Packer: limits, and groups checked
planned.py         packs made offline
pool.py            buffered best fit; balanced.py: of similar cost on all ranks
sequential.py      consecutive samples
simple_batcher.py  a fixed number of items
buffer.py          what a packer holds, for loader states
"""

from energon_packed.dataflow.packers.balanced import BalancedPoolPacker
from energon_packed.dataflow.packers.base import Packer, Sizes
from energon_packed.dataflow.packers.planned import PlannedPacker
from energon_packed.dataflow.packers.pool import PoolPacker
from energon_packed.dataflow.packers.sequential import SequentialPacker
from energon_packed.dataflow.packers.simple_batcher import SimpleBatcher

__all__ = ["BalancedPoolPacker", "Packer", "PlannedPacker", "PoolPacker", "SequentialPacker", "SimpleBatcher", "Sizes"]
