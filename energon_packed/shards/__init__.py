"""The files of a dataset around its packs: tars, their indexes, and `.nv-meta`. Codecs (`formats`) define the packs.

Writing, in the order of `pack`:

    tar.py        parts of packs to a deterministic tar, and the index rows of that tar
    index.py      index rows to `.tar.idx` and `index.sqlite`, as `energon prepare` writes them
    nv_meta.py    dataset.yaml, sample_loader.py, split.yaml, .info.json; finds the folder and the shards of a split
    manifest.py   packing.json: counts, settings and hashes

Reading:

    reader.py     pack index to the parts of a pack, by `.tar.idx`; detects files that changed while open
    counts.py     compares the counts in `.nv-meta` with the files; counts datasets without packing.json
    steps.py      pack counts to steps per epoch on each rank

Existing tars:

    scan.py       tar to its members and the faults that Energon would not report
    repair.py     folder of tars to `.tar.idx` and `.nv-meta` (`energon-packed nv-meta`)

`standalone_loader.py` is copied into datasets for other packages.
"""

from energon_packed.shards.manifest import PackingManifest, ShardEntry

__all__ = ["PackingManifest", "ShardEntry"]
