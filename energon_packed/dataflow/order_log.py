"""The order log: one JSON line for every step that a rank handed out, and the proof that nothing is lost or twice.

    {"epoch": 0, "step": 3, "rank": 0, "worker": 1, "world_size": 8, "num_workers": 2,
     "ids": ["a", "b"], "sources": ["captions.jsonl", "chats.jsonl"], "items": [4, 7], "dropped": [5]}

`items` are numbers in the share of that worker: an epoch has each from 0 on once, in a batch or dropped. The line of a
worker's end has no step. A run that resumes repeats the lines behind its checkpoint, and they must be equal. With
another number of ranks or workers, numbers are of other shares: such a run writes to a folder of its own.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energon_packed.dataflow.share import Share
from energon_packed.errors import FormatError

if TYPE_CHECKING:
    from energon_packed.dataflow.worker_stream import Step

_MOST = 5  # problems that are named


class OrderLog:
    """Appends the steps of one rank to a file of its own.

    Args:
        folder: of the files of all ranks.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"order-{rank:05d}.jsonl"

    def write(self, share: Share, step: int | None, content: "Step") -> None:
        """Append a line.

        Args:
            share: of the worker.
            step: number of the step in the epoch, from 1; None for the end of a worker.
            content: ids and items.
        """
        batch = content.batch
        line = {
            "epoch": share.epoch,
            "step": step,
            "rank": share.rank,
            "worker": share.worker,
            "world_size": share.world_size,
            "num_workers": share.num_workers,
            "ids": list(getattr(batch, "ids", [])),
            "sources": [None if one is None else one.dataset for one in getattr(batch, "sources", [])],
            "items": content.items,
            "dropped": content.dropped,
        }
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """What an order log proves.

    Attributes:
        steps: steps of all ranks, each once.
        repeated: lines that a resumed run wrote again.
        samples: sub-samples in them.
        dropped: items that were used up without a batch.
        complete: epochs in which every worker of every rank ended.
        epochs: epochs with a step.
        sources: sub-samples of each data set.
        problems: what is lost, twice or different, one line each.
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
    """Read the logs of all ranks, and look for items that are lost, twice, or different after a resume.

    Raises:
        FormatError: there is no order log, or one is damaged.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    problems: list[str] = []
    repeated = 0
    for line in _lines(folder):
        worker = line["worker"] if line["step"] is None else None
        key = (line["epoch"], line["rank"], line["step"], worker)
        before = lines.setdefault(key, line)
        if before is not line:
            repeated += 1
            if before != line:
                where = f"epoch {line['epoch']}, step {line['step']}, rank {line['rank']}"
                problems.append(
                    f"{where} had {_some(before['ids'])} before a resume, and {_some(line['ids'])} after it"
                )
    epochs = sorted({line["epoch"] for line in lines.values()})
    complete = []
    for epoch in epochs:
        of_epoch = [line for line in lines.values() if line["epoch"] == epoch]
        if len(places := {(line["world_size"], line["num_workers"]) for line in of_epoch}) > 1:
            some = " and of ".join(f"{ranks} ranks of {workers} workers" for ranks, workers in sorted(places))
            problems.append(f"epoch {epoch} has steps of {some}: name another `order_log` folder where that changes")
            continue
        if _is_complete(of_epoch):
            complete.append(epoch)
        problems += _lost_or_twice(epoch, of_epoch)
    return OrderReport(
        steps=sum(line["step"] is not None for line in lines.values()),
        repeated=repeated,
        samples=sum(len(line["ids"]) for line in lines.values()),
        dropped=sum(len(line["dropped"]) for line in lines.values()),
        complete=complete,
        epochs=epochs,
        sources=dict(Counter(str(name) for line in lines.values() for name in line["sources"])),
        problems=problems,
    )


def _is_complete(lines: list[dict[str, Any]]) -> bool:
    ended = {(line["rank"], line["worker"]) for line in lines if line["step"] is None}
    return len(ended) == int(lines[0]["world_size"]) * int(lines[0]["num_workers"])


def _lost_or_twice(epoch: int, lines: list[dict[str, Any]]) -> Iterator[str]:
    """Items by their numbers in each worker's share; ids over all workers."""
    shares: dict[tuple[int, int], list[int]] = defaultdict(list)
    ended = set()
    ids: Counter[str] = Counter()
    for line in lines:
        share = (line["rank"], line["worker"])
        shares[share] += [*line["items"], *line["dropped"]]
        ids.update(one for one in line["ids"] if one is not None)
        if line["step"] is None:
            ended.add(share)
    for (rank, worker), items in sorted(shares.items()):
        where = f"epoch {epoch}, rank {rank}, worker {worker}"
        if twice := sorted(number for number, count in Counter(items).items() if count > 1):
            yield f"{where}: {len(twice)} items are twice: {_some(twice)}"
        lost = sorted(set(range(max(items, default=-1) + 1)) - set(items))
        if lost and (rank, worker) in ended:
            yield f"{where}: {len(lost)} items are lost: {_some(lost)}"
    if repeated := sorted(one for one, count in ids.items() if count > 1):
        yield f"epoch {epoch}: {len(repeated)} samples are twice: {_some(repeated)}"


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
