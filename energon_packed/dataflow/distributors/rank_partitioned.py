"""RankPartitioned: files, shards or other parts of the data, each read by one share alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.share import Share, shuffled


class RankPartitioned(Distributor):
    """Deals parts to shares, so that no part is opened by two workers. A share without a part ends at once.

        RankPartitioned(sorted(Path("data").glob("*.jsonl")), lambda path: map(json.loads, path.open()))

    Resuming reads the current part from its start, and skips what was used of it.

    Args:
        parts: what is dealt: paths, shards, ranges.
        read: the items of one part, in the same order whenever it is called.
        shuffle: parts in a new order every epoch, by seed.
        shuffle_within: the items of each part too; a part is then held in memory.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        *,
        shuffle: bool = True,
        shuffle_within: bool = False,
    ) -> None:
        self.parts = parts
        self.part_items = read
        self.shuffle = shuffle
        self.shuffle_within = shuffle_within

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """The items of the share's parts; a cursor is [place of the part, items used of it, number]."""
        place, used, number = start or (0, 0, 0)
        mine = self._mine(share)
        for at in range(place, len(mine)):
            skip = used if at == place else 0
            for row, value in enumerate(self._rows(share, int(mine[at]))):
                if row >= skip:
                    yield Item(number, value, key=[at, row], cursor=[at, row + 1, number + 1])
                    number += 1

    def again(self, share: Share, keys: Sequence[Any]) -> list[Any]:
        """By place and row; each part is read once."""
        mine, found = self._mine(share), {}
        for place in dict.fromkeys(key[0] for key in keys):
            wanted = {key[1] for key in keys if key[0] == place}
            for row, value in enumerate(self._rows(share, int(mine[place]))):
                if row in wanted:
                    found[place, row] = value
                if row >= max(wanted):
                    break
        return [found[key[0], key[1]] for key in keys]

    def identity(self) -> dict[str, Any]:
        """Number and order of the parts."""
        order = {"shuffle": self.shuffle, "shuffle_within": self.shuffle_within}
        return super().identity() | {"parts": len(self.parts)} | order

    def _mine(self, share: Share) -> Any:
        return shuffled(len(self.parts), share, shuffle=self.shuffle)[share.index :: share.count]

    def _rows(self, share: Share, part: int) -> Iterable[Any]:
        rows = self.part_items(self.parts[part])
        if not self.shuffle_within:
            return rows
        held = list(rows)
        return [held[row] for row in shuffled(len(held), share, part, 1)]
