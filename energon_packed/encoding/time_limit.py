"""time_limit: bounds what runs inside it, such as a chat template that never ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """The time is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside the block once it has computed for `seconds`, waiting not counted.

    It uses the virtual alarm of the process (POSIX `setitimer`), which only a main thread can, as that of a worker. In
    other threads, and where the program has an alarm of its own, the block is not bounded.
    """
    if not _is_free():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _is_free() -> bool:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    is_set = signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    return not is_set and signal.getsignal(signal.SIGVTALRM) in (signal.SIG_DFL, signal.SIG_IGN)


def _ring(number: int, frame: object) -> None:
    raise OutOfTime
