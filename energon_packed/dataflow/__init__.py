"""The training side: packs become padding-free batches.

    source ──► PackSample ──Processor──► EncodedSample ──Packer──► group ──Collator──► PackedBatch

batch.py      PackedBatch and its forms for frameworks
collator.py   Collator, PaddingFreeCollator
packer.py     Packer, PoolPacker: groups while training
dataset.py    PackedDataset: finished shards map-style
encode.py     packs to encoded samples
manifests.py  what the manifests of a dataset or Metadataset say
failures.py   samples that fail to load
state.py      loader states
energon/      the same roles under Energon, and its loader
"""

from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.collator import Collator, PaddingFreeCollator
from energon_packed.dataflow.dataset import PackedDataset
from energon_packed.dataflow.energon import LoaderConfig, PackedLoader, PackedTaskEncoder, get_packed_loader
from energon_packed.dataflow.packer import Packer, PoolPacker

__all__ = [
    "Collator",
    "LoaderConfig",
    "PackedBatch",
    "PackedDataset",
    "PackedLoader",
    "PackedTaskEncoder",
    "Packer",
    "PaddingFreeCollator",
    "PoolPacker",
    "get_packed_loader",
]
