"""The training side: packed datasets or raw records in, padding-free PackedBatches and resumable loader states out.

    items ──► Distributor ──► Processor ──► EncodedSample ──► Packer ──► group ──► Collator ──► PackedBatch

Roles: distributors/, process.py, packers/, collation/ (and the batch). Datasets: datasets/ (packs, map-style),
sampler.py (indices for ranks). Loaders: dataflow/ (the loader, and its settings for raw records), energon/ (Energon's
datasets, and the loader of their order), joint.py (several loaders), loaders.py (base class). Shared: order.py (item
of each rank and step), permutation.py (its shuffle), state.py, ranks.py, resharding.py (tools that would shard again),
failures.py, sample_errors.py. Reports: monitoring/ (metrics, past order, future order). Notebooks: notebook.py (a row
as HTML).
"""

from energon_packed.libraries import check_energon

check_energon()  # before modules of this folder import Energon
