"""The process group of torch.distributed, where there is one, and what its launchers say before there is."""

import os
from typing import Any

import torch


def has_group() -> bool:
    """Whether this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def group_place() -> tuple[int, int]:
    """Rank and number of processes of the group; 0 and 1 without one."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if has_group() else (0, 1)


def launched_processes() -> int:
    """Processes that a launcher (torchrun, accelerate, Lightning) has started, by WORLD_SIZE; 1 without one."""
    launched = os.environ.get("WORLD_SIZE", "")
    return int(launched) if launched.isdecimal() else 1


def of_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """`value` of every process, in the order of ranks: a collective operation. Without a group, this one's alone."""
    if not has_group():
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def of_first_rank(value: Any, group: Any = None) -> Any:
    """`value` of the first process of the group: a float computed on other hardware may differ in its last bit."""
    if not has_group():
        return value
    found = [value]
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast_object_list(found, src=first, group=group)
    return found[0]
