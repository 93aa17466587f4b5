"""Megatron-Bridge and Megatron-LM.

layouts.py   the dictionaries that their training steps read
iterator.py  MegatronIterator: the endless iterator whose state goes into their checkpoints
provider.py  train_valid_test_dataloaders_provider; ordered_loader: its loader in the global order
ranks.py     ranks of this process, and settings that would be wrong there
restore.py   the file with the loader state of this rank in a checkpoint
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
