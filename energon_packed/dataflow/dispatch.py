"""A DataLoaderDispatcher reads on process 0 for all processes: packed rows cannot be cut, and ranks have their own."""

import inspect
from types import FrameType

from energon_packed.errors import ConfigError

_DISPATCHER = "DataLoaderDispatcher"


def refuse_dispatch() -> None:
    """Raise where a DataLoaderDispatcher, of accelerate or of ms-swift, is calling.

    It reads on process 0 for all. A batch of packs is one row, with boundaries and pixels of other lengths than the
    row, so accelerate's cannot cut it into a part for each process; ms-swift's would give every process rows of rank 0
    alone. It is found among the callers, on every process, before anything is read.

    Raises:
        ConfigError: it is; the message says what to write.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        kinds = type(caller).__mro__ if caller is not None else ()
        module = next((kind.__module__ for kind in kinds if kind.__name__ == _DISPATCHER), None)
        if module is not None and not module.startswith("accelerate."):
            raise ConfigError(
                f"{module}.{_DISPATCHER} reads on process 0 for all, and this data gives each process its own rows: "
                "pass a PackedDataset, or a loader made with rank=0, world_size=1"
            )
        if module is not None:
            raise ConfigError(
                "`dispatch_batches` is True: it reads on process 0 and cuts every tensor of a batch in equal parts; "
                "a packed row cannot be cut: set Accelerator(dataloader_config=DataLoaderConfiguration("
                "dispatch_batches=False)), or accelerator_config={'dispatch_batches': False} in TrainingArguments"
            )
        frame = frame.f_back
