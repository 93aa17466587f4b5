"""Progress display of a run: counts of completed work in, a bar on a terminal or one line per minute out."""

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from energon_packed.pipeline.engine import Progress

_INTERVAL = 60.0  # seconds between two lines
_MIN_ELAPSED = 0.5  # seconds; earlier rates are noise


class TerminalProgress(Progress):
    """Show a bar with rate and remaining time for each stage; without a terminal, print one line per interval.

    A completed stage is replaced by one line with its count, time and rate.

    Args:
        console: console to print on.
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
        self._started = 0.0

    def start(self, stage: str, total: int, unit: str) -> None:
        """Show a new bar, or start to print lines."""
        self.stop()
        self._stage, self._unit, self._total = stage, unit, total
        self._units = self._records = 0
        self._started = time.perf_counter()
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
            # A thread prints the lines: one task may run for longer than the interval without a call of `advance`.
            self._done.clear()
            self._ticker = threading.Thread(target=self._print_lines, name="energon-packed progress", daemon=True)
            self._ticker.start()

    def advance(self, units: int, records: int = 0) -> None:
        """Add completed work."""
        self._units += units
        self._records += records
        if self._bar is not None:
            self._bar.update(self._task, completed=self._units, note=f"{self._count():,} {self._unit}{self._rate()}")

    def finish(self, seconds: float) -> None:
        """Replace the bar by the line of the completed stage."""
        self.stop()
        count = self._count()
        rate = f"{count / seconds:>12,.0f}/s" if seconds > 0 and count else ""
        self._console.print(f"{self._stage:8} {count:>12,} {self._unit:8} {seconds:>8.1f} s {rate}", highlight=False)

    def stop(self) -> None:
        """Remove the bar, or stop to print lines."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._ticker is not None:
            self._done.set()
            # Joined, so that no line is printed after the line of the completed stage.
            self._ticker.join()
            self._ticker = None

    def _print_lines(self) -> None:
        while not self._done.wait(self._interval):
            share = self._units / max(self._total, 1)
            elapsed = time.perf_counter() - self._started
            left = f", about {duration(elapsed * (1 - share) / share)} left" if 0 < share <= 1 else ""
            done = f"{self._stage:8} {share:>4.0%} {self._count():,} {self._unit}{self._rate()}"
            self._console.print(f"{done}, {duration(elapsed)}{left}", highlight=False, soft_wrap=True)

    def _rate(self) -> str:
        elapsed = time.perf_counter() - self._started
        return f", {self._count() / elapsed:,.0f}/s" if elapsed > _MIN_ELAPSED and self._count() else ""

    def _count(self) -> int:
        """Records, or units of a stage that does not count records (the index, packs of a plan)."""
        return self._records or self._units


def duration(seconds: float) -> str:
    """Format seconds as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
