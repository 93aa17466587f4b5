"""Files with a loader state: the state, or Megatron's dict around it, by `torch.save`. Nothing in one is executed."""

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from energon_packed.errors import BatchError

MEGATRON_KEY = "dataloader_state_dict"
"""Where Megatron-LM and Megatron-Bridge put the state in `train_dataloader_dprank000.pt`."""


class StateFile(NamedTuple):
    """What a file holds.

    Attributes:
        state: of a loader of one rank.
        megatron: it lies in Megatron's dict.
    """

    state: dict[str, Any]
    megatron: bool


def read_state(file: Path) -> StateFile:
    """The state in a file.

    Raises:
        BatchError: the file is damaged, or does not hold a state of this package; the message begins with its path.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BatchError(
            f"{file} holds objects, as Energon's own loader saves them, and not the plain dict that a loader of "
            "energon-packed saves; continue with the loader that saved it, or start without the state"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BatchError(f"{file} is damaged ({reason}); use an earlier checkpoint") from error
    megatron = isinstance(content, dict) and MEGATRON_KEY in content
    state = content[MEGATRON_KEY] if megatron else content
    if not isinstance(state, dict) or "version" not in state:
        raise BatchError(f"{file} holds no state of a loader of energon-packed; pass the file that Megatron saved")
    return StateFile(state, megatron)


def write_state(file: Path, content: StateFile) -> None:
    """Write a state; the file appears under its name when it is complete."""
    partial = file.with_name(file.name + ".partial")
    torch.save({MEGATRON_KEY: content.state} if content.megatron else content.state, partial)
    partial.replace(file)
