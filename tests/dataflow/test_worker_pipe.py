"""What worker processes send."""

from dataclasses import fields

import numpy as np
import torch

from energon_packed import DataflowLoader, MapDistributor
from energon_packed.dataflow.torch_workers import _as_arrays, as_tensors
from tests.dataflow.flows import FEATURES


def test_small_tensors_take_the_pipe_of_their_worker() -> None:
    batch = next(iter(DataflowLoader(MapDistributor(FEATURES), batch_size=2)))
    names = [one.name for one in fields(batch) if isinstance(getattr(batch, one.name), torch.Tensor)]
    assert "input_ids" in names
    _as_arrays(batch)
    assert all(isinstance(getattr(batch, name), np.ndarray) for name in names)
    as_tensors(batch)
    assert all(isinstance(getattr(batch, name), torch.Tensor) for name in names)
