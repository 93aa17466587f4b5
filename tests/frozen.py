"""Import this, and loaders of tests begin and end fast.

Each loader of Energon collects and freezes what there is at its start, and unfreezes it at its end; so does each of
its worker processes. The next one then looks through some hundred thousand objects of torch and Transformers again:
0.3 s of CPU a process. Here frozen objects stay frozen, and garbage among them is collected at every 16th end.

Workers of a loader that is collected as garbage are killed: the thread that would tell them to end may be gone by
then, so torch waits up to 5 s for each.
"""

import gc
import itertools
from typing import Any

from torch.utils.data import _utils, dataloader

_unfreeze = gc.unfreeze
_ended = itertools.count(1)
_Iterator: Any = dataloader._MultiProcessingDataLoaderIter
_delete = _Iterator.__del__


def freeze() -> None:
    """What there is now stays."""
    gc.collect()
    gc.freeze()


def _unfreeze_at_times() -> None:
    if next(_ended) % 16 == 0:
        _unfreeze()
        freeze()


def _kill_and_delete(iterator: Any) -> None:
    if getattr(iterator, "_worker_pids_set", False):
        _utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
    _delete(iterator)


gc.unfreeze = _unfreeze_at_times
_Iterator.__del__ = _kill_and_delete
