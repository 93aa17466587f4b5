"""Import this, and loaders of Energon no longer look through all imported modules for garbage.

Each of them collects and freezes what there is at its start, and unfreezes it at its end; so does each of its worker
processes. The next one then looks through some hundred thousand objects of torch and Transformers again: 0.3 s of CPU
a process. Here frozen objects stay frozen, and garbage among them is collected at every 64th end.
"""

import gc
import itertools

_unfreeze = gc.unfreeze
_ended = itertools.count(1)


def freeze() -> None:
    """What there is now stays."""
    gc.collect()
    gc.freeze()


def _unfreeze_at_times() -> None:
    if next(_ended) % 64 == 0:
        _unfreeze()
        freeze()


gc.unfreeze = _unfreeze_at_times
