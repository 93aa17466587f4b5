"""The four roles under Energon: a packed dataset to batches, through Energon's own loader.

packed_loader.py   get_packed_loader, with config.py: LoaderConfig, LoaderSettings
loader.py          PackedLoader: epochs and states
source.py          EnergonSource: Energon's dataset of an epoch
pack_reader.py     WholePacks: a pack by one read of its bytes, in place of Energon's readers
task_encoder.py    PackedTaskEncoder: Energon's hooks, each a call of a role
ranks.py           number of steps with which all ranks end an epoch together
faults.py          errors that name the damaged file
states.py          loader states as plain values, in files, and for other ranks
"""
