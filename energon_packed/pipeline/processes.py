"""Processes that this machine gives a run."""

import os


def available_cores() -> int:
    """Cores that this process may run on; on systems that cannot tell (macOS), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
