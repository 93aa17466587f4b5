"""Order logs of real runs with lines that are cut, dropped, repeated and reordered at random."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from energon_packed import FormatError
from tests.internals import check_order
from tests.loading.flows import energon_folder
from tests.processes import run_ranks

DAMAGES = int(os.environ.get("ENERGON_PACKED_LOG_DAMAGES", "10"))  # of each log; 50 is the long form: 1,500
RUNS = DAMAGES // 10  # of each form
SCRIPT = "from tests.loading.monitoring.logged_runs import main; main()"
FORMS = {
    "other workers": ([2, 2, 2], [0, 2, 0], ["stream", "epochs"]),
    "other ranks": ([2, 1, 2], [0, 0, 0], ["planned", "mixture", "shards", "energon"]),
}


@dataclass(frozen=True)
class Entry:
    """A line of a log.

    Attributes:
        rank, file, number: its place; `file` counts the files of the rank.
        text: its bytes.
        process: index of its process.
        is_header: it is a header.
        counts: it is not behind the state with which the next process continued.
        end: (epoch, step) after it.
    """

    rank: int
    file: int
    number: int
    text: bytes
    process: int
    is_header: bool
    counts: bool
    end: tuple[int, int]


Log = list[Entry]


def logged(folder: Path, packs: Path, worlds: list[int], workers: list[int], kinds: list[str], rng: Any) -> None:
    """Write the log of a run for each kind; each of its processes but the last trains behind its saved state."""
    folder.mkdir()
    for number, (world_size, count) in enumerate(zip(worlds, workers, strict=True)):
        behind = rng.randrange(4) if number + 1 < len(worlds) else 0
        steps = (rng.randint(1, 12), int(rng.random() < 0.3), behind)
        run_ranks(SCRIPT, world_size, folder / f"store{number}", folder, packs, ",".join(kinds), count, *steps)


def entries_of(folder: Path, kind: str) -> Log:
    """The lines of all ranks, with what the run itself noted: the number of lines when it saved a state."""
    log: Log = []
    for rank in range(2):
        saved = [int(line) for line in (folder / f"{kind}-{rank}").read_text().split()]
        joined = [0, 1, 2] if len(saved) == 3 else [0, 2]  # rank 1 is not in the second process of "other ranks"
        for file, process in enumerate(joined):
            text = (folder / kind / name_of(rank, file)).read_bytes()
            for number, line in enumerate(text.splitlines(keepends=True)):
                entries = orjson.loads(line)
                end = (entries["epoch"], entries["step"]) if number else (0, 0)
                log.append(Entry(rank, file, number, line, process, not number, number < saved[file], end))
    return log


def name_of(rank: int, file: int) -> str:
    return f"order-{rank:05d}-{file:03d}.jsonl"


def write(folder: Path, lines: list[Entry]) -> None:
    folder.mkdir(exist_ok=True)
    for file in folder.glob("order-*"):
        file.unlink()
    for place in {(line.rank, line.file) for line in lines}:
        (folder / name_of(*place)).write_bytes(b"".join(one.text for one in lines if (one.rank, one.file) == place))


def of_process(log: Log, rank: int, process: int) -> Log:
    return [line for line in log if line.rank == rank and line.process == process]


def draw(rng: random.Random, log: Log) -> Log:
    """The lines of a process of a rank, without the header."""
    line = rng.choice([line for line in log if not line.is_header])
    return [one for one in of_process(log, line.rank, line.process) if not one.is_header]


def some_lines(rng: random.Random, log: Log) -> Log:
    lines = [line for line in log if not line.is_header]
    return rng.sample(lines, min(len(lines), rng.randint(1, 4)))


def run_of_lines(rng: random.Random, log: Log) -> Log:
    lines = draw(rng, log)
    first = rng.randrange(len(lines))
    return lines[first : first + rng.randint(1, 6)]


def end_of_an_epoch(rng: random.Random, log: Log) -> Log:
    lines = draw(rng, log)
    number = rng.choice(lines).end[0]
    epoch = [line for line in lines if line.end[0] == number]
    return epoch[-rng.randint(1, 5) :]


def epoch_of_a_rank(rng: random.Random, log: Log) -> Log:
    line = rng.choice([line for line in log if not line.is_header])
    return [one for one in log if one.rank == line.rank and one.end[0] == line.end[0] and not one.is_header]


def epoch_of_all_ranks(rng: random.Random, log: Log) -> Log:
    epoch = rng.choice([line for line in log if not line.is_header]).end[0]
    return [one for one in log if one.end[0] == epoch and not one.is_header]


def process_of_a_rank(rng: random.Random, log: Log) -> Log:
    line = rng.choice(log)
    return of_process(log, line.rank, line.process)


def header(rng: random.Random, log: Log) -> Log:
    return [rng.choice([line for line in log if line.is_header])]


def file_of_a_rank(rng: random.Random, log: Log) -> Log:
    rank = rng.choice(log).rank
    return [line for line in log if line.rank == rank]


def replaced_lines(rng: random.Random, log: Log) -> Log:
    """Lines behind a saved state: their batches were trained again."""
    replaced = [line for line in log if not line.counts and not line.is_header]
    return rng.sample(replaced, rng.randint(1, len(replaced))) if replaced else []


def kill(rng: random.Random, log: Log) -> Log:
    """The last lines of all ranks, which a kill at that step leaves out."""
    last = [line for line in log if line.process == max(line.process for line in log) and not line.is_header]
    end = rng.choice(last).end
    return [line for line in last if line.end > end]


LOSSES: list[Callable[[random.Random, Log], Log]] = [
    some_lines, run_of_lines, end_of_an_epoch, epoch_of_a_rank, epoch_of_all_ranks, process_of_a_rank, header,
    file_of_a_rank, replaced_lines, kill,
]  # fmt: skip


def expected(log: Log, removed: set[Entry]) -> bool | None:
    """Whether the log without these lines has a loss; None if a kill could have left it so, or almost so."""
    last = max(line.process for line in log)
    kept = [line for line in log if line not in removed]
    ends = dict[int, tuple[int, int]]()
    for rank in {line.rank for line in log}:
        for process in range(last + 1):
            lines = of_process(log, rank, process)
            rest = [line for line in lines if line not in removed]
            gone = [line for line in lines if line in removed]
            if rest and lines[0] in removed and any(not line.is_header for line in rest):
                return True  # lines without a header
            if any(line.counts and not line.is_header and line in removed for line in lines) and (
                process < last or gone != lines[len(lines) - len(gone) :]
            ):
                return True
            if process == last and lines:
                ends[rank] = rest[-1].end if len(rest) > 1 else (-1, 0)
    of_last = {line.rank for line in kept if line.process == last}
    if (-1, 0) in ends.values():  # a rank without a batch of the last process
        has_batch = any(line.process == last and not line.is_header for line in kept)
        return (None if of_last == ends.keys() else True) if has_batch else (None if of_last else False)
    if len(set(ends.values())) == 1:
        return False
    first, behind = max(ends.values()), min(ends.values())
    steps = max(line.end[1] for line in kept if line.end[0] == behind[0])
    return True if first[0] > behind[0] + 1 or (first[0] > behind[0] and steps - behind[1] > 1) else None


def reported(folder: Path) -> list[str]:
    try:
        return check_order(folder).problems
    except FormatError as error:
        return [str(error)]


def damages(log: Log, rng: random.Random, count: int) -> Iterator[tuple[str, Log, bool | None]]:
    """Yield (name, lines, whether there is a loss)."""
    for _ in range(count):
        lines = list(log)
        roll = rng.random()
        if roll < 0.1:  # the order of lines in a process
            name = "reordered"
            for _ in range(rng.randint(1, 5)):
                of_one = draw(rng, log)
                a, b = rng.choice(of_one), rng.choice(of_one)
                at, to = lines.index(a), lines.index(b)
                lines[at], lines[to] = b, a
            yield name, lines, False
        elif roll < 0.2:
            line = rng.choice([line for line in log if line.counts and not line.is_header])
            lines.insert(lines.index(line), line)
            yield "repeated", lines, True
        elif roll < 0.3:
            last = max(line.process for line in log)
            ends = {(line.rank, line.file): line for line in log}.values()
            line = rng.choice([line for line in log if not (line in ends and line.process == last)])
            cut = Entry(**{**vars(line), "text": line.text[: rng.randrange(1, len(line.text) - 1)]})
            lines[lines.index(line)] = cut
            yield "cut", lines, line.counts or line not in ends  # a kill may cut the last line of a process
        else:
            damage = rng.choice(LOSSES)
            removed = set(damage(rng, log))
            yield damage.__name__, [line for line in log if line not in removed], expected(log, removed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.timeout(3600)
def test_each_loss_is_reported_and_nothing_else(tmp_path: Path, form: str) -> None:
    worlds, workers, kinds = FORMS[form]
    packs = energon_folder(tmp_path, 41)
    counts = {True: 0, False: 0, None: 0}
    for seed in range(RUNS):
        rng = random.Random(f"{form} {seed}")
        folder = tmp_path / str(seed)
        logged(folder, packs, worlds, workers, kinds, rng)
        for kind in kinds:
            log = entries_of(folder, kind)
            assert reported(folder / kind) == [], (seed, kind)
            for number, (name, lines, is_loss) in enumerate(damages(log, rng, DAMAGES)):
                write(folder / "damaged", lines)
                problems = reported(folder / "damaged")
                counts[is_loss] += 1
                assert is_loss in (bool(problems), None), (seed, kind, number, name, problems)
    print(form, counts)
    assert counts[True] > counts[False] > counts[None]
