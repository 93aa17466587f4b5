"""Lines of an order log: the files of all ranks in, the lines that count and the replaced lines out.

`order-00002.jsonl` is the file of rank 2. Each process that writes into it starts with a header:

    {"order_log": 1, "start": "8d1f33c2", "run": "52ab09e1", "rank": 2, "world_size": 3, "loader": "DataflowLoader",
     "size": 5000, "starts": [[2, [[0, 0]], [0, 0], 0], [3, [[0, 40]], [0, 40], 0]],
     "time": "2026-11-20T09:30:00.000+00:00"}

`starts` has a `Start` for each process of the run so far: here, 3 ranks continued after step 40 of 2 ranks. A line for
each batch follows:

    {"epoch": 0, "step": 41, "rank": 2, "world_size": 3, "start": "8d1f33c2", "line": 1, "ids": ["a", "b"],
     "sources": ["captions.jsonl", "chats.jsonl"], "items": [122], "dropped": [121]}

| entry | content |
|---|---|
| `epoch`, `step` | from 0, and from 1; the same numbers as in a loader state after the batch |
| `start` | the header of the process |
| `line` | number of the line of its process, from 1: `order_missing.py` finds missing lines |
| `ids`, `sources` | of each sample; a single source is of all samples |
| `items` | places in the global order of the epoch; in the shard, for a stream ("12#1/3": fragment 1 of 3) |
| `packs` | keys of the packs, if Energon chooses them |
| `dropped` | items that are in no batch |
| `shard`, `num_shards` | of a stream |
| `end` | the epoch of this rank ended, or the shard |

A header of a stream may have `ended`, an epoch and its shards that had no more items when the process started. A
header with `again` is of a run that started again at step 0, as the earlier processes saved no state. The
empty file `saved-2` shows that 2 ranks saved a state.

A line without a batch has the `step` null, and its position in `after`. Lines after the point at which a later process
started were lost with the process that wrote them: the later process replaces them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from energon_packed.errors import FormatError

FORMAT = 1
Point = tuple[int, int]
"""(epoch, step) after a batch."""
_HEADER, _LINE = b'{"order_log":', b'{"epoch":'
_HEADER_ENTRIES = {"start", "run", "rank", "world_size", "starts", "time"}
_LINE_ENTRIES = {"epoch", "step", "rank", "start", "line", "ids", "sources"}


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"order-{rank:05d}.jsonl"


def first_header(file: Path) -> dict[str, Any] | None:
    """Return the first header of a file; None if the file has no header.

    Raises:
        FormatError: the file has another format.
    """
    if not file.is_file():
        return None
    with file.open("rb") as lines:
        header = next((header for line in lines if (header := _parsed(line)) and "order_log" in header), None)
    return None if header is None else _checked(file, header)


def saved_marker(folder: Path, world_size: int) -> Path:
    """Return the empty file which shows that a run of this world size saved a state."""
    return folder / f"saved-{world_size}"


def saved_worlds(folder: Path) -> list[int]:
    """Return the world sizes whose runs saved a state."""
    return [int(size) for file in folder.glob("saved-*") if (size := file.name.removeprefix("saved-")).isdecimal()]


def is_order_log(folder: Path) -> bool:
    """Return whether a folder has the files of an order log."""
    return folder.is_dir() and next(folder.glob("order-*.jsonl"), None) is not None


class Start(NamedTuple):
    """The start of a process of a run.

    Attributes:
        world_size: of the process.
        points: (epoch, step) of each rank of the earlier process after which it continued; one if all are equal.
        at: (epoch, step) after which its batches are counted.
        workers: worker processes of a rank, if they decide the samples of a step; otherwise 0.
    """

    world_size: int
    points: list[Point]
    at: Point
    workers: int

    def point(self, rank: int) -> Point:
        """Return (epoch, step) after which the lines of a rank of the earlier process are replaced."""
        return self.points[rank if len(self.points) > 1 else 0]


class Line(NamedTuple):
    """A line of a batch.

    Attributes:
        process: process that wrote it.
        entries: of the line, with a source for each sample.
        counts: False if a later process of the run replaced it.
    """

    process: "Process"
    entries: dict[str, Any]
    counts: bool

    @property
    def point(self) -> Point:
        """(epoch, step) after it."""
        step = self.entries["step"]
        return self.entries["epoch"], self.entries["after"] if step is None else step

    @property
    def ends_epoch(self) -> bool:
        """Whether its rank has no further batch in the epoch."""
        entries, last = self.entries, self.process.header.get("last_step")
        if last and entries["step"] == last:
            return True
        return bool(entries.get("end")) and "shard" not in entries


@dataclass
class Process:
    """The lines of one process.

    Attributes:
        header: its header.
        counts: whether its lines count, up to `until`.
        until: point after which the next process of the run continued; None for the last process.
        spans: (first byte, end, number of the first line) of its lines, by epoch.
    """

    header: dict[str, Any]
    counts: bool = False
    until: Point | None = None
    spans: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    @cached_property
    def starts(self) -> list[Start]:
        """Starts of the processes of the run up to this process."""
        starts = self.header["starts"]
        return [Start(size, [tuple(p) for p in points], tuple(at), workers) for size, points, at, workers in starts]

    @property
    def worlds(self) -> list[int]:
        """World sizes of the processes of the run up to this process."""
        return [start.world_size for start in self.starts]

    @cached_property
    def layout(self) -> str:
        """What decides the samples of a step: data and settings, and the changes of ranks and workers."""
        changes = [
            now
            for before, now in pairwise([None, *self.starts])
            if now and (before is None or (before.world_size, before.workers) != (now.world_size, now.workers))
        ]
        return str((self.header.get("identity"), changes))

    def has(self, line: dict[str, Any], point: Point) -> bool:
        """Return whether a line counts: it was written before the point at which the next process started."""
        if not self.counts or self.until is None:
            return self.counts
        # A line without a batch is written before the next batch, but a state may have been saved before it.
        return point <= self.until if line["step"] is not None else point < self.until


class RankFile:
    """The file of a rank: its processes, and the places of their lines.

    Args:
        file: the file.
        size: bytes to read; a run that is still training appends lines.

    Raises:
        FormatError: a line is damaged; the last line of the file may be cut.
    """

    def __init__(self, file: Path, size: int) -> None:
        self.file = file
        self.processes: list[Process] = []
        self.problems: list[str] = []
        at = 0
        with file.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if not text.endswith(b"\n") or at + len(text) > size:
                    break  # a kill has cut the last line, whose batch is after each saved state
                if text.startswith(_HEADER) and (header := _parsed(text)) is not None:
                    if not _checked(file, header).keys() >= _HEADER_ENTRIES:
                        raise self._damage(number)
                    self.processes.append(Process(header))
                elif text.startswith(_LINE) and self.processes:
                    self._add(at, text, number)
                else:
                    raise self._damage(number)
                at += len(text)

    @property
    def rank(self) -> int:
        """Rank of the file."""
        return int(self.file.stem.partition("-")[2])

    def lines(self, epoch: int) -> Iterator[Line]:
        """Yield the lines of an epoch.

        Raises:
            FormatError: a line is damaged.
        """
        by_start = {process.header["start"]: process for process in self.processes}
        with self.file.open("rb") as stream:
            for process in self.processes:
                for begin, end, number in process.spans.get(epoch, ()):
                    stream.seek(begin)
                    while stream.tell() < end:
                        entries = _parsed(stream.readline())
                        if entries is None or not entries.keys() >= _LINE_ENTRIES:
                            raise self._damage(number)
                        sources, ids = entries["sources"], entries["ids"]
                        entries["sources"] = sources * len(ids) if len(sources) == 1 else sources
                        if (of_line := by_start.get(entries["start"])) is None:  # its header is missing
                            raise self._damage(number)
                        if of_line is not process and not self.problems:
                            self.problems.append(
                                f"{self.file.name}, line {number}: two processes wrote at the same time. Pass another "
                                "`order_log` folder to each run."
                            )
                        line = Line(of_line, entries, counts=True)
                        yield line._replace(counts=of_line.has(entries, line.point))
                        number += 1

    def _add(self, at: int, text: bytes, number: int) -> None:
        try:
            epoch = int(text[len(_LINE) : text.index(b",")])
        except ValueError:
            raise self._damage(number) from None
        spans = self.processes[-1].spans[epoch]
        if spans and spans[-1][1] == at:
            begin, _, number = spans[-1]
            spans[-1] = (begin, at + len(text), number)
        else:
            spans.append((at, at + len(text), number))

    def _damage(self, number: int) -> FormatError:
        return FormatError(
            f"{self.file}, line {number}: the line is damaged. Restore the file, or start a new log in another folder."
        )


class OrderFiles:
    """The files of all ranks.

    Attributes:
        problems: two runs in the folder, and ranks without a file.

    Args:
        folder: the `order_log` of the loaders.

    Raises:
        FormatError: there is no order log, or a line is damaged.
    """

    def __init__(self, folder: Path) -> None:
        names = (file for file in folder.glob("order-*.jsonl") if file.stem.removeprefix("order-").isdecimal())
        sizes = [(file, file.stat().st_size) for file in sorted(names)]  # at the same time, as ranks train in step
        self.files = [RankFile(file, size) for file, size in sizes]
        self.files = [file for file in self.files if file.processes]
        if not self.files or self.files[0].rank:
            raise FormatError(
                f"{folder} has no order log of rank 0. Pass the folder that was `order_log` of the loaders."
            )
        self.folder = folder
        self.last = self._last()
        for file in self.files:
            self._choose(file)
        self.problems = list(self._problems())

    @cached_property
    def epochs(self) -> list[int]:
        """Epochs with a line."""
        return sorted({epoch for file in self.files for process in file.processes for epoch in process.spans})

    def ended(self, epoch: int) -> set[int]:
        """Return the shards of an epoch that a restart found at their end, before their lines contained it."""
        ended = [each.header.get("ended", [None]) for file in self.files for each in file.processes if each.counts]
        return {shard for number, *shards in ended if number == epoch for shard in shards}

    def lines(self, epoch: int) -> Iterator[Line]:
        """Yield the lines of an epoch, rank by rank."""
        for file in self.files:
            yield from file.lines(epoch)
            self.problems += [problem for problem in file.problems if problem not in self.problems]

    def _last(self) -> Process:
        """Return the last process of rank 0, or its continuation by other ranks, if that of rank 0 is missing."""
        last = self.files[0].processes[-1]  # rank 0 is in every process group
        later = [
            each
            for file in self.files
            for each in file.processes
            if each.starts[: len(last.starts)] == last.starts
            and len(each.starts) > len(last.starts)
            and each.header["time"] > last.header["time"]  # earlier ones were replaced
        ]
        return max(later, key=lambda each: len(each.starts), default=last)

    def _choose(self, file: RankFile) -> None:
        """Mark the processes whose lines count: those that the last process of the run continues."""
        last = self.last
        own = [process for process in file.processes if last.worlds[: len(process.worlds)] == process.worlds]
        if not own:
            return
        # Without the states of all ranks, a rank knows only its own point: it may differ from the point of rank 0.
        newest = own[-1]
        starts = newest.starts + last.starts[len(newest.starts) :]
        latest = {len(process.starts): process for process in own if process.starts == starts[: len(process.starts)]}
        for count, process in latest.items():
            process.counts = True
            process.until = starts[count].point(file.rank) if count < len(starts) else None

    def _problems(self) -> Iterator[str]:
        processes = [process for file in self.files for process in file.processes]
        firsts = [file.processes[0] for file in self.files]
        firsts += [process for process in processes if process.header.get("again")]
        ranks = max(process.header["world_size"] for process in firsts if not process.header["rank"])
        # A state has the name of the rank that saved it.
        names = {process.header["run"] for process in firsts if process.header["rank"] < ranks}
        for process in processes:
            if process.header["run"] not in names or (len(process.starts) == 1 and process not in firsts):
                yield (
                    f"{file_of(Path(), process.header['rank'])} has the lines of two runs: a run started again from "
                    "its start, or from a state of another run. Pass another `order_log` folder to each run."
                )
                return
        present = {
            file.rank for file in self.files for process in file.processes if process.worlds == self.last.worlds
        }
        missing = sorted(set(range(self.last.header["world_size"])) - present)
        if missing:
            yield (
                f"ranks {', '.join(map(str, missing[:5]))} of {self.last.header['world_size']} have no lines. Pass a "
                "folder that all ranks share."
            )


def intervals(last: Process) -> Iterator[str]:
    """Yield a line for each process of a run, such as `3 ranks after epoch 0, step 40`."""
    for ranks, points, *_ in last.starts:
        epoch, step = min(points)
        after = f" after epoch {epoch}, step {step}" if epoch or step else ""
        yield f"{ranks} rank{'s' if ranks > 1 else ''}{after}"


def _checked(file: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Return a header of this format. Raises FormatError if it has another format."""
    if (found := header["order_log"]) != FORMAT:
        raise FormatError(
            f"{file} has format {found} of the order log, and this version of energon-packed needs format {FORMAT}. "
            "Use the version of the run, or start a new log in another folder."
        )
    return header


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
