"""PackBuffer: the samples that a packer holds, and the rows that it made of them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import orjson

from energon_packed.encoding import EncodedSample
from energon_packed.errors import Reject
from energon_packed.loading.packers.base import Packer, Sizes
from energon_packed.loading.process import RecordAt
from energon_packed.packing.balance import RowSizes


class BufferedItem:
    """One item that waits for its row.

    Attributes:
        number: of the item in its share.
        samples: what it was encoded to.
        size: (tokens, images, patches).
        squares: squared lengths of the samples, summed.
        at: where its record is, if it is one of an input file.
        ref: number and key of the item as JSON: a state lists it at every step, so it is made once.
    """

    __slots__ = ("at", "number", "ref", "samples", "size", "squares")

    def __init__(self, key: Any, number: int, samples: Sequence[EncodedSample], at: RecordAt | None = None) -> None:
        self.number = number
        self.at = at
        self.samples = samples
        self.ref = orjson.dumps([number, key]).decode()
        tokens = images = patches = squares = 0
        for one in samples:
            length = len(one.input_ids)
            tokens += length
            squares += length**2
            images += one.num_images
            if one.image_grid_thw is not None:
                patches += int(one.image_grid_thw.prod(dim=1).sum())
        self.squares = squares
        self.size = tokens, images, patches


class PackBuffer:
    """Collects samples, and gives rows when its packer makes some.

    Attributes:
        waiting: samples without a row.
        ready: rows that no batch was made of yet.
    """

    def __init__(self, packer: Packer, on_drop: Callable[[BufferedItem, Reject | None], None]) -> None:
        """Args:
        packer: groups the samples.
        on_drop: called with a sample that fits no row (and why), or is part of a dropped last group (and None).
        """
        self.packer = packer
        self.waiting: list[BufferedItem] = []
        self.ready: deque[list[BufferedItem]] = deque()
        self._on_drop = on_drop

    def push(self, held: BufferedItem) -> None:
        """Take a sample.

        Raises:
            EnergonPackedError: it fits no row, and `on_drop` raises.
        """
        if (excess := self.packer.reject_reason(*held.size)) is not None:
            self._on_drop(held, excess)
            return
        self.waiting.append(held)
        if len(self.waiting) >= self.packer.buffer_size and self.packer.should_flush(len(self.waiting)):
            self._form(final=False)

    def flush(self) -> None:
        """Make rows of everything that waits: the epoch ended."""
        if self.waiting and self.packer.drop_last and len(self.waiting) < self.packer.buffer_size:
            for held in self.waiting:
                self._on_drop(held, None)
            self.waiting = []
        if self.waiting:
            self._form(final=True)

    def pop(self) -> list[BufferedItem] | None:
        """The next row, or None."""
        return self.ready.popleft() if self.ready else None

    def _form(self, *, final: bool) -> None:
        sizes = Sizes(*np.array([held.size for held in self.waiting], dtype=np.int64).T)
        squares = np.array([held.squares for held in self.waiting], dtype=np.int64)
        groups = self.packer.groups(sizes)
        sums = [[int(of[group].sum()) for group in groups] for of in (sizes.lengths, squares, sizes.patches)]
        tokens, of_squares, patches = (np.array(one, dtype=np.int64) for one in sums)
        rows = RowSizes(tokens=tokens, squares=of_squares, patches=patches)
        ready, later = self.packer.pop_ready(groups, rows, final=final)
        self.ready += [[self.waiting[i] for i in group] for group in ready]
        self.waiting = [self.waiting[i] for group in later for i in group]

    def state(self) -> str:
        """Numbers and keys of what it holds: the JSON items `"ready"` and `"waiting"`."""
        return f'"ready": [{", ".join(map(_refs, self.ready))}], "waiting": {_refs(self.waiting)}'

    def held(self) -> list[BufferedItem]:
        """Everything it holds."""
        return [held for group in self.ready for held in group] + self.waiting


def _refs(group: Iterable[BufferedItem]) -> str:
    return f"[{', '.join([held.ref for held in group])}]"
