"""Make loaders start and stop faster in tests: an import patches `gc.unfreeze` and the loader iterator of torch.

Each loader of Energon, and each of its worker processes, collects and freezes all objects at its start and unfreezes
them at its end. The next loader then traverses some hundred thousand objects of torch and Transformers again, which
takes 0.3 s of CPU per process. Here frozen objects stay frozen, and garbage among them is collected at every 16th end.

Workers of a loader that is collected as garbage are killed: the thread that would ask them to stop may no longer
exist, so that torch waits up to 5 s for each worker.
"""

import gc
import itertools
import os
from typing import Any

from torch.utils.data import _utils, dataloader

_unfreeze = gc.unfreeze
_ended = itertools.count(1)
_Iterator: Any = dataloader._MultiProcessingDataLoaderIter
_delete = _Iterator.__del__


def freeze() -> None:
    """Collect garbage, and exclude all remaining objects from later collections."""
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
    if not getattr(iterator, "_shutdown", True):
        for worker in iterator._workers:
            if worker._parent_pid == os.getpid() and worker.is_alive():  # not in a fork of the process
                worker.kill()
    _delete(iterator)


gc.unfreeze = _unfreeze_at_times
_Iterator.__del__ = _kill_and_delete
