"""Progress of a run: a bar per stage on a terminal, a line a minute elsewhere, and one line when a stage is done."""

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from energon_packed.pipeline.engine import Progress

_INTERVAL = 60.0  # seconds between two lines


class TerminalProgress(Progress):
    """A bar with rate and time left for each stage; without a terminal, a line a minute with the same.

    Args:
        console: what is printed on.
        interval: seconds between two lines.
    """

    def __init__(self, console: Console, interval: float = _INTERVAL) -> None:
        self._console = console
        self._interval = interval
        self._bar: Bar | None = None
        self._done = threading.Event()
        self._ticker: threading.Thread | None = None
        self._task = TaskID(0)
        self._stage = self._unit = ""
        self._total = self._units = self._records = 0
        self._begin = 0.0

    def start(self, stage: str, total: int, unit: str) -> None:
        """Draw a new bar, or begin to print lines."""
        self.stop()
        self._stage, self._unit, self._total = stage, unit, total
        self._units = self._records = 0
        self._begin = time.perf_counter()
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description:8}"),
                BarColumn(bar_width=32),
                TextColumn("{task.percentage:>3.0f}%  {task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(stage, total=max(total, 1), note="")
            self._bar.start()
        else:
            self._done.clear()
            self._ticker = threading.Thread(target=self._tell_often, name="energon-packed progress", daemon=True)
            self._ticker.start()

    def advance(self, units: int, records: int = 0) -> None:
        """Move the bar."""
        self._units += units
        self._records += records
        if self._bar is not None:
            self._bar.update(self._task, completed=self._units, note=f"{self._count():,} {self._unit}{self._rate()}")

    def finish(self, seconds: float) -> None:
        """Replace the bar by one line."""
        self.stop()
        count = self._count()
        rate = f"{count / seconds:>12,.0f}/s" if seconds > 0 and count else ""
        self._console.print(f"{self._stage:8} {count:>12,} {self._unit:8} {seconds:>8.1f} s {rate}", highlight=False)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._ticker is not None:
            self._done.set()
            self._ticker.join()
            self._ticker = None

    def tell(self) -> None:
        """Print the line of this moment."""
        share = self._units / max(self._total, 1)
        elapsed = time.perf_counter() - self._begin
        left = f", about {duration(elapsed * (1 - share) / share)} left" if 0 < share <= 1 else ""
        self._console.print(
            f"{self._stage:8} {share:>4.0%} {self._count():,} {self._unit}{self._rate()}, {duration(elapsed)}{left}",
            highlight=False,
            soft_wrap=True,
        )

    def _tell_often(self) -> None:
        """Print lines from a thread: one task may run for longer than a minute, and says nothing meanwhile."""
        while not self._done.wait(self._interval):
            self.tell()

    def _rate(self) -> str:
        elapsed = time.perf_counter() - self._begin
        return f", {self._count() / elapsed:,.0f}/s" if elapsed > 0.5 and self._count() else ""

    def _count(self) -> int:
        return self._records or self._units


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
