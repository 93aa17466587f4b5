"""The lines of an epoch in, its samples and items out: which are lost or used twice.

| data | proof |
|---|---|
| items with a global order | each place of the epoch occurs once: no dataset is needed |
| a stream | in each shard, each item occurs once; and each id of a dataset once |
| packs that Energon chooses | each pack occurs once; `order_data.py` finds lost packs |
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks, entries
from energon_packed.files import DiskList
from energon_packed.loading.monitoring.order_lines import Line

MAX_NAMED = 5
"""Items that a message names."""
Int64 = npt.NDArray[np.int64]
_FRAGMENT = np.dtype([(name, np.int64) for name in ("item", "count", "number")])


class Epoch:
    """The lines of an epoch. Samples and items are in files, about 50 bytes for each sample.

    Args:
        number: from 0.

    Attributes:
        facts: header of the latest process with a line that counts; {} without such a line.
        totals: `steps`, `replaced`, `samples` and `dropped`, as in OrderReport.
        sources: samples of each dataset.
        unnamed: samples without an id.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.facts: dict[str, Any] = {}
        self.totals: Counter[str] = Counter()
        self.unnamed = 0
        self.sources: Counter[str] = Counter()
        self._ids = DiskList(np.int64)
        self._once = {"samples": DiskList(np.int64), "packs": DiskList(np.int64)}  # hashes that occur once
        self._items: dict[int, _Items] = defaultdict(_Items)  # of each shard; a global order is shard 0
        self._num_shards: int | None = None  # of a stream
        self._ended = set[int]()  # shards
        self._at_end: dict[int, set[int]] = defaultdict(set)  # by world size: ranks that have finished the epoch
        self._reached: dict[int, int] = defaultdict(lambda: -1)  # last place of each rank in a global order
        self._replaced: dict[tuple[Any, ...], int] = {}  # content of replaced lines
        self._different: list[str] = []

    def add(self, line: Line) -> None:
        """Add a line; the lines that were replaced are before the lines of their rank that replace them."""
        process, ids = line.process, line.ids or []
        if not line.counts:
            if line.ids is not None:
                self.totals["replaced"] += 1
                self._replaced[_step_of(line)] = _content_of(line)
            return
        if len(process.starts) >= len(self.facts.get("starts", ())):
            self.facts = process.header
        if line.ends_epoch:
            self._at_end[process.world_size].add(process.rank)
        if line.ids is not None:
            self.totals["steps"] += 1
            before = self._replaced.get(_step_of(line)) if self._replaced else None
            if before is not None and before != _content_of(line) and not self.facts.get("learns"):
                self._different.append(f"step {line.step} of rank {process.rank}")
        self.totals["samples"] += len(ids)
        self.sources.update(map(str, line.sources))
        self._ids.extend([hash(ident) for ident in ids if ident is not None])
        self.unnamed += ids.count(None)
        self.totals["dropped"] += len(line.dropped)
        if line.packs:
            datasets = tuple(sorted(set(map(str, line.sources))))
            self._once["packs"].extend([hash((pack, datasets)) for pack in line.packs])
            return
        items = [*line.items, *line.dropped]
        if "size" in process.header:
            self._items[0].add(items)
            # A rank without items in its last step has none to wait for.
            self._reached[process.rank] = max([self._reached[process.rank], *map(int, items)])
            return
        named = zip(ids, line.sources, strict=True)
        self._once["samples"].extend([hash(pair) for pair in named if pair[0] is not None])
        if line.shard is not None:
            self._num_shards = line.num_shards
            self._items[line.shard].add(items)
            self._ended |= {line.shard} if line.end else set()

    def problems(self) -> Iterator[str]:
        """Yield a line for each kind of loss, repetition or difference."""
        scope = f"epoch {self.number}"
        if self._different:
            count, names = some(self._different)
            yield f"{scope}: {count} batches had other samples before a resume than after it: {names}"
        if not self.facts.get("repeats"):
            for name, hashes in self._once.items():
                if count := len(hashes.repeated()):
                    yield f"{scope}: {count} {name} are used twice"
        for shard, items in sorted(self._items.items()):
            if self.has_order:
                yield from items.problems(scope, until=self._frontier, is_partial=self._is_partial)
            else:  # until a shard ends, gaps are items that wait in the buffer of the packer
                complete = shard in self._ended and not self._is_partial
                yield from items.problems(f"{scope}, shard {shard}", until=items.stop if complete else 0)

    @property
    def has_order(self) -> bool:
        """Whether the epoch has a global order."""
        return "size" in self.facts

    @property
    def repeats(self) -> bool:
        """Whether samples may be drawn several times."""
        return bool(self.facts.get("repeats"))

    @property
    def hashes(self) -> Int64:
        """int64 hash of the id of each sample, sorted; samples without an id are in `unnamed`."""
        return self._ids.sorted()

    @property
    def passes(self) -> tuple[int, int]:
        """Passes over the data that all ranks have finished, and that a rank has started."""
        if self.facts.get("endless"):
            size = self.facts["size"]
            return self._frontier // size, max(0, self._items[0].stop - 1) // size + 1
        return int(self.complete), 1

    @property
    def used_packs(self) -> int | None:
        """Used packs, if `epoch_end="drop"` of Energon left out the other packs without a line; otherwise None."""
        is_left_out = (
            self.facts.get("drops") and self.totals["steps"] == self.facts["steps"] * self.facts["world_size"]
        )
        return len(self._once["packs"]) if is_left_out else None

    @cached_property
    def complete(self) -> bool:
        """Whether the log has each item of the epoch: all places, all shards, or the end of each rank."""
        if self._is_partial:
            return False
        if self.has_order and not self.facts["endless"]:
            return not any(map(len, self._items[0].gaps(self.facts["size"])))
        if self._num_shards is not None:
            return len(self._ended) == self._num_shards
        return self._is_read

    @property
    def _frontier(self) -> int:
        """Place up to which all ranks have read, if no item is lost."""
        ranks = range(self.facts["world_size"])
        # In the last step, a rank may have no item.
        return int(self.facts["size"]) if self._is_read else 1 + min(self._reached[rank] for rank in ranks)

    @property
    def _is_partial(self) -> bool:
        """Whether the log was started in this epoch, and has no line of its earlier steps."""
        epoch, step = self.facts["starts"][0][2]
        return bool(epoch == self.number and step)

    @property
    def _is_read(self) -> bool:
        """Whether each rank has reported the end of the epoch."""
        return any(len(ranks) == world_size for world_size, ranks in self._at_end.items())


def _step_of(line: Line) -> tuple[Any, ...]:
    """Return what decides the samples of a line."""
    return line.process.rank, line.step, line.process.layout


def _content_of(line: Line) -> int:
    """Hash the samples of a line."""
    return hash((*(line.ids or ()), *map(str, line.items), *line.packs))


class _Items:
    """Items of a global order or of a shard.

    Attributes:
        whole: indices of items that were not split.
        fragments: of the other items, the index, the number of fragments, and which of them.
    """

    def __init__(self) -> None:
        self.whole, self.fragments = DiskList(np.int64), DiskList(_FRAGMENT)

    def add(self, items: Sequence[int | str]) -> None:
        """Add items; a fragment is "ITEM#NUMBER/COUNT"."""
        self.whole.extend([item for item in items if isinstance(item, int)])
        for name in items:
            if isinstance(name, str):
                item, _, rest = name.partition("#")
                number, _, count = rest.partition("/")
                self.fragments.extend([(int(item), int(count), int(number))])

    @property
    def stop(self) -> int:
        """Index after the last item."""
        return 1 + max((int(indices[-1]) for indices in self._present if len(indices)), default=-1)

    def gaps(self, until: int) -> Iterator[Int64]:
        """Yield the indices below a limit of which there is no item, sorted."""
        present = self._present
        for block in blocks(until):
            is_gap = np.ones(block.stop - block.start, dtype=np.bool_)
            for indices in present:
                first, last = np.searchsorted(indices, [block.start, block.stop])
                is_gap[indices[first:last] - block.start] = False
            yield np.flatnonzero(is_gap) + block.start

    def problems(self, scope: str, *, until: int, is_partial: bool = False) -> Iterator[str]:
        """Yield a line for repeated items and a line for lost items.

        Args:
            scope: start of the lines.
            until: index up to which no item may be lost.
            is_partial: the log has no line of the first items.
        """
        repeated = chain(entries(self.whole.repeated()), map(_name, entries(self.fragments.repeated())))
        count, names = some(repeated)
        if count:
            yield f"{scope}: {count} items are used twice: {names}"
        first = min(self.whole.sorted()[:1].tolist(), default=until) if is_partial else -1
        gaps = (gap[gap > first].tolist() for gap in self.gaps(until))
        count, names = some(chain(chain.from_iterable(gaps), self._lost_fragments(until)))
        if count:
            yield f"{scope}: {count} items are lost: {names}"

    @property
    def _present(self) -> tuple[Int64, Int64]:
        """The indices of the items and of the fragments, sorted."""
        return self.whole.sorted(), self.fragments.sorted()["item"]

    def _lost_fragments(self, until: int) -> Iterator[str]:
        """Yield the fragments that the log does not have, of items with another fragment."""
        for (item, count), group in groupby(entries(self.fragments.sorted()), itemgetter(0, 1)):
            numbers = {number for _, _, number in group}
            if item < until and len(numbers) < count:
                yield from (_name((item, count, number)) for number in range(count) if number not in numbers)


def _name(fragment: tuple[int, int, int]) -> str:
    """Return a fragment as in a log."""
    item, count, number = fragment
    return f"{item}#{number}/{count}"


def some(items: Iterable[Any]) -> tuple[int, str]:
    """Return the number of items, and the first of them as text."""
    rest = iter(items)
    shown = list(islice(rest, MAX_NAMED))
    more = sum(1 for _ in rest)
    return len(shown) + more, ", ".join(map(str, shown)) + (", ..." if more else "")
