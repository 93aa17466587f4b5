"""The lines of an order log in, an OrderReport out: the samples of each epoch that are lost or used twice.

| data | proof |
|---|---|
| items with a global order | each place of the epoch occurs once: no dataset is needed |
| a stream | in each shard, each item occurs once; and each id of a dataset once |
| packs that Energon chooses | each pack occurs once; `order_data.py` finds lost packs |
| all | no line is missing, see `order_missing.py` |

Memory: about 40 bytes for each sample of an epoch, and one epoch at a time.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.loading.monitoring.order_data import Epoch, LoggedData
from energon_packed.loading.monitoring.order_lines import Line, OrderFiles, intervals
from energon_packed.loading.monitoring.order_missing import MissingLines

_MAX_NAMED = 5  # items that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """Result of a check of an order log.

    Attributes:
        steps: batches of all ranks, each counted once.
        repeated: batches that a resumed run trained on again, in place of batches that were lost with a kill.
        samples: samples in these batches.
        dropped: items that were read or left out, but are in no batch.
        left_out: samples of the data that are missing because their items were dropped; 0 without data.
        complete: epochs that every rank has read to the end.
        epochs: epochs with a line.
        sources: samples of each dataset.
        processes: starts of the run, such as `3 ranks after epoch 0, step 40`.
        problems: lost, repeated or different items, one line each.
    """

    steps: int
    repeated: int
    samples: int
    dropped: int
    left_out: int
    complete: list[int]
    epochs: list[int]
    sources: dict[str, int]
    processes: list[str]
    problems: list[str] = field(default_factory=list)


class _Tally:
    """Counts of one epoch."""

    def __init__(self, epoch: int, ended: set[int]) -> None:
        self.epoch, self.ended = epoch, ended
        self.steps = self.repeated = self.samples = self.dropped = self.unnamed = 0
        self.sources: Counter[str] = Counter()
        self.ids, self.pairs, self.places = array("q"), array("q"), array("q")
        self.packs = array("q")
        self.shards: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self.fragments: dict[int, list[str]] = defaultdict(list)  # "12#1/3": items of a shard that were split
        self.num_shards: int | None = None
        self.at_end: dict[int, set[int]] = defaultdict(set)  # ranks that have read the epoch to its end, by world size
        self.reached: dict[int, int] = {}  # last place of each rank
        self.replaced: dict[tuple[Any, ...], int] = {}  # content of replaced lines
        self.facts: dict[str, Any] = {}
        self.different: list[str] = []

    def add(self, line: Line) -> None:
        entries, facts = line.entries, line.process.header
        rank, step = entries["rank"], entries["step"]
        # Replaced lines are earlier in the file of the rank than the lines that replace them.
        key = (rank, step, line.process.layout)
        content = hash((*entries["ids"], *map(str, entries.get("items", ())), *entries.get("packs", ())))
        if not line.counts:
            if step is not None:
                self.repeated += 1
                self.replaced[key] = content
            return
        if len(facts["starts"]) >= len(self.facts.get("starts", ())):
            self.facts = facts
        if line.ends_epoch:
            self.at_end[facts["world_size"]].add(rank)
        if step is not None:
            self.steps += 1
            if self.replaced.get(key, content) != content and not facts.get("learns"):
                self.different.append(f"step {step} of rank {rank}")
        ids, sources = entries["ids"], entries["sources"]
        self.samples += len(ids)
        self.sources.update(map(str, sources))
        self.ids.extend([hash(ident) for ident in ids if ident is not None])
        self.unnamed += ids.count(None)
        dropped = entries.get("dropped", [])
        self.dropped += len(dropped)
        items = [*entries.get("items", ()), *dropped]
        if "shard" in entries:
            self.shards[entries["shard"]].extend([item for item in items if isinstance(item, int)])
            self.fragments[entries["shard"]] += [item for item in items if isinstance(item, str)]
            self.num_shards = entries.get("num_shards", self.num_shards)
            if entries.get("end"):
                self.ended.add(entries["shard"])
            self.pairs.extend([hash(pair) for pair in zip(ids, sources, strict=True) if pair[0] is not None])
        elif "packs" in entries:
            datasets = tuple(sorted(set(map(str, sources))))
            self.packs.extend([hash((pack, datasets)) for pack in entries["packs"]])
        elif "size" not in facts:  # the lines of OrderLogCallback
            self.pairs.extend([hash(pair) for pair in zip(ids, sources, strict=True) if pair[0] is not None])
        else:
            self.places.extend(items)
            # A rank without items in its last step has none to wait for.
            self.reached[rank] = max(self.reached.get(rank, -1), *items, -1) if items else self.reached.get(rank, -1)

    def problems(self) -> Iterator[str]:
        scope = f"epoch {self.epoch}"
        if self.different:
            yield (
                f"{scope}: {len(self.different)} batches had other samples before a resume than after it: "
                f"{_some(self.different)}"
            )
        if not self.facts.get("repeats"):
            for name, hashes in (("samples", self.pairs), ("packs", self.packs)):
                if count := len(_repeated(_sorted(hashes))):
                    yield f"{scope}: {count} {name} are used twice"
        for shard, items in sorted(self.shards.items()):
            complete = shard in self.ended and not self.is_partial
            yield from _of_shard(f"{scope}, shard {shard}", items, self.fragments[shard], complete=complete)
        yield from self._of_places(scope)

    def _of_places(self, scope: str) -> Iterator[str]:
        if not self.places:
            return
        places = _sorted(self.places)
        if len(twice := _repeated(places)):
            yield f"{scope}: {len(twice)} items are used twice: {_some(twice.tolist())}"
        present = np.zeros(self.frontier, dtype=np.bool_)
        present[places[places < self.frontier]] = True
        lost = np.flatnonzero(~present)
        if self.is_partial:
            lost = lost[lost > places[0]]
        if len(lost):
            yield f"{scope}: {len(lost)} items are lost: {_some(lost.tolist())}"

    @property
    def frontier(self) -> int:
        """Place up to which all ranks have read, if no item is lost."""
        size = self.facts.get("size")
        ranks = [rank for rank in self.reached if rank < self.facts["world_size"]]
        if len(ranks) < self.facts["world_size"]:
            return 0
        reached = 1 + min(self.reached[rank] for rank in ranks)
        # In the last step, a rank may have no item.
        return size if size is not None and self._is_read() else reached

    @property
    def is_partial(self) -> bool:
        """Whether the log was started in this epoch, and has no line of its earlier steps."""
        epoch, step = self.facts["starts"][0][2]
        return bool(epoch == self.epoch and step)

    @cached_property
    def complete(self) -> bool:
        """Whether the log has each item of the epoch: all places, all shards, or the end of each rank."""
        if self.is_partial:
            return False
        size = self.facts.get("size")
        if size is not None and not self.facts.get("endless"):
            places = _sorted(self.places)
            return len(places) - int(np.count_nonzero(places[1:] == places[:-1])) == int(size)
        if self.num_shards is not None:
            return len(self.ended) == self.num_shards
        return self._is_read()

    def _is_read(self) -> bool:
        """Whether each rank has reported the end of the epoch."""
        return any(len(ranks) == world_size for world_size, ranks in self.at_end.items())

    def result(self) -> Epoch:
        """Return what a comparison with the data needs."""
        samples = np.frombuffer(self.ids, dtype=np.int64) if self.ids else np.zeros(0, dtype=np.int64)
        least, most = int(self.complete), 1
        size: int | None = self.facts.get("size")
        if size is not None and self.facts.get("endless"):
            least, most = self.frontier // size, max(self.places, default=0) // size + 1
        repeats = bool(self.facts.get("repeats"))
        is_left_out = self.facts.get("drops") and self.steps == self.facts["steps"] * self.facts["world_size"]
        packs = len(self.packs) if is_left_out else None
        return Epoch(self.epoch, samples, self.unnamed, repeats, size is not None, least, most, self.dropped, packs)


def _of_shard(scope: str, whole: "array[int]", fragments: list[str], *, complete: bool) -> Iterator[str]:
    """Yield a line for repeated items of a shard and a line for lost items.

    Args:
        scope: start of the lines.
        whole: items that were not split.
        fragments: "ITEM#FRAGMENT/COUNT" of the other items.
        complete: the shard has ended. Until then, gaps are items that wait in the buffer of the packer.
    """
    indices = _sorted(whole)
    twice = [*_repeated(indices).tolist(), *sorted(name for name, count in Counter(fragments).items() if count > 1)]
    if twice:
        yield f"{scope}: {len(twice)} items are used twice: {_some(twice)}"
    counts = {int(name.split("#")[0]): int(name.split("/")[1]) for name in fragments}
    expected = {f"{item}#{number}/{count}" for item, count in counts.items() for number in range(count)}
    present = np.zeros(1 + max([*indices[-1:].tolist(), *counts], default=-1), dtype=np.bool_)
    present[indices] = True
    present[list(counts)] = True
    lost = [*np.flatnonzero(~present).tolist(), *sorted(expected.difference(fragments))]
    if lost and complete:
        yield f"{scope}: {len(lost)} items are lost: {_some(lost)}"


def _sorted(values: "array[int]") -> npt.NDArray[np.int64]:
    return np.sort(np.frombuffer(values, dtype=np.int64)) if values else np.zeros(0, dtype=np.int64)


def _repeated(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the values that occur several times in sorted values."""
    return np.unique(values[1:][values[1:] == values[:-1]])


def _some(items: list[Any]) -> str:
    shown = ", ".join(map(str, items[:_MAX_NAMED]))
    return shown if len(items) <= _MAX_NAMED else f"{shown}, ..."


def check_order(folder: Path, data: LoggedData | None = None) -> OrderReport:
    """Read the logs of all ranks, and find items that are lost, used twice, or different after a resume.

    Args:
        folder: the `order_log` of the loaders.
        data: data with which each epoch is compared; None compares the ranks with each other.

    Raises:
        FormatError: there is no order log, or a line is damaged.
        ConfigError: the loader was a JointLoader, which has a folder for each of its loaders.
    """
    if not next(folder.glob("order-*.jsonl"), None) and (inner := sorted(folder.glob("*/order-00000.jsonl"))):
        raise ConfigError(
            f"{folder} has the logs of several loaders. Pass one of {', '.join(str(f.parent) for f in inner)}."
        )
    files = OrderFiles(folder)
    problems, complete, missing = list[str](), list[int](), MissingLines(files)
    total: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for epoch in files.epochs:
        tally = _Tally(epoch, files.ended(epoch))
        for line in files.lines(epoch):
            missing.add(line)
            tally.add(line)
        if not tally.facts:
            continue
        problems += tally.problems()
        if data is not None:
            differences, left_out = data.compare(tally.result())
            problems += differences
            total["left_out"] += left_out
        complete += [epoch] if tally.complete else []
        total.update(steps=tally.steps, repeated=tally.repeated, samples=tally.samples, dropped=tally.dropped)
        sources.update(tally.sources)
    return OrderReport(
        **{name: total[name] for name in ("steps", "repeated", "samples", "dropped", "left_out")},
        complete=complete,
        epochs=files.epochs,
        sources=dict(sources),
        processes=list(intervals(files.last)),
        problems=[*files.problems, *missing.problems(), *problems],
    )
