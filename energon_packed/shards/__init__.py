"""The on-disk format: packs as tar members, the tar index, `.nv-meta`, and the manifest `packing.json`.

layouts/      which parts a pack of each flavor has, written and read
tar.py        deterministic tar files
index.py      `.tar.idx` and `index.sqlite`, as `energon prepare` makes them
nv_meta.py    dataset.yaml, split.yaml, sample_loader.py, .info.json
manifest.py   packing.json: what was packed, with what, and the hashes of the shards
steps.py      steps per epoch on each rank
"""

from energon_packed.shards.manifest import PackingManifest, ShardEntry
from energon_packed.shards.steps import steps_per_epoch

__all__ = ["PackingManifest", "ShardEntry", "steps_per_epoch"]
