"""The offline pipeline, in stages that can be killed at any moment and run again.

Input: files of records and `PackOptions`. Output: shards, indexes and packing.json in `output_dir`, with
lengths.parquet and rejects.jsonl:

    sources ─► measure (chunks, parallel) ─► plan (all lengths at once) ─► write (shards, parallel) ─► index, manifest

Every stage writes complete files, in a folder named by the fingerprint of everything that changes its result. A second
run reuses the files that exist, and another `seq_len` is planned without measuring again.

run.py       pack(): the stages in order; run_status()    options.py    PackOptions, declared once
reader.py    records as conversations                     config_file.py  options in YAML
measure.py   lengths, one chunk per task                  encoders.py   the encoder of every process
chunks.py    the files of measured chunks                 run_state.py  objects and fingerprints of a run
table.py     all chunks in memory                         workspace.py  the output folder and its lock
plan.py      rejects, packs and shards                    engine.py     local processes, progress
rejects.py   the report of rejects and its limits         ray_engine.py the processes of a Ray cluster
write.py     shards, .nv-meta and packing.json            survey.py     lengths alone; dry runs
"""

from energon_packed.pipeline.engine import Progress
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.run import PackResult, pack
from energon_packed.pipeline.survey import DryRun, dry_run

__all__ = ["DryRun", "PackOptions", "PackResult", "Progress", "dry_run", "pack"]
