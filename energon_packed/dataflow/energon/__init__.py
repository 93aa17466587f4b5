"""The four roles under Energon.

packed_loader.py  get_packed_loader
config.py         its settings
loader.py         PackedLoader: epochs and state
source.py         Energon's dataset for an epoch
task_encoder.py   Energon's hooks, each a call of one role
cookers.py        packs from raw parts
ranks.py          ranks that end an epoch together
one_pass.py       an epoch that ends once, also after a restore
faults.py         errors of Energon that name the file; answers.py: waiting for worker processes
fingerprint.py, plain.py   of loader states
redist.py         states for another number of ranks
state_files.py    the files in which Megatron saves states
"""

from energon_packed.dataflow.energon.config import LoaderConfig
from energon_packed.dataflow.energon.loader import PackedLoader
from energon_packed.dataflow.energon.packed_loader import get_packed_loader
from energon_packed.dataflow.energon.task_encoder import PackedTaskEncoder

__all__ = ["LoaderConfig", "PackedLoader", "PackedTaskEncoder", "get_packed_loader"]
