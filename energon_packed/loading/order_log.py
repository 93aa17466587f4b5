"""The order log: one JSON line for each step of a rank, and the proof that no item is lost or used twice.

    {"epoch": 0, "step": 3, "rank": 0, "world_size": 8, "worker": 1, "num_workers": 2,
     "ids": ["a", "b"], "sources": ["captions.jsonl", "chats.jsonl"], "items": [24, 32], "dropped": [],
     "segments": [[0, 0, 8, 2, null]]}                      or, of a stream, "shard": 1, "num_shards": 16

`items` are places in the global order of the epoch, over all ranks; of a stream, numbers in the shard. An epoch has
each of them from 0 on once, in a batch or dropped. The line at the end of a worker, or of a shard, has no step. A
resumed run repeats the lines after its checkpoint, and they must be equal. With other ranks, the lines of a shard are
those of before, and a segment says from which step on its lines replace the others.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energon_packed.errors import FormatError

if TYPE_CHECKING:
    from energon_packed.loading.dataflow.worker_stream import Step

_MOST = 5  # problems that are named


class OrderLog:
    """Appends the steps of one rank to a file of its own.

    Args:
        folder: of the files of all ranks.
        rank: of this process.
        planned: items have a global order; False for streams.
    """

    def __init__(self, folder: Path, rank: int, *, planned: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"order-{rank:05d}.jsonl"
        self._planned = planned

    def write(self, place: tuple[int, int, int], position: Any, step: "Step") -> None:
        """Append a line.

        Args:
            place: (rank, world size, number of workers).
            position: of the loader after the step.
            step: ids and items.
        """
        if step.ended and not self._planned:
            return  # the ends of its shards were written
        batch = step.batch
        ended = step.ended if self._planned else batch is None
        rank, world_size, num_workers = place
        if self._planned:
            order: dict[str, Any] = {"segments": [one.to_plain() for one in position.segments]}
        else:
            order = {"shard": step.state[0] if step.state else None, "num_shards": position.num_shards}
        line = {
            "epoch": position.epoch,
            "step": None if ended else position.step,
            "rank": rank,
            "world_size": world_size,
            "worker": step.worker,
            "num_workers": num_workers,
            "ids": list(getattr(batch, "ids", [])),
            "sources": [None if one is None else one.dataset for one in getattr(batch, "sources", [])],
            "items": step.items,
            "dropped": step.dropped,
        }
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line | order) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """Result of a check of an order log.

    Attributes:
        steps: steps of all ranks, each once.
        repeated: lines that a resumed run wrote again.
        samples: samples in them.
        dropped: items that were used up without a batch.
        complete: epochs that every rank has read to their end.
        epochs: epochs with a step.
        sources: samples of each dataset.
        problems: lost, repeated or different items, one line each.
    """

    steps: int
    repeated: int
    samples: int
    dropped: int
    complete: list[int]
    epochs: list[int]
    sources: dict[str, int]
    problems: list[str] = field(default_factory=list)


def check_order(folder: Path) -> OrderReport:
    """Read the logs of all ranks, and look for items that are lost, used twice, or different after a resume.

    Raises:
        FormatError: there is no order log, or one is damaged.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    problems: list[str] = []
    repeated = 0
    for line in _lines(folder):
        before = lines.setdefault(_place_of(line), line)
        if before is not line:
            repeated += 1
            same_ranks = all(before[name] == line[name] for name in ("rank", "world_size", "num_workers"))
            if same_ranks and before["step"] != line["step"]:
                problems.append(
                    f"epoch {line['epoch']}, rank {line['rank']}: {len(line['items'])} items are twice, in steps "
                    f"{before['step']} and {line['step']}: {_some(line['items'])}"
                )
            elif any(before[name] != line[name] for name in ("ids", "sources", "items", "dropped")):
                where = f"epoch {line['epoch']}, step {line['step']}, rank {line['rank']}"
                problems.append(
                    f"{where} had {_some(before['ids'])} before a resume, and {_some(line['ids'])} after it"
                )
    epochs = sorted({line["epoch"] for line in lines.values()})
    complete, kept = [], []
    for epoch in epochs:
        of_epoch = [line for line in lines.values() if line["epoch"] == epoch]
        check = _check_planned if "segments" in of_epoch[0] else _check_stream
        valid, is_complete, found = check(epoch, of_epoch)
        kept += valid
        problems += found
        complete += [epoch] if is_complete else []
    return OrderReport(
        steps=sum(line["step"] is not None for line in kept),
        repeated=repeated,
        samples=sum(len(line["ids"]) for line in kept),
        dropped=sum(len(line["dropped"]) for line in kept),
        complete=complete,
        epochs=epochs,
        sources=dict(Counter(str(name) for line in kept for name in line["sources"])),
        problems=problems,
    )


def _place_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Where a line is in the run: a line at the same place is that of a resumed run.

    The steps of a shard belong to it, whichever rank reads it after a resume.
    """
    items = line["items"] or line["dropped"]
    if "segments" not in line:
        return line["epoch"], line["shard"], line["step"] is None, items[0] if items else None
    end = line["worker"] if line["step"] is None else None
    return line["epoch"], line["rank"], line["step"], end, json.dumps(line["segments"])


Checked = tuple[list[dict[str, Any]], bool, list[str]]
"""Lines that count, whether the epoch is complete, and problems."""


def _check_planned(epoch: int, lines: list[dict[str, Any]]) -> Checked:
    """Items are places in the order of the epoch: over all ranks, each once."""
    last = max((line["segments"] for line in lines), key=len)
    valid = []
    for line in lines:
        own = line["segments"]
        if own != last[: len(own)]:
            layouts = sorted(
                {f"{line['segments'][-1][2]} ranks from step {line['segments'][-1][0]}" for line in lines}
            )
            return lines, False, [
                f"epoch {epoch} was resumed in different ways, {_some(layouts)}: pass another `order_log` folder to "
                "each of these runs"
            ]  # fmt: skip
        if len(own) == len(last) or (line["step"] is not None and line["step"] <= last[len(own)][0]):
            valid.append(line)
    ended = {(line["rank"], line["worker"]) for line in valid if line["step"] is None}
    complete = any(len(ended) >= line["world_size"] * line["num_workers"] for line in valid if line["step"] is None)
    items = [number for line in valid for number in (*line["items"], *line["dropped"])]
    return valid, complete, list(_lost_or_twice(f"epoch {epoch}", items, complete=complete))


def _check_stream(epoch: int, lines: list[dict[str, Any]]) -> Checked:
    """Items are numbers in a shard: in each shard, each once; ids over all shards."""
    shards: dict[int, list[int]] = defaultdict(list)
    ended: set[int] = set()
    problems: list[str] = []
    ids: Counter[str] = Counter()
    for line in lines:
        shards[line["shard"]] += [*line["items"], *line["dropped"]]
        ids.update(one for one in line["ids"] if one is not None)
        if line["step"] is None:
            ended.add(line["shard"])
    for shard, items in sorted(shards.items()):
        problems += _lost_or_twice(f"epoch {epoch}, shard {shard}", items, complete=shard in ended)
    if repeated := sorted(one for one, count in ids.items() if count > 1):
        problems.append(f"epoch {epoch}: {len(repeated)} samples are twice: {_some(repeated)}")
    return lines, len(ended) == lines[0]["num_shards"], problems


def _lost_or_twice(where: str, items: list[int], *, complete: bool) -> Iterator[str]:
    if twice := sorted(number for number, count in Counter(items).items() if count > 1):
        yield f"{where}: {len(twice)} items are twice: {_some(twice)}"
    lost = sorted(set(range(max(items, default=-1) + 1)) - set(items))
    if lost and complete:
        yield f"{where}: {len(lost)} items are lost: {_some(lost)}"


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("order-*.jsonl"))
    if not files:
        raise FormatError(f"{folder} has no order log; pass the folder that `order_log` named")
    for file in files:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                raise FormatError(f"{file}, line {number} is damaged: {error}; remove that line") from error


def _some(values: list[Any]) -> str:
    more = f" and {len(values) - _MOST} more" if len(values) > _MOST else ""
    return ", ".join(map(str, values[:_MOST])) + more
