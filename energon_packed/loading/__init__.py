"""The training side: packed datasets or raw records in, padding-free PackedBatches and resumable loader states out.

    items ──► Distributor ──► Processor ──► EncodedSample ──► Packer ──► group ──► Collator ──► PackedBatch

Roles: distributors/, process.py, packers/, collation/ (and the batch). Datasets: dataset.py (packs, map-style),
folder_packs.py (packs of a folder), map_data.py (base class), sampler.py (indices for ranks). Loaders: dataflow/ (the
loader, and its settings for raw records), energon/ (Energon's datasets, and the loader of their order), joint.py
(several loaders), loaders.py (base class). Shared: order.py (item of each rank and step), permutation.py (its
shuffle), state.py, ranks.py, resharding.py (tools that would shard again), manifests.py and trust.py (what a dataset
contains, and that it runs no code), recorded_lengths.py (sizes of its packs), failures.py, sample_errors.py.
Reports: monitoring/ (metrics, past order, future order). Notebooks: notebook.py (a row as HTML).
"""

from energon_packed.libraries import check_energon

check_energon()  # before modules of this folder import Energon
