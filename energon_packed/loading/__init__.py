"""The training side: packed datasets or raw records in, padding-free PackedBatches and resumable loader states out.

    items ──► Distributor ──► Processor ──► EncodedSample ──► Packer ──► group ──► Collator ──► PackedBatch

Roles: distributors/, process.py, packers/, collator.py. Batch: batch.py, features.py. Datasets: dataset.py (packs,
map-style), raw_records.py and config.py (records, streamed or planned). Loaders: dataflow/ (torch's DataLoader),
energon/ (Energon's loader), joint.py (several loaders). Shared: order.py (item of each rank and step), state.py,
ranks.py, manifests.py and trust.py (what a dataset contains, and that it runs no code), failures.py. Reports:
metrics.py, order_log.py (past order), replay.py (future order).
"""

from energon_packed.loading.batch import PackedBatch, step_targets
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
    "step_targets",
    "steps_per_epoch",
]
