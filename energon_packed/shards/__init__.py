"""The on-disk format around the packs: tars, the tar index, `.nv-meta`, and the manifest `packing.json`.

tar.py        deterministic tar files
index.py      `.tar.idx` and `index.sqlite`, as `energon prepare` makes them
nv_meta.py    dataset.yaml, split.yaml, sample_loader.py, .info.json
manifest.py   packing.json: what was packed, with what, and the hashes of the shards; typed.py checks its values
reader.py     any pack by its number, from memory-mapped tars
complete.py   whether the files are as many and as long as they say
scan.py       members of a tar and their faults, by `energon_packed.tarfiles`
split.py      which shards are in a split
repair.py     .nv-meta and indexes for tars that exist already
steps.py      steps per epoch on each rank
"""

from energon_packed.shards.manifest import PackingManifest, ShardEntry

__all__ = ["PackingManifest", "ShardEntry"]
