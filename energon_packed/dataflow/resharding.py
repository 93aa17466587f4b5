"""A loader that gives each rank its own part must not be split over ranks once more, which loses data silently."""

import inspect
from types import FrameType
from typing import Any

from energon_packed.errors import ConfigError

_SPLIT_AGAIN = {"IterableDatasetShard", "DataLoaderDispatcher"}


def refuse_second_split(world_size: int) -> None:
    """Raise where accelerate's or Transformers' wrapper of iterable data, which splits it over processes, is calling.

    These wrappers know nothing of ranks inside the data: IterableDatasetShard keeps every n-th item of each process's
    own part (`dispatch_batches=False`), DataLoaderDispatcher reads on process 0 only (`dispatch_batches=True`). Both
    classes are found among the callers.

    Args:
        world_size: of the loader; 1 gives everything to every process, and splitting it once is right.

    Raises:
        ConfigError: the data is split twice; the message says what to write.
    """
    if world_size == 1:
        return
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller: Any = frame.f_locals.get("self") if frame.f_code.co_name in ("__iter__", "_fetch_batches") else None
        name = next((one.__name__ for one in type(caller).__mro__ if one.__name__ in _SPLIT_AGAIN), None)
        if name is not None and _processes(caller) > 1:
            raise ConfigError(
                f"the loader gives each of {world_size} ranks its own packs, and {type(caller).__module__}.{name} "
                "splits them over ranks again, which loses the rest: do not pass the loader to accelerator.prepare or "
                "Trainer (iterate it directly, and move each batch to the device), use PackedDataset there, or make "
                "the loader with rank=0, world_size=1"
            )
        frame = frame.f_back


def _processes(caller: Any) -> int:
    state = getattr(caller, "state", caller)
    found: Any = getattr(state, "num_processes", None) or getattr(caller, "world_size", 1)  # ms-swift has the latter
    return int(found)
