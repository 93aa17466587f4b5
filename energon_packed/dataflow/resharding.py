"""What another tool would read for all ranks, or split over them again: rows and data are lost without an error.

Nothing is passed to a dataset that tells. The tools are found among the callers, by the names of their classes:

    IterableDatasetShard    accelerate, Transformers: keeps every n-th item of the part that a rank has already
    DataLoaderDispatcher    reads on process 0; accelerate's cuts every tensor in equal parts, ms-swift's gives all of
                            them rows of process 0
"""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

from energon_packed.errors import ConfigError

_DISPATCHER = "DataLoaderDispatcher"
_SHARD = "IterableDatasetShard"
_READING = ("__iter__", "_fetch_batches")


def refuse_second_split(world_size: int) -> None:
    """Raise where a class that splits data over processes reads a loader that gives each rank its own.

    Args:
        world_size: of the loader; 1 gives everything to every process, and splitting it once is right.

    Raises:
        ConfigError: the data is split twice; the message says what to write.
    """
    if world_size == 1:
        return
    for method, caller, kind in _callers(_SHARD, _DISPATCHER):
        if method in _READING and _processes(caller) > 1:
            raise ConfigError(
                f"the loader gives each of {world_size} ranks its own packs, and {type(caller).__module__}."
                f"{kind.__name__} splits them over ranks again, which loses the rest: do not pass the loader to "
                "accelerator.prepare or Trainer (iterate it directly, and move each batch to the device), use "
                "PackedDataset there, or make the loader with rank=0, world_size=1"
            )


def refuse_dispatch() -> None:
    """Raise where a dispatcher is calling, on every process, before anything is read.

    A batch of packs is one row, with boundaries and pixels of other lengths than the row: it cannot be cut.

    Raises:
        ConfigError: the message says what to write.
    """
    for _, _, kind in _callers(_DISPATCHER):
        if kind.__module__.startswith("accelerate."):
            raise ConfigError(
                "`dispatch_batches` is True: it reads on process 0 and cuts every tensor of a batch in equal parts; "
                "a packed row cannot be cut: set Accelerator(dataloader_config=DataLoaderConfiguration("
                "dispatch_batches=False)), or accelerator_config={'dispatch_batches': False} in TrainingArguments"
            )
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} reads on process 0 for all, and this data gives each process its own "
            "rows: pass a PackedDataset, or a loader made with rank=0, world_size=1"
        )


def _callers(*names: str) -> Iterator[tuple[str, Any, type]]:
    """(method, object, its class of one of these names) of every method that is running, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        kind = next((one for one in type(caller).__mro__ if one.__name__ in names), None)
        if kind is not None:
            yield frame.f_code.co_name, caller, kind
        frame = frame.f_back


def _processes(caller: Any) -> int:
    state = getattr(caller, "state", caller)
    found: Any = getattr(state, "num_processes", None) or getattr(caller, "world_size", 1)  # ms-swift has the latter
    return int(found)
