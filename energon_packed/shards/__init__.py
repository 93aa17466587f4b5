"""The files of a dataset around its packs: tars, their indexes, and `.nv-meta`. Codecs (`formats`) define the packs.

Writing, in the order of `pack`: tar.py (parts of packs to a deterministic tar), index.py (`.tar.idx`, `index.sqlite`),
nv_meta.py (dataset.yaml, sample_loader.py, split.yaml, .info.json), media_yaml.py (media.yaml, for datasets with
references), manifest.py (packing.json), loading_code.py (Python lines that load the dataset).
Reading: reader.py (pack index to parts, by `.tar.idx`), counts.py (compares the counts in `.nv-meta` with the files),
steps.py (pack counts to steps per epoch of each rank). Existing tars: scan.py (members and faults), repair.py
(`energon-packed nv-meta`). standalone_loader.py is copied into datasets for other packages.
"""

from energon_packed.shards.manifest import PackingManifest, ShardEntry

__all__ = ["PackingManifest", "ShardEntry"]
