"""The training side: packs become padding-free batches.

    items ──► Distributor ──► Processor ──► EncodedSample ──► Packer ──► group ──► Collator ──► PackedBatch

batch.py          PackedBatch and its forms for frameworks
collator.py       Collator, PaddingFreeCollator; features.py: ordinary features
distributors/     which items a rank and worker reads; share.py: its share
elastic.py        the rest of an epoch for other ranks or workers; reweighted.py: for other weights
packers/          which samples share a row
balance.py        ranks of one step get rows of similar cost
process.py        items to encoded samples; packs to encoded samples
torch_loader.py   DataflowLoader: the roles under torch, by torch_options.py, torch_workers.py and worker_stream.py
transport.py      how batches travel from worker processes: small tensors as bytes, several steps in one message
config.py         DataflowConfig: raw records, for the next two
packed_iterable.py  PackedIterableDataset: packed on the fly
planned_dataset.py  plan_in_memory: planned at start, map-style
joint_loader.py   JointLoader: several loaders, one state
order_log.py      which samples each step used, and the proof; replay.py: which ones a step will use
metrics.py        FlowMetrics
dataset.py        PackedDataset: finished shards and blends (blend.py) map-style; steps.py: steps per epoch
manifests.py      what the manifests of a dataset or Metadataset say
trust.py          code of a dataset is refused before Energon runs it
failures.py       samples that fail to load
state.py          loader states; epochs.py: where an epoch ends
process_group.py  torch.distributed; resharding.py: data that another tool would split over ranks again
energon/          the same roles under Energon, and its loader
"""

from energon_packed.dataflow.balance import BalancedSampler
from energon_packed.dataflow.batch import PackedBatch
from energon_packed.dataflow.collator import Collator, PaddingFreeCollator
from energon_packed.dataflow.config import DataflowConfig
from energon_packed.dataflow.dataset import PackedDataset
from energon_packed.dataflow.distributors import (
    Distributor,
    EnergonDistributor,
    Item,
    IterableDistributor,
    MapDistributor,
    MixtureDistributor,
    RankPartitioned,
)
from energon_packed.dataflow.energon import LoaderConfig, PackedLoader, PackedTaskEncoder, get_packed_loader
from energon_packed.dataflow.joint_loader import JointLoader
from energon_packed.dataflow.metrics import FlowMetrics
from energon_packed.dataflow.packed_iterable import PackedIterableDataset, get_raw_loader
from energon_packed.dataflow.packers import (
    BalancedPoolPacker,
    Packer,
    PlannedPacker,
    PoolPacker,
    SequentialPacker,
    SimpleBatcher,
)
from energon_packed.dataflow.planned_dataset import PlannedDataset, plan_in_memory
from energon_packed.dataflow.share import Share
from energon_packed.dataflow.state import gather_state
from energon_packed.dataflow.steps import steps_per_epoch
from energon_packed.dataflow.torch_loader import DataflowLoader

__all__ = [
    "BalancedPoolPacker",
    "BalancedSampler",
    "Collator",
    "DataflowConfig",
    "DataflowLoader",
    "Distributor",
    "EnergonDistributor",
    "FlowMetrics",
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
    "RankPartitioned",
    "SequentialPacker",
    "Share",
    "SimpleBatcher",
    "gather_state",
    "get_packed_loader",
    "get_raw_loader",
    "plan_in_memory",
    "steps_per_epoch",
]
