"""Items in their order to rows of consecutive items.

| packer | one row contains |
|---|---|
| PlannedPacker | one item: a pack made offline, or a row of a plan |
| SequentialPacker | samples, until the next sample does not fit |
| SimpleBatcher | a fixed number of items |
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from energon_packed.loading.packers.base import Packer, in_order
from energon_packed.options import as_integer, check_choice, optional_integer
from energon_packed.packing.balance import Int64
from energon_packed.pipeline.options import GroupBy, Overlong
from energon_packed.seqlens import round_up


class PlannedPacker(Packer):
    """Use every item as one row: for packs of `energon-packed pack`, and for `plan_in_memory`.

    Examples:
        >>> [row.tolist() for row in PlannedPacker().select(np.array([5, 4, 3, 4]))]
        [[0], [1], [2], [3]]
    """

    buffer_size = 1
    rows = 1

    def select(self, lengths: Int64) -> list[Int64]:
        """Return one group for each item."""
        return [np.array([index]) for index in range(len(lengths))]


class SequentialPacker(Packer):
    """Fill a row until the next sample does not fit.

    Args:
        max_tokens: tokens per row.
        max_samples: samples per row; None for no limit.
        multiple: each sample counts as padded to a multiple of this many tokens.
        max_images, max_patches, group_by, overlong, size_fn: as for PoolPacker.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> [row.tolist() for row in SequentialPacker(8).select(np.array([5, 4, 3, 4]))]
        [[0], [1, 2], [3]]
    """

    carry_over_last = True
    buffer_size = 2

    def __init__(
        self,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        multiple: int = 1,
        max_images: int | None = None,
        max_patches: int | None = None,
        group_by: GroupBy = "none",
        overlong: Overlong = "error",
        size_fn: Callable[[Any], int] | None = None,
    ) -> None:
        self.max_tokens, self.multiple = as_integer(max_tokens, "max_tokens"), as_integer(multiple, "multiple")
        self.longest = self.max_tokens - self.max_tokens % self.multiple
        self.max_samples = optional_integer(max_samples, "max_samples")
        self.max_images = optional_integer(max_images, "max_images")
        self.max_patches = optional_integer(max_patches, "max_patches")
        check_choice("overlong", overlong, Overlong)
        check_choice("group_by", group_by, GroupBy)
        self.overlong, self.group_by, self.size_fn = overlong, group_by, size_fn

    def select(self, lengths: Int64) -> list[Int64]:
        """Return groups of consecutive sample indices."""
        return in_order(round_up(lengths, self.multiple), self.longest or 1, self.max_samples)


class SimpleBatcher(Packer):
    """Join `batch_size` consecutive items, samples or packs, into one row.

    Args:
        batch_size: items in one batch.

    Raises:
        ConfigError: `batch_size` is below 1.

    Examples:
        >>> [row.tolist() for row in SimpleBatcher(2).select(np.array([5, 4, 3, 4]))]
        [[0, 1], [2, 3]]
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = self.buffer_size = self.rows = as_integer(batch_size, "batch_size")

    def select(self, lengths: Int64) -> list[Int64]:
        """Return groups of `batch_size` consecutive indices."""
        return list(np.split(np.arange(len(lengths)), range(self.batch_size, len(lengths), self.batch_size)))
