"""The training side: packs become padding-free batches.

    Distributor ──► PackSample ──Processor──► EncodedSample ──Packer──► group ──Collator──► PackedBatch

Four roles, each a small class with one required method; the same Processor measured the lengths offline.
"""

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.collator import Collator, PaddingFreeCollator
from energon_packed.dataflow.dataset import PackedDataset
from energon_packed.dataflow.distributor import Distributor, EnergonDistributor
from energon_packed.dataflow.loader import PackedLoader, get_packed_loader
from energon_packed.dataflow.packer import Packer, PoolPacker
from energon_packed.dataflow.task_encoder import PackedTaskEncoder

__all__ = [
    "Collator",
    "Distributor",
    "EnergonDistributor",
    "PackedBatch",
    "PackedDataset",
    "PackedLoader",
    "PackedTaskEncoder",
    "Packer",
    "PaddingFreeCollator",
    "PoolPacker",
    "get_packed_loader",
]
