"""The offline build: measure, plan, write, as stages that can be stopped at any moment and run again.

    sources ─► measure (chunks, parallel) ─► plan (all lengths at once) ─► write (shards, parallel) ─► index, manifest

Every stage leaves whole files under a name that holds the fingerprint of all that decides its result, so a second run
takes up what is there, and another `seq_len` plans anew without measuring again.
"""

from energon_packed.build.options import PackOptions
from energon_packed.build.pipeline import PackResult, pack
from energon_packed.build.progress import Progress

__all__ = ["PackOptions", "PackResult", "Progress", "pack"]
