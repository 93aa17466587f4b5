"""The training side: packs become padding-free batches.

    items ──► Distributor ──► Processor ──► EncodedSample ──► Packer ──► group ──► Collator ──► PackedBatch

batch.py          PackedBatch and its forms for frameworks
collator.py       Collator, PaddingFreeCollator, dummy images of rows without images; features.py: ordinary features
order.py          the one order of an epoch for all ranks; planned_steps.py: its steps, position (epoch, step)
distributors/     which items a rank and worker reads; share.py: worker shards of a stream
stream_steps.py   steps of a stream, position in each worker shard; worker_stream.py: one worker shard
packers/          which samples share a row
balance.py        BalancedSampler: the ranks of a step get rows of similar cost
process.py        items and packs to encoded samples
torch_loader.py   DataflowLoader: the roles under torch; torch_options.py, torch_workers.py, worker_errors.py
transport.py      how batches travel from worker processes: small tensors as bytes, several steps in one message
config.py         DataflowConfig: raw records, for the next two; work_folder.py: its temporary folder
packed_iterable.py  PackedIterableDataset: packed on the fly
planned_dataset.py  plan_in_memory: planned at start, map-style
joint_loader.py   JointLoader: several loaders, one state
order_log.py      the samples of each step, and the check of all steps; replay.py: the samples of a later step
metrics.py        FlowMetrics
dataset.py        PackedDataset: finished shards and blends (blend.py), map-style; hf_dataset.py: as datasets.Dataset
steps.py          steps_per_epoch; manifests.py: the manifests of a dataset or Metadataset
opened.py         raises if a dataset changes while it is open
trust.py          code of a dataset is refused before Energon runs it
failures.py       samples that fail to load
state.py          the one form of loader states; epochs.py: the end of an epoch
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
