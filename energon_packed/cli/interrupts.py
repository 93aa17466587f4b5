"""Ctrl-C, SIGTERM and SIGHUP: the first one ends a command in order, later ones do not disturb that."""

import atexit
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_PATIENCE = 3.0  # seconds after which another signal ends the process at once
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupts:
    """Raises KeyboardInterrupt at the first signal; a context manager.

    A second Ctrl-C within some seconds is taken for the same wish: while workers are ended and temporary files
    removed, it would only leave things behind. After that it ends the process at once. Signals that are ignored, as
    SIGHUP is under nohup, stay so.
    """

    def __init__(self) -> None:
        self.number = signal.SIGINT
        self._since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """Exit status, as of a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    @property
    def message(self) -> str:
        """What ended the command, and how to go on."""
        by = "" if self.number == signal.SIGINT else f" by {self.number.name}"
        return f"interrupted{by}; run the same command again to resume"

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._since is None:
            for number, before in self._before.items():
                signal.signal(number, before)
        if self._before:
            atexit.register(_ignore)  # what is done is done; before the exit functions of libraries, such as Ray's

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self.number = now, signal.Signals(number)
            raise KeyboardInterrupt
        if now - self._since > _PATIENCE:
            os._exit(self.status)


def _ignore() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
