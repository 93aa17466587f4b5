"""The offline pipeline: measure, plan, write, index, as stages that can be killed at any moment and run again.

    sources ─► measure (chunks, parallel) ─► plan (all lengths at once) ─► write (shards, parallel) ─► index, manifest

Every stage leaves complete files under a name that holds a key of all that decides its result, so a second run reuses
what exists, and another `seq_len` is planned without measuring again.

run.py       pack(): the list of stages         options.py   PackOptions, declared once
measure.py   lengths, by chunks.py              keys.py      what each stage depends on
plan.py      rejects, packs and shards          workspace.py the output folder and its lock
write.py     shards                             engine.py    local processes; ray_engine.py
index.py     .nv-meta and packing.json          survey.py    lengths alone; dry_run.py, what a run would do;
                                                status.py, how far one is
"""

from energon_packed.pipeline.engine import Progress
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.run import PackResult, pack
from energon_packed.pipeline.survey import DryRun, dry_run

__all__ = ["DryRun", "PackOptions", "PackResult", "Progress", "dry_run", "pack"]
