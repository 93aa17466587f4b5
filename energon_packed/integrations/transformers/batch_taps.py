"""BatchTap: a value of each batch, computed when the batch is collated -> a callback, when the model has used it.

    collator, perhaps in a worker process    the dict of inputs gets an entry: `make(batch)`
    forward pass of the model                removes the entry from its inputs, and calls `use(value, output)` once

A Trainer passes only a dict to its model, which has no sources and no padding mask, and callbacks do not see it. A
Trainer also reads ahead. The forward pass is the only place in which every Trainer uses each batch once.
"""

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch

from energon_packed.integrations.consumed import Consumed
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.collation.collator import Collator, with_extra

Make = Callable[[PackedBatch | Mapping[str, Any]], Any]


class BatchTap:
    """Pass a value of each training batch to a function.

    Args:
        name: name of the entry in the inputs.
        make: computes the value of a PackedBatch, or of the dict of a collator that is not from this package. Its
            module is imported by worker processes.
        use: called with the value and the output of the model, after each forward pass.
    """

    def __init__(self, name: str, make: Make, use: Callable[[Any, Any], None]) -> None:
        self._name, self._make, self._use = name, make, use
        self._current: Any = None
        self._undo: list[Callable[[], None]] = []

    def attach(self, loader: Any, model: torch.nn.Module) -> None:
        """Add the value to the batches of the training loader of a Trainer, and remove it in the model."""
        self.detach()
        base = getattr(loader, "base_dataloader", loader)
        data = base.dataset
        # The batches of a Consumed are converted in it; `collate_fn` returns them unchanged.
        owner, name = (data, "to_inputs") if isinstance(data, Consumed) else (base, "collate_fn")
        before = getattr(owner, name)
        setattr(owner, name, self._extended(before, of_batch=owner is data))
        hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]
        self._undo = [lambda: setattr(owner, name, before), *(hook.remove for hook in hooks)]

    def detach(self) -> None:
        """Restore loader and model."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _extended(self, convert: Any, *, of_batch: bool) -> Any:
        make = partial(_carried, self._make)
        if isinstance(convert, Collator):
            return with_extra(convert, self._name, make)
        if isinstance(getattr(convert, "data_collator", None), Collator):  # the Trainer removes columns before it
            outer = copy(convert)
            outer.data_collator = with_extra(convert.data_collator, self._name, make)
            return outer
        return partial(_with_entry, convert, self._name, make, of_batch)

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        carried = kwargs.pop(self._name, None)
        # Some trainers call the model twice with the same inputs.
        self._current = carried if carried is not None and not carried.used else None
        return args, kwargs

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._current is not None:
            self._current.used = True
            self._use(self._current.value, output)
            self._current = None


class _Carried:
    """A value that loaders and models pass on as it is: no tensor, tuple or dict.

    Attributes:
        used: a forward pass has used it.
    """

    def __init__(self, value: Any) -> None:
        self.value, self.used = value, False


def _carried(make: Make, batch: Any) -> _Carried:
    return _Carried(make(batch))


def _with_entry(
    convert: Callable[[Any], dict[str, Any]], name: str, make: Callable[[Any], Any], of_batch: bool, batch: Any
) -> dict[str, Any]:
    """Convert a batch to a dict of inputs with an entry more.

    Args:
        convert: returns the dict.
        name, make: the entry.
        of_batch: `make` gets the batch, a PackedBatch, and not the dict.
        batch: to convert.
    """
    inputs = convert(batch)
    return {**inputs, name: make(batch if of_batch else inputs)}
