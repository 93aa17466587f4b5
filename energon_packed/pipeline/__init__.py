"""The offline pipeline: files of records to shards, indexes, packing.json, lengths.parquet and rejects.jsonl.

    sources ─► measure (chunks, parallel) ─► plan (all lengths at once) ─► write (shards, parallel) ─► index, manifest

run.py calls the stages in stages/: measure.py (with reader.py; measured/ has its files), plan.py (groups.py,
rejects.py, reports.py), media/stored.py, write.py (with samples.py, media/locator.py), index.py. media/materialize.py
copies referenced images into tars. output/: the output folder, its lock, fingerprints and progress. options.py
declares PackOptions; config_file.py reads it from YAML. encoders.py: the encoder of every process. engine.py,
ray_engine.py: processes. survey.py: lengths alone.
Every stage writes complete files, in a folder named by the fingerprint of everything that changes its result, so a run
can be killed at any moment, and a second run reuses the files that exist.
"""

from energon_packed.pipeline.engine import Progress
from energon_packed.pipeline.media.materialize import materialize
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.run import PackResult, pack
from energon_packed.pipeline.survey import DryRun, dry_run

__all__ = ["DryRun", "PackOptions", "PackResult", "Progress", "dry_run", "materialize", "pack"]
