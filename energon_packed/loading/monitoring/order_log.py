"""The order log: steps of a loader in, JSON lines out (`OrderLog`); files of all ranks in, an `OrderReport` out.

    {"epoch": 0, "step": 3, "rank": 0, "world_size": 8, "worker": 1, "num_workers": 2,
     "ids": ["a", "b"], "sources": ["captions.jsonl", "chats.jsonl"], "items": [24, 32], "dropped": [],
     "segments": [[0, 0, 8, 2, null]]}                      for a stream, instead: "shard": 1, "num_shards": 16,
                                                            and "repeats": true if weights repeat samples

`items` are places in the global order of the epoch, over all ranks; for a stream, indices in the shard, and "12#1/3"
for fragment 1 of 3 of item 12. An epoch has each place from 0 on exactly once, in a batch or dropped. The last line of
a worker, or of a shard, has no step. A resumed run repeats the lines after its checkpoint, and they must be equal.
With other ranks, a shard continues with equal lines, and a segment records the step from which its lines replace the
lines of earlier segments.
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

_MAX_NAMED = 5  # items that a message names


class OrderLog:
    """Append the steps of a rank to its file `order-RANK.jsonl`.

    Args:
        folder: folder of the files of all ranks.
        rank: rank of this process.
        planned: items have a global order; False for streams.
        repeats: an epoch may have a sample several times, so ids do not show which items are lost or used twice.
    """

    def __init__(self, folder: Path, rank: int, *, planned: bool, repeats: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"order-{rank:05d}.jsonl"
        self._planned = planned
        self._repeats = repeats

    def write(self, place: tuple[int, int, int], position: Any, step: "Step") -> None:
        """Append a line.

        Args:
            place: (rank, world size, number of workers).
            position: position of the loader after the step.
            step: batch and items of the step.
        """
        if step.ended and not self._planned:
            return  # a worker of a stream ended, and the end of each of its shards has a line already
        ended = step.ended if self._planned else step.batch is None
        used = step.batch if step.items else None  # not a row without targets, which repeats another rank's samples
        rank, world_size, num_workers = place
        if self._planned:
            order: dict[str, Any] = {"segments": [segment.to_plain() for segment in position.segments]}
        else:
            order = {"shard": step.state[0] if step.state else None, "num_shards": position.num_shards}
            if self._repeats:
                order["repeats"] = True
        line = {
            "epoch": position.epoch,
            "step": None if ended else position.step,
            "rank": rank,
            "world_size": world_size,
            "worker": step.worker,
            "num_workers": num_workers,
            "ids": list(getattr(used, "ids", [])),
            "sources": [None if source is None else source.dataset for source in getattr(used, "sources", [])],
            "items": step.items,
            "dropped": step.dropped,
        }
        # Opened for each line, so that a kill loses at most the line that is being written.
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line | order) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """Result of a check of an order log.

    Attributes:
        steps: steps of all ranks, each counted once.
        repeated: lines that a resumed run wrote again.
        samples: samples in these steps.
        dropped: items that were read, but are in no batch.
        complete: epochs that every rank has read to the end.
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
    """Read the logs of all ranks, and find items that are lost, used twice, or different after a resume.

    Raises:
        FormatError: there is no order log, or a line is damaged.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    problems: list[str] = []
    repeated = 0
    for line in _lines(folder):
        before = lines.setdefault(_key_of(line), line)
        if before is not line:
            repeated += 1
            same_ranks = all(before[name] == line[name] for name in ("rank", "world_size", "num_workers"))
            if same_ranks and before["step"] != line["step"]:
                problems.append(
                    f"epoch {line['epoch']}, rank {line['rank']}: {len(line['items'])} items are twice, in steps "
                    f"{before['step']} and {line['step']}: {_some(line['items'])}"
                )
            elif any(before[name] != line[name] for name in ("ids", "sources", "items", "dropped")):
                step = f"epoch {line['epoch']}, step {line['step']}, rank {line['rank']}"
                problems.append(
                    f"{step} had {_some(before['ids'])} before a resume, and {_some(line['ids'])} after it"
                )
    epochs = sorted({line["epoch"] for line in lines.values()})
    complete, kept = [], []
    for epoch in epochs:
        of_epoch = [line for line in lines.values() if line["epoch"] == epoch]
        check = _check_planned if "segments" in of_epoch[0] else _check_stream
        valid, is_complete, of_check = check(epoch, of_epoch)
        kept += valid
        problems += of_check
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


def _key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Identity of a line in the run: a second line with the same key was written by a resumed run."""
    items = line["items"] or line["dropped"]
    if "segments" not in line:  # a stream: a shard may be continued by any rank, so the rank is not part of the key
        return line["epoch"], line["shard"], line["step"] is None, items[0] if items else None
    end = line["worker"] if line["step"] is None else None
    return line["epoch"], line["rank"], line["step"], end, json.dumps(line["segments"])


Checked = tuple[list[dict[str, Any]], bool, list[str]]
"""Lines that count, whether the epoch is complete, and problems."""


def _check_planned(epoch: int, lines: list[dict[str, Any]]) -> Checked:
    """Check the lines of an epoch with a global order: over all ranks, each place occurs once."""
    last = max((line["segments"] for line in lines), key=len)
    valid = []
    for line in lines:
        own = line["segments"]
        if own != last[: len(own)]:  # two runs resumed the same checkpoint with different ranks
            layouts = sorted(
                {f"{line['segments'][-1][2]} ranks from step {line['segments'][-1][0]}" for line in lines}
            )
            return lines, False, [
                f"epoch {epoch} was resumed in different ways, {_some(layouts)}: pass another `order_log` folder to "
                "each of these runs"
            ]  # fmt: skip
        # Steps after the start of the next segment were lost with the run that was resumed from before them.
        if len(own) == len(last) or (line["step"] is not None and line["step"] <= last[len(own)][0]):
            valid.append(line)
    ended = {(line["rank"], line["worker"]) for line in valid if line["step"] is None}
    complete = any(len(ended) >= line["world_size"] * line["num_workers"] for line in valid if line["step"] is None)
    items = [place for line in valid for place in (*line["items"], *line["dropped"])]
    return valid, complete, list(_lost_or_twice(f"epoch {epoch}", items, complete=complete))


def _check_stream(epoch: int, lines: list[dict[str, Any]]) -> Checked:
    """Check the lines of an epoch of a stream: in each shard, each item occurs once, and each id over all shards.

    Ids are not compared if the data repeats samples, and an id may occur in several datasets.
    """
    shards: dict[int, list[int | str]] = defaultdict(list)
    ended: set[int] = set()
    problems: list[str] = []
    ids: Counter[tuple[str, str]] = Counter()
    for line in lines:
        shards[line["shard"]] += [*line["items"], *line["dropped"]]
        if not line.get("repeats"):
            pairs = zip(line["ids"], line["sources"], strict=True)
            ids.update((ident, str(source)) for ident, source in pairs if ident is not None)
        if line["step"] is None:
            ended.add(line["shard"])
    for shard, items in sorted(shards.items()):
        problems += _lost_or_twice(f"epoch {epoch}, shard {shard}", items, complete=shard in ended)
    if repeated := sorted(ident for (ident, _), count in ids.items() if count > 1):
        problems.append(f"epoch {epoch}: {len(repeated)} samples are twice: {_some(repeated)}")
    return lines, len(ended) == lines[0]["num_shards"], problems


def _lost_or_twice(scope: str, items: list[int | str], *, complete: bool) -> Iterator[str]:
    """Yield a line for repeated items and a line for lost items."""
    if twice := sorted([item for item, count in Counter(items).items() if count > 1], key=str):
        yield f"{scope}: {len(twice)} items are twice: {_some(twice)}"
    expected: set[int | str] = set()
    indices = {item for item in items if isinstance(item, int)}
    for item in set(items) - indices:
        index, count = str(item).split("#")[0], int(str(item).split("/")[1])
        indices.add(int(index))
        expected |= {f"{index}#{fragment}/{count}" for fragment in range(count)}
    # Until an epoch is complete, gaps are items of steps that other ranks have not logged yet.
    lost = sorted((set(range(max(indices, default=-1) + 1)) - indices) | (expected - set(items)), key=str)
    if lost and complete:
        yield f"{scope}: {len(lost)} items are lost: {_some(lost)}"


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("order-*.jsonl"))
    if not files:
        raise FormatError(f"{folder} has no order log. Pass the folder that was `order_log` of the loader.")
    for file in files:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                raise FormatError(f"{file}, line {number} is damaged: {error}. Remove that line.") from error


def _some(values: list[Any]) -> str:
    """The first values, and how many more there are."""
    more = f" and {len(values) - _MAX_NAMED} more" if len(values) > _MAX_NAMED else ""
    return ", ".join(map(str, values[:_MAX_NAMED])) + more
