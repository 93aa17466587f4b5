"""The lines of an order log in, the places where lines are missing or repeated out.

Each process numbers its lines, each restart knows after which batch of each rank it continued, and ranks train in
step. So three places are known at which a line must be:

    rank 0   2 3 4 5 6 | 2 3 4 5 6 7 8 9
    rank 1   2 3 . 5 6 | 2 3 4 5 6 7 8 9    a number between others
    rank 2   2 3 4 . . | 2 3 4 5 6 7 8 9    the last lines before a restart
    rank 3   2 3 4 5 6 | 2 3 . . . . . .    the last lines, while other ranks continued

A kill of all ranks also ends a log between two batches; lines that are missing at the end of all ranks are not found.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from energon_packed.loading.monitoring.order_lines import Line, OrderFiles, Process, shown
from energon_packed.loading.state import Position

_MOST_TOGETHER = 64
"""Batches that a rank can log before another rank: those of an optimizer step, as ranks wait for each other then."""


class MissingLines:
    """Find missing and repeated lines; memory: 16 bytes for each gap between lines.

    Args:
        files: the log.
    """

    def __init__(self, files: OrderFiles) -> None:
        self._files = files
        self._runs: dict[Process, array[int]] = defaultdict(lambda: array("q"))  # first and last of adjacent lines
        self._steps: dict[tuple[int, int], int] = defaultdict(int)  # batches of (rank, epoch)
        # after the lines of a process; the start of the next epoch at the end of an epoch
        self._ends = {process: process.starts[-1].at for process in files.processes}

    def add(self, line: Line) -> None:
        """Add a line, in any order."""
        if not line.counts:
            return
        process, at = line.process, line.position
        if (runs := self._runs[process]) and line.line == runs[-1] + 1:
            runs[-1] += 1
        else:
            runs.extend((line.line, line.line))
        self._ends[process] = max(self._ends[process], Position(at.epoch + 1, 0) if line.ends_epoch else at)
        self._steps[process.rank, at.epoch] = max(self._steps[process.rank, at.epoch], at.step)

    def problems(self) -> Iterator[str]:
        """Yield a line for each file with missing or repeated lines, and for each rank that is behind."""
        for process in self._files.processes:
            if process.counts:
                yield from self._of_process(process)
        newest = [process for process in self._files.processes if process.counts and process.until is None]
        yield from self._behind(newest) if newest else ()

    def _of_process(self, process: Process) -> Iterator[str]:
        name, end, until = process.file.name, self._ends[process], process.until
        runs = np.array(self._runs[process], dtype=np.int64).reshape(-1, 2)
        first, last = runs[np.lexsort(runs.T[::-1])].T
        ends = np.maximum.accumulate(np.append(1, last))  # last line before each run; the header is line 1
        before, numbers = ends[:-1], int(np.maximum(last - np.maximum(first - 1, ends[:-1]), 0).sum())
        if count := int(ends[-1]) - 1 - numbers:
            start = int(before[first > before + 1][0]) + 1
            yield f"{name}: {count} lines are missing, from line {start} on. Restore the file."
        if count := int((last - first + 1).sum()) - numbers:
            yield f"{name}: {count} lines are repeated. Restore the file."
        if until is not None and end < until:
            yield (
                f"{name}: the lines between {shown(end)} and the restart after {shown(until)} are missing. Restore "
                "the file."
            )

    def _behind(self, newest: list[Process]) -> Iterator[str]:
        """Yield a line for each rank whose log ends before that of another rank."""
        first = max(newest, key=self._ends.__getitem__)
        ahead = self._ends[first]
        for process in newest:
            at = self._ends[process]
            is_later = ahead.epoch > at.epoch
            rest = max(0, self._steps[first.rank, at.epoch] - at.step) if is_later else 0  # of the epoch of this rank
            steps = rest + ahead.step if is_later else ahead.step - at.step
            # At the end of an epoch, all ranks have used their last batch.
            if ahead.epoch > at.epoch + 1 or rest > 1 or steps > _MOST_TOGETHER:
                yield (
                    f"{process.file.name} ends after {shown(at)}, and {first.file.name} after {shown(ahead)}: lines "
                    "are missing. Restore the file."
                )
