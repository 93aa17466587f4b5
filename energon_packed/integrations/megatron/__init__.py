"""A packed dataset to the iterators and batches of Megatron-Bridge and Megatron-LM.

| module | content |
|---|---|
| provider.py | train_valid_test_dataloaders_provider for `pretrain` |
| layouts.py | megatron_batch: the dictionaries that the training steps read |
| restore.py | MegatronIterator, and the file with its state in a checkpoint |
| ranks.py | the rank of this process, and checks of parallelism |
"""

from energon_packed.integrations.megatron.layouts import LAYOUTS, Layout, VisualInputs, megatron_batch
from energon_packed.integrations.megatron.provider import train_valid_test_dataloaders_provider
from energon_packed.integrations.megatron.restore import MegatronIterator

__all__ = [
    "LAYOUTS",
    "Layout",
    "MegatronIterator",
    "VisualInputs",
    "megatron_batch",
    "train_valid_test_dataloaders_provider",
]
