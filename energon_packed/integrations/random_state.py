"""Random states of a reader that are separate from the random states of the training.

Reading ahead moves draws: an uninterrupted run reads batch k + 1 before step k, a resumed run reads it after the
checkpoint of step k. With separate states, the draws of a step (dropout) do not depend on when batches are read.
"""

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class SeparateRandomStates:
    """Context in which torch (CPU), NumPy and Python draw from separate states.

        states = SeparateRandomStates()
        with states:
            batch = next(iterator)      # draws here change no draw outside, and the reverse

    The states continue in the next context. The first context starts with the states of the caller. Device generators
    are not exchanged, as a reader draws no numbers on a device.
    """

    def __init__(self) -> None:
        self._own: tuple[Any, Any, Any] | None = None
        self._outside: tuple[Any, Any, Any]

    def __enter__(self) -> None:
        self._outside = _current()
        if self._own is not None:
            _restore(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._own = _current()
        _restore(self._outside)


def _current() -> tuple[Any, Any, Any]:
    return torch.random.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.random.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
