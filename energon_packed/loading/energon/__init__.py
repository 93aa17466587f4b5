"""Energon's datasets: the order of `get_packed_loader`, and the four roles as hooks of Energon's own loader.

packed_loader.py   get_packed_loader
epoch_dataset.py   Energon's dataset of an epoch
pack_reader.py     WholePacks: a pack by one read of its bytes, in place of Energon's readers
task_encoder.py    PackedTaskEncoder: Energon's hooks, each a call of a role
ranks.py           number of packs in an epoch, and in each worker
faults.py          errors that name the damaged file, or the pack
states.py          states of Energon's datasets as plain values
"""
