"""accelerate's DataLoaderDispatcher reads on process 0 and cuts tensors in equal parts: no packed row can be cut."""

import inspect
from types import FrameType

from energon_packed.errors import ConfigError

_DISPATCHER = ("accelerate.data_loader", "DataLoaderDispatcher")


def refuse_dispatch() -> None:
    """Raise where accelerate's DataLoaderDispatcher is calling.

    A batch of packs is one row, with boundaries and pixels of other lengths than the row, so it cannot be cut into a
    part for each process. The dispatcher is found among the callers, on every process, before anything is read.

    Raises:
        ConfigError: it is; the message says what to write.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        kinds = type(caller).__mro__ if caller is not None else ()
        if any((kind.__module__, kind.__name__) == _DISPATCHER for kind in kinds):
            raise ConfigError(
                "`dispatch_batches` is True: it reads on process 0 and cuts every tensor of a batch in equal parts; "
                "a packed row cannot be cut: set Accelerator(dataloader_config=DataLoaderConfiguration("
                "dispatch_batches=False)), or accelerator_config={'dispatch_batches': False} in TrainingArguments"
            )
        frame = frame.f_back
