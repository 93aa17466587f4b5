"""The training side: items and packs become padding-free batches.

    items ──► Distributor ──► Processor ──► EncodedSample ──► Packer ──► group ──► Collator ──► PackedBatch

Roles: distributors/ (which items), process.py (encoded samples), packers/ (which samples share a row), collator.py,
batch.py (the row, and its forms for frameworks). Order of items with known packs: order.py. Loaders: dataflow/
(torch), energon/ (Energon), dataset.py (packed folders, map-style), raw_records.py (records, streamed or planned),
joint.py. Shared by all: state.py, failures.py, ranks.py, manifests.py, trust.py, order_log.py, replay.py, metrics.py.
"""

from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.collator import Collator, PaddingFreeCollator
from energon_packed.loading.config import DataflowConfig
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.dataset import BalancedSampler, PackedDataset
from energon_packed.loading.distributors import (
    Distributor,
    EnergonDistributor,
    FileShardDistributor,
    Item,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
)
from energon_packed.loading.energon import LoaderConfig, PackedLoader, PackedTaskEncoder, get_packed_loader
from energon_packed.loading.joint import JointLoader
from energon_packed.loading.manifests import steps_per_epoch
from energon_packed.loading.metrics import ThroughputMetrics
from energon_packed.loading.packers import (
    BalancedPoolPacker,
    Packer,
    PlannedPacker,
    PoolPacker,
    SequentialPacker,
    SimpleBatcher,
)
from energon_packed.loading.ranks import ShardSpec
from energon_packed.loading.raw_records import PackedIterableDataset, PlannedDataset, get_raw_loader, plan_in_memory
from energon_packed.loading.state import gather_state

__all__ = [
    "BalancedPoolPacker",
    "BalancedSampler",
    "Collator",
    "DataflowConfig",
    "DataflowLoader",
    "Distributor",
    "EnergonDistributor",
    "FileShardDistributor",
    "Item",
    "IterableDistributor",
    "JointLoader",
    "LoaderConfig",
    "MapDistributor",
    "MixtureDistributor",
    "PackedBatch",
    "PackedDataset",
    "PackedIterableDataset",
    "PackedLoader",
    "PackedTaskEncoder",
    "Packer",
    "PaddingFreeCollator",
    "PlannedDataset",
    "PlannedPacker",
    "PoolPacker",
    "SequentialPacker",
    "ShardSpec",
    "SimpleBatcher",
    "ThroughputMetrics",
    "gather_state",
    "get_packed_loader",
    "get_raw_loader",
    "plan_in_memory",
    "steps_per_epoch",
]
