"""What worker processes send, and how long they hold back the garbage collector."""

import gc
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from energon_packed import DataflowLoader, Distributor, Item, MapDistributor, Share
from energon_packed.dataflow.torch_workers import _as_arrays, as_tensors
from tests.dataflow.flows import FEATURES


class Broken(Distributor):
    def items(self, share: Share, start: Any) -> Iterator[Item]:
        yield Item(0, FEATURES[1 // 0])


def test_small_tensors_take_the_pipe_of_their_worker() -> None:
    batch = next(iter(DataflowLoader(MapDistributor(FEATURES), batch_size=2)))
    names = [one.name for one in fields(batch) if isinstance(getattr(batch, one.name), torch.Tensor)]
    assert "input_ids" in names
    _as_arrays(batch)
    assert all(isinstance(getattr(batch, name), np.ndarray) for name in names)
    as_tensors(batch)
    assert all(isinstance(getattr(batch, name), torch.Tensor) for name in names)


def test_python_collects_garbage_between_batches_and_after_an_error() -> None:
    assert gc.isenabled()
    for _ in DataflowLoader(MapDistributor(FEATURES), batch_size=2):
        assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        list(DataflowLoader(Broken(), batch_size=2))
    assert gc.isenabled()
