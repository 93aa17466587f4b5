"""Lines of an order log: the files of all ranks in, the lines that count and the replaced lines out.

`order-00002-001.jsonl` is the file of the second process of rank 2. Its first line is a header:

    {"order_log": 1, "run": "52ab09e1", "rank": 2, "world_size": 3, "loader": "DataflowLoader", "size": 5000,
     "starts": [[2, [[0, 0]], [0, 0], 0], [3, [[0, 40]], [0, 40], 0]], "earlier": ["order-00002-000.jsonl", 51200],
     "time": "2026-11-20T09:30:00.000+00:00"}

`starts` has a `Start` for each process of the run so far: here, 3 ranks continued after step 40 of 2 ranks. `earlier`
is the file of the previous process of the rank and its size in bytes: it must not grow any more. A line for each batch
follows:

    {"epoch": 0, "step": 41, "line": 2, "ids": ["a", "b"], "sources": ["captions.jsonl", "chats.jsonl"],
     "items": [122], "dropped": [121]}

| entry | content |
|---|---|
| `epoch`, `step` | from 0, and from 1; the same numbers as in a loader state after the batch |
| `line` | number of the line in its file, from 2: `order_missing.py` finds missing lines |
| `ids`, `sources` | of each sample; a single source is of all samples; a line without a batch does not have them |
| `items` | places in the global order of the epoch; in the shard, for a stream ("12#1/3": fragment 1 of 3) |
| `packs` | keys of the packs, if Energon chooses them |
| `dropped` | items that are in no batch |
| `shard`, `num_shards` | of a stream |
| `end` | the epoch of this rank ended, or the shard |

The empty file `saved-2` shows that 2 ranks saved a state. Lines after the position at which a later process started
were lost with the process that wrote them: the later process replaces them.
"""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from energon_packed.errors import FormatError
from energon_packed.loading.state import Position

FORMAT = 1
_LINE = b'{"epoch":'
_HEADER_ENTRIES = {"run", "rank", "world_size", "starts", "time"}
_TOGETHER = 1 << 16  # lines of epochs that are checked in one pass over the files
_MAX_NAMED = 5  # ranks that a message names


def file_of(folder: Path, rank: int, number: int) -> Path:
    """Return the file of a process of a rank; `number` counts the processes of the rank, from 0."""
    return folder / f"order-{rank:05d}-{number:03d}.jsonl"


def files_of(folder: Path, rank: int | None = None) -> list[Path]:
    """Return the files of a rank, or of all ranks, rank by rank in the order of their processes."""
    files = folder.glob("order-*.jsonl" if rank is None else f"order-{rank:05d}-*.jsonl")
    numbers = {file: file.stem.split("-")[1:] for file in files}
    numbered = {file: tuple(map(int, n)) for file, n in numbers.items() if len(n) == 2 and all(map(str.isdecimal, n))}
    return sorted(numbered, key=numbered.__getitem__)


class Start(NamedTuple):
    """The start of a process of a run.

    Attributes:
        world_size: of the process.
        positions: position of each rank of the earlier process after which it continued; one if all are equal.
        at: position after which its batches are counted.
        workers: worker processes of a rank, if they decide the samples of a step; otherwise 0.
    """

    world_size: int
    positions: list[Position]
    at: Position
    workers: int

    def after(self, rank: int) -> Position:
        """Return the position after which the lines of a rank of the earlier process are replaced."""
        return self.positions[rank if len(self.positions) > 1 else 0]


class Line(NamedTuple):
    """A line of a batch, or of items without a batch.

    Attributes:
        process: process that wrote it.
        ids: of each sample; None without a batch.
        sources: dataset of each sample.

    The other attributes are the entries of the line.
    """

    process: "Process"
    epoch: int
    step: int
    line: int
    ids: list[str | None] | None = None
    sources: Sequence[str | None] = ()
    items: Sequence[int | str] = ()
    dropped: Sequence[int | str] = ()
    packs: Sequence[str] = ()
    shard: int | None = None
    num_shards: int | None = None
    end: bool = False

    @property
    def position(self) -> Position:
        """Position after it."""
        return Position(self.epoch, self.step)

    @property
    def ends_epoch(self) -> bool:
        """Whether its rank has no further batch in the epoch."""
        return self.end and self.shard is None

    @property
    def counts(self) -> bool:
        """Whether it was written before the position at which the next process of the run started."""
        if not self.process.counts or self.process.until is None:
            return self.process.counts
        # A line without a batch is written before the next batch, but a state may have been saved before it.
        return self.position < self.process.until if self.ids is None else self.position <= self.process.until


class Process:
    """The file of a process.

    Args:
        file: the file.
        size: bytes to read; a run that is still training appends lines.
        header: its header.

    Attributes:
        starts: of the processes of the run up to this process.
        worlds: their world sizes.
        counts: whether its lines count, up to `until`.
        until: position after which the next process of the run continued; None for the last process.
    """

    def __init__(self, file: Path, size: int, header: dict[str, Any]) -> None:
        self.file, self.size, self.header = file, size, header
        self.counts = False
        self.until: Position | None = None
        self.rank, self.world_size = int(header["rank"]), int(header["world_size"])
        starts = header["starts"]
        self.starts = [
            Start(n, [Position(*p) for p in positions], Position(*at), workers) for n, positions, at, workers in starts
        ]
        self.worlds = [start.world_size for start in self.starts]

    @cached_property
    def layout(self) -> str:
        """What decides the samples of a step: data and settings, and the changes of ranks and workers."""
        changes = [
            now
            for before, now in pairwise([None, *self.starts])
            if now and (before is None or (before.world_size, before.workers) != (now.world_size, now.workers))
        ]
        return str((self.header.get("identity"), changes))

    @cached_property
    def epochs(self) -> "Counter[int]":
        """Lines of each epoch.

        Raises:
            FormatError: a line is damaged.
        """
        return Counter(epoch for epoch, _, _ in self._texts())

    def lines(self, epochs: Container[int] | None) -> Iterator[Line]:
        """Yield the lines of epochs; None yields all lines.

        Raises:
            FormatError: a line is damaged.
        """
        for epoch, number, text in self._texts():
            if epochs is None or epoch in epochs:
                try:
                    line = Line(self, **(_parsed(text) or {}))
                except TypeError:  # an entry is missing or unknown
                    raise _damage(self.file, number) from None
                count = len(line.ids or ())
                if len(line.sources) == 1 and count != 1:
                    line = line._replace(sources=[*line.sources] * count)
                if len(line.sources) != count:
                    raise _damage(self.file, number)
                yield line

    def _texts(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (epoch, number, text) of each whole line; a kill may have cut the last line."""
        rest = self.size
        with self.file.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                rest -= len(text)
                if rest < 0 or not text.endswith(b"\n"):
                    return
                if number > 1:
                    epoch = text[len(_LINE) : text.find(b",")].strip()
                    if not text.startswith(_LINE) or not epoch.isdigit():
                        raise _damage(self.file, number)
                    yield int(epoch), number, text


class OrderFiles:
    """The files of all ranks.

    Attributes:
        processes: rank by rank, in the order of their starts.
        last: the last process of the run.
        problems: two runs in the folder, and files that are missing.

    Args:
        folder: the `order_log` of the loaders.

    Raises:
        FormatError: there is no order log, or a line is damaged.
    """

    def __init__(self, folder: Path) -> None:
        sizes = [(file, file.stat().st_size) for file in files_of(folder)]  # at one time, as ranks train in step
        headers = [(file, size, header_of(file)) for file, size in sizes]
        self.processes = [Process(file, size, header) for file, size, header in headers if header is not None]
        if not self.processes or self.processes[0].rank:
            raise FormatError(
                f"{folder} has no order log of rank 0. Pass the folder that was `order_log` of the loaders."
            )
        self.last = self._last()
        self.problems = [*self._of_runs(), *self._choose()]

    @cached_property
    def epochs(self) -> "Counter[int]":
        """Lines of each epoch, in the order of epochs."""
        lines = sum((process.epochs for process in self.processes), Counter[int]())
        return Counter(dict(sorted(lines.items())))

    def groups(self) -> Iterator[list[int]]:
        """Yield epochs whose lines are read together: a pass over the files for each epoch would be slow."""
        group, count = list[int](), 0
        for epoch, lines in self.epochs.items():
            if group and count + lines > _TOGETHER:
                yield group
                group, count = [], 0
            group.append(epoch)
            count += lines
        if group:
            yield group

    def lines(self, epochs: Container[int] | None = None) -> Iterator[Line]:
        """Yield the lines of epochs, by default of all: rank by rank, and of each rank process by process."""
        for process in self.processes:
            yield from process.lines(epochs)

    def _last(self) -> Process:
        """Return the last process of rank 0, or its continuation by other ranks, if the file of rank 0 is missing."""
        last = [process for process in self.processes if process.rank == 0][-1]  # rank 0 is in every process group
        later = [
            process
            for process in self.processes
            if process.starts[: len(last.starts)] == last.starts
            and len(process.starts) > len(last.starts)
            and process.header["time"] > last.header["time"]  # earlier processes were replaced
        ]
        return max(later, key=lambda process: len(process.starts), default=last)

    def _choose(self) -> Iterator[str]:
        """Mark the processes whose lines count, which the last process continues; yield a line for missing files."""
        last, behind = self.last, list[int]()
        for rank in range(max(start.world_size for start in last.starts)):
            own = [
                each for each in self.processes if each.rank == rank and each.worlds == last.worlds[: len(each.worlds)]
            ]
            # Without the states of all ranks, a rank knows only its own point: it may differ from the point of rank 0.
            known = own[-1].starts if own else []
            starts = known + last.starts[len(known) :]
            newest = {len(each.starts): each for each in own if each.starts == starts[: len(each.starts)]}
            for count, start in enumerate(starts, 1):
                until = starts[count].after(rank) if count < len(starts) else None
                if rank >= start.world_size:
                    continue
                if (process := newest.get(count)) is not None:
                    process.counts, process.until = True, until
                elif until is None:
                    behind.append(rank)
                elif start.at < until:
                    yield (
                        f"rank {rank}: the file of the process after {shown(start.at)} is missing. Restore the file."
                    )
        if behind:
            yield (
                f"ranks {', '.join(map(str, behind[:_MAX_NAMED]))} of {last.world_size} have no lines. Pass a folder "
                "that all ranks share."
            )

    def _of_runs(self) -> Iterator[str]:
        """Yield a line for the processes of another run."""
        sizes = {process.file.name: process.size for process in self.processes}
        firsts = {process.rank: process for process in reversed(self.processes)}
        runs = {
            process.header["run"]
            for process in self.processes
            if process is firsts[process.rank] or len(process.starts) == 1
        }
        for process in self.processes:
            earlier, size = process.header.get("earlier", (None, 0))
            if sizes.get(earlier, 0) > size:
                yield (
                    f"{earlier} and {process.file.name}: two processes wrote at the same time. Pass another "
                    "`order_log` folder to each run."
                )
            if process.header["run"] not in runs:
                yield (
                    f"{process.file.name} has the lines of another run: it started from a state of that run. Pass "
                    "another `order_log` folder to each run."
                )


def intervals(last: Process) -> Iterator[str]:
    """Yield a line for each process of a run, such as `3 ranks after epoch 0, step 40`."""
    for ranks, positions, *_ in last.starts:
        after = f" after {shown(min(positions))}" if min(positions) > Position(0, 0) else ""
        yield f"{ranks} rank{'s' if ranks > 1 else ''}{after}"


def shown(position: Position) -> str:
    """Return a position as text."""
    return f"epoch {position.epoch}, step {position.step}"


def header_of(file: Path) -> dict[str, Any] | None:
    """Return the header of a file; None if a kill has cut it.

    Raises:
        FormatError: the file has another format, or the header is damaged.
    """
    with file.open("rb") as lines:
        text = lines.readline()
    if not text.endswith(b"\n"):
        return None
    header = _parsed(text)
    if header is None or "order_log" not in header:
        raise _damage(file, 1)
    if (found := header["order_log"]) != FORMAT:
        raise FormatError(
            f"{file} has format {found} of the order log, and this version of energon-packed needs format {FORMAT}. "
            "Use the version of the run, or start a new log in another folder."
        )
    if not header.keys() >= _HEADER_ENTRIES:
        raise _damage(file, 1)
    return header


def _damage(file: Path, number: int) -> FormatError:
    return FormatError(
        f"{file}, line {number}: the line is damaged. Restore the file, or start a new log in another folder."
    )


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
