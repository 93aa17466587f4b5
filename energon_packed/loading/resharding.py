"""Tools that would shard or dispatch the data a second time: errors before anything is lost.

| function | error |
|---|---|
| `check_not_resharded` | for tools that keep a part of the data of each process |
| `refuse_dispatch`, `is_dispatched`, `dispatch_refusal` | for tools that read on process 0 for all processes |

Sharding twice loses rows without an error. Neither torch nor accelerate (all releases until 1.15) nor ms-swift (until
4.6) informs a dataset about its reader: its methods get no argument of it, and `GradientState.active_dataloader` of
accelerate also names a loader in the body of its loop and after a `break`, in which other data may be read. So the
tools are searched among the callers, by the names of their classes:

    IterableDatasetShard    accelerate, Transformers: keeps every n-th item of a shard that belongs to one rank already
    DataLoaderDispatcher    reads on process 0; accelerate's version cuts every tensor in equal parts, the version of
                            ms-swift sends rows of process 0 to all processes

`accelerator.prepare` itself returns a loader unchanged that has the attribute `_is_accelerate_prepared`, as
DataflowLoader and `integrations.accelerate.PreparedLoader` have; the latter checks that it does so.

`tests/loading/test_places.py` splits and dispatches loaders by accelerate, and `tests/trainers/ms_swift` dispatches
one by ms-swift: these tests fail if a class has another name, or leaves loaders alone that are sharded already.
"""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch

from energon_packed.errors import ConfigError
from energon_packed.loading.ranks import group_place

_DISPATCHER = "DataLoaderDispatcher"
_SHARD = "IterableDatasetShard"
_ACCELERATE = "accelerate."
DISPATCHED = (
    "`dispatch_batches=True` splits tensors between processes, which breaks packed rows. Pass "
    "DataLoaderConfiguration(dispatch_batches=False), or accelerator_config={'dispatch_batches': False} in "
    "TrainingArguments."
)
_READING = ("__iter__", "_fetch_batches")  # methods that read data; others, such as __len__, are harmless


def check_not_resharded(world_size: int) -> None:
    """Raise if a class that shards data over processes reads a loader that is sharded already.

    Args:
        world_size: world size of the loader; with 1, every process has all data, and sharding it once is right.

    Raises:
        ConfigError: the data is sharded twice; the message names the remedies.
    """
    if world_size == 1:
        return
    for method, caller, kind in _callers(_SHARD, _DISPATCHER):
        if method in _READING and _processes(caller) > 1:
            raise ConfigError(
                f"This loader is already sharded over {world_size} ranks; {type(caller).__module__}.{kind.__name__} "
                "would shard it again and drop data. Iterate it directly, use PackedDataset instead, or create it "
                "with rank=0, world_size=1."
            )


def refuse_dispatch() -> None:
    """Raise if a dispatcher is calling, on every process, before anything is read.

    A batch of packs is one row, and its boundaries and pixels are longer or shorter than the row: it cannot be cut.

    Raises:
        ConfigError: the message names the remedies.
    """
    for _, _, kind in _callers(_DISPATCHER):
        if kind.__module__.startswith(_ACCELERATE):
            raise ConfigError(DISPATCHED)
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} reads on process 0 for all ranks, but this loader is sharded over "
            "ranks. Pass a PackedDataset, or a loader created with rank=0, world_size=1."
        )


class DispatchRefusal:
    """Stand-in for a batch that a dispatcher of accelerate reads: unpickling it raises the error of `refuse_dispatch`.

    Only process 0 calls a collator, perhaps in a worker process, and the other processes wait for its batch. So a
    worker returns this object to process 0, and process 0 sends it to the other processes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_dispatched, ()


def dispatch_refusal() -> DispatchRefusal | None:
    """Refuse a dispatcher of accelerate that reads the batch of this call; None without a dispatcher.

    Raises:
        ConfigError: on every process. A worker process returns the refusal instead, and its receiver raises.
    """
    if not is_dispatched():
        return None
    return _raise_dispatched() if torch.utils.data.get_worker_info() is None else DispatchRefusal()


def is_dispatched() -> bool:
    """Return whether a dispatcher of accelerate is among the callers, also if this is a forked worker process."""
    return any(kind.__module__.startswith(_ACCELERATE) for _, _, kind in _callers(_DISPATCHER))


def _raise_dispatched() -> NoReturn:
    rank, world_size = group_place()
    if world_size > 1 and rank == 0:
        torch.distributed.broadcast_object_list([DispatchRefusal(), True])  # the structure of a batch, and the end
    raise ConfigError(DISPATCHED)


def _callers(*names: str) -> Iterator[tuple[str, Any, type]]:
    """(method, object, matching class) of every running method of these classes, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        # By name along the MRO, as importing accelerate or ms-swift to compare classes would cost seconds.
        kind = next((base for base in type(caller).__mro__ if base.__name__ in names), None)
        if kind is not None:
            yield frame.f_code.co_name, caller, kind
        frame = frame.f_back


def _processes(caller: Any) -> int:
    """Number of processes that a tool shards over."""
    state = getattr(caller, "state", caller)
    count: Any = getattr(state, "num_processes", None) or getattr(caller, "world_size", 1)  # ms-swift has the latter
    return int(count)
