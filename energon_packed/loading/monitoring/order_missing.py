"""The lines of an order log in, the places where lines are missing or repeated out.

Each process numbers its lines from 1, each restart knows after which batch of each rank it continued, and ranks train
in step. So three places are known at which a line must be:

    rank 0   1 2 3 4 5 | 1 2 3 4 5 6 7 8
    rank 1   1 2 . 4 5 | 1 2 3 4 5 6 7 8    a number between others
    rank 2   1 2 3 . . | 1 2 3 4 5 6 7 8    the last lines before a restart
    rank 3   1 2 3 4 5 | 1 2 . . . . . .    the last lines, while other ranks continued

A kill of all ranks also ends a log between two batches; lines that are missing at the end of all ranks are not found.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from energon_packed.loading.monitoring.order_lines import Line, OrderFiles, Point, Process, file_of

_MOST_AHEAD = 64
"""Batches that a rank can log before another rank: those of an optimizer step, as ranks wait for each other then."""


@dataclass
class _Sequence:
    """The lines of a process.

    Attributes:
        next: number of the next line.
        reached: (epoch, step) after the line with the highest number; the start of the next epoch at the end.
        counted: the same of the lines that count.
        gaps: (first missing number, next present number, `reached` before them); `late` lines may fill them.
        late: numbers of lines that are behind a line with a higher number.
        repeated: lines with the number of an earlier line.
    """

    reached: Point
    counted: Point
    next: int = 1
    gaps: list[tuple[int, int, Point]] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    repeated: int = 0


class MissingLines:
    """Find missing and repeated lines.

    Args:
        files: the log.
    """

    def __init__(self, files: OrderFiles) -> None:
        self._files = files
        self._sequences: dict[str, _Sequence] = {}  # by start
        self._steps: dict[tuple[int, int], int] = defaultdict(int)  # batches of (rank, epoch)

    def add(self, line: Line) -> None:
        """Add a line: epoch by epoch, and in each epoch in the order of the file."""
        number, sequence = line.entries["line"], self._of(line.process)
        if number < sequence.next:
            is_new = number not in sequence.late and any(a <= number < b for a, b, _ in sequence.gaps)
            sequence.repeated += line.counts and not is_new
            sequence.late |= {number} if is_new else set()
        else:
            if number > sequence.next:
                sequence.gaps.append((sequence.next, number, sequence.reached))
            sequence.next = number + 1
        epoch, step = line.point
        reached = (epoch + 1, 0) if line.ends_epoch else (epoch, step)
        sequence.reached = max(sequence.reached, reached)
        if line.counts:
            sequence.counted = max(sequence.counted, reached)
            place = line.entries["rank"], epoch
            self._steps[place] = max(self._steps[place], step)

    def problems(self) -> Iterator[str]:
        """Yield a line for each process with missing lines, and for each rank that is behind."""
        last, newest = self._files.last, dict[int, Process]()
        processes = {file.rank: [each for each in file.processes if each.counts] for file in self._files.files}
        for rank in range(max(last.worlds)):
            chain = {len(each.starts): each for each in processes.get(rank, ())}
            starts = chain[max(chain)].starts if chain else []
            starts = starts + last.starts[len(starts) :]
            for count, start in enumerate(starts, 1):
                if rank < start.world_size:
                    until = starts[count].point(rank) if count < len(starts) else None
                    yield from self._of_process(rank, chain.get(count), start.at, until)
            if len(starts) in chain:
                newest[rank] = chain[len(starts)]
        yield from self._behind(newest)

    def _of(self, process: Process) -> _Sequence:
        at = process.starts[-1].at
        return self._sequences.setdefault(process.header["start"], _Sequence(at, at))

    def _of_process(self, rank: int, process: Process | None, at: Point, until: Point | None) -> Iterator[str]:
        name = file_of(self._files.folder, rank).name
        sequence = _Sequence(at, at) if process is None else self._of(process)
        for first, following, before in sequence.gaps:
            count = following - first - sum(first <= number < following for number in sequence.late)
            if count and (until is None or before < until):  # later lines were replaced
                yield f"{name}: {count} lines after {_shown(before)} are missing. Restore the file."
        if sequence.repeated:
            yield f"{name}: {sequence.repeated} lines are repeated. Restore the file."
        if until is not None and sequence.counted < until:
            yield (
                f"{name}: the lines between {_shown(sequence.counted)} and the restart after {_shown(until)} are "
                "missing. Restore the file."
            )

    def _behind(self, newest: dict[int, Process]) -> Iterator[str]:
        """Yield a line for each rank whose log ends before that of another rank."""
        ends = {rank: self._of(process).counted for rank, process in newest.items()}
        first = max(ends, key=ends.__getitem__)
        for rank, (epoch, step) in ends.items():
            ahead, there = ends[first]
            rest = max(0, self._steps[first, epoch] - step) if ahead > epoch else 0  # of the epoch of this rank
            # At the end of an epoch, all ranks have used their last batch.
            if ahead > epoch + 1 or rest > 1 or there + rest - (step if ahead == epoch else 0) > _MOST_AHEAD:
                yield (
                    f"{file_of(self._files.folder, rank).name} ends after {_shown((epoch, step))}, and the file of "
                    f"rank {first} after {_shown(ends[first])}: lines are missing. Restore the file."
                )


def _shown(point: Point) -> str:
    return f"epoch {point[0]}, step {point[1]}"
