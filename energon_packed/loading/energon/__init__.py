"""The four roles under Energon.

packed_loader.py: get_packed_loader, with config.py. loader.py: epochs and state. source.py: Energon's dataset for an
epoch. task_encoder.py: Energon's hooks, each a call of one role. ranks.py: ranks that end an epoch together.
faults.py: errors that name the file. states.py: states as plain values, in Megatron's files, for other ranks.
"""

from energon_packed.loading.energon.config import LoaderConfig
from energon_packed.loading.energon.loader import PackedLoader
from energon_packed.loading.energon.packed_loader import get_packed_loader
from energon_packed.loading.energon.task_encoder import PackedTaskEncoder

__all__ = ["LoaderConfig", "PackedLoader", "PackedTaskEncoder", "get_packed_loader"]
