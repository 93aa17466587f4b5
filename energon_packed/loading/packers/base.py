"""Packer: which samples share a row. One required method: `select`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from energon_packed.errors import BatchError, ConfigError, Reason, Reject
from energon_packed.packing.balance import RowSizes
from energon_packed.pipeline.options import Overlong
from energon_packed.pipeline.rejects import images_detail, overlong_detail

Int64 = npt.NDArray[np.int64]


class Sizes(NamedTuple):
    """What the limits of a packer look at, for n buffered samples.

    Attributes:
        lengths: int64 (n,), tokens.
        images: int64 (n,), images.
        patches: int64 (n,), patches of these images.
    """

    lengths: Int64
    images: Int64
    patches: Int64


class Packer(ABC):
    """Groups a buffer of samples by their lengths. The base keeps the buffer and holds groups to the limits.

    Attributes:
        longest: maximum sample length in tokens that fits a row; None for no limit. Longer samples are never passed
            to `select`.
        buffer_size: samples that are collected before `select` is called.
        keeps: the last group of `select` waits for more samples, until the epoch ends.
        max_images, max_patches: limits of a group beside its tokens; a group above one is divided.
        max_tokens: tokens of a row; `longest` or more.
        multiple: each sample is padded to a multiple of this many tokens.
        overlong: what happens to a sample above a limit, as with `pack`: `error` stops loading, `drop` drops and
            counts it, `truncate` keeps its first `longest` tokens (DataflowLoader).
        drop_last: a group that the end of the epoch left incomplete is dropped.
        rows: items that share each row, if their number alone decides; None otherwise.
    """

    longest: int | None = None
    buffer_size: int = 256
    carry_over_last: bool = False
    max_images: int | None = None
    max_patches: int | None = None
    max_tokens: int | None = None
    multiple: int = 1
    overlong: Overlong = "error"
    drop_last: bool = False
    rows: int | None = None

    @abstractmethod
    def select(self, lengths: Int64) -> list[Int64]:
        """Return groups of sample numbers; every sample is in exactly one group.

        Args:
            lengths: int64 (n,), tokens of the buffered samples.

        """

    def groups(self, sizes: Sizes) -> list[Int64]:
        """`select`, with groups above `max_images` or `max_patches` divided in their order.

        Raises:
            BatchError: `select` lost or repeated a sample.
        """
        chosen = [np.asarray(group, dtype=np.int64) for group in self.select(sizes.lengths)]
        chosen = [group for group in chosen if len(group)]
        numbers = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.int64)
        if not np.array_equal(numbers, np.arange(len(sizes.lengths))):
            raise BatchError(
                f"{type(self).__name__}.select returned {len(numbers)} sample numbers for {len(sizes.lengths)} "
                "samples; every sample must be in exactly one group"
            )
        if self.max_images is None and self.max_patches is None:
            return chosen
        return [part for group in chosen for part in self._within_limits(group, sizes)]

    def should_flush(self, waiting: int) -> bool:
        """Whether `select` is called, with `waiting` samples in the buffer, at least `buffer_size`."""
        return True

    def pop_ready(self, groups: list[Int64], sizes: RowSizes, *, final: bool) -> tuple[list[Int64], list[Int64]]:
        """(groups that become rows, in this order; groups whose samples wait for others).

        Args:
            groups: of `groups`.
            sizes: of each group.
            final: the epoch ended, and nothing can wait.
        """
        return (groups[:-1], groups[-1:]) if self.carry_over_last and not final else (groups, [])

    def steps(self, items: int) -> int | None:
        """Rows made of `items` items, if `rows` tells; None otherwise."""
        if self.rows is None:
            return None
        return items // self.rows if self.drop_last else -(-items // self.rows)

    def identity(self) -> dict[str, Any]:
        """Class and settings, for loader states."""
        plain = {n.lstrip("_"): v for n, v in vars(self).items() if isinstance(v, int | float | str | dict | None)}
        return {"packer": type(self).__name__, **plain}

    def reject_reason(self, tokens: int, images: int, patches: int) -> Reject | None:
        """Why a sample fits no row, or None."""
        if self.longest is not None and tokens > self.longest:
            detail = overlong_detail(tokens, self.max_tokens or self.longest, self.multiple)
            return Reject(Reason.OVERLONG, detail)
        if self.max_images is None and self.max_patches is None:
            return None
        for name, value, limit in (("images", images, self.max_images), ("patches", patches, self.max_patches)):
            if limit is not None and value > limit:
                return Reject(Reason.OVERLONG, images_detail(value, limit, name))
        return None

    def _within_limits(self, group: Int64, sizes: Sizes) -> list[Int64]:
        parts: list[list[int]] = [[]]
        images = patches = 0
        for number in group.tolist():
            images, patches = images + int(sizes.images[number]), patches + int(sizes.patches[number])
            above = (self.max_images is not None and images > self.max_images) or (
                self.max_patches is not None and patches > self.max_patches
            )
            if above and parts[-1]:
                parts.append([])
                images, patches = int(sizes.images[number]), int(sizes.patches[number])
            parts[-1].append(number)
        return [np.array(part, dtype=np.int64) for part in parts]


def check_positive(**values: int | None) -> None:
    """Refuse numbers below 1.

    Raises:
        ConfigError: it names the argument.
    """
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"`{name}` is {value!r}; it must be an integer of at least 1")


def in_order(lengths: Sequence[int] | Int64, capacity: int, max_samples: int | None = None) -> list[Int64]:
    """Groups of consecutive samples, each of at most `capacity` tokens and `max_samples` samples."""
    groups: list[list[int]] = [[]]
    room = capacity
    for number, length in enumerate(np.asarray(lengths).tolist()):
        if groups[-1] and (length > room or len(groups[-1]) == max_samples):
            groups.append([])
            room = capacity
        groups[-1].append(number)
        room -= length
    return [np.array(group, dtype=np.int64) for group in groups if group]


def check_overlong(overlong: str) -> None:
    """Refuse a value that `overlong` does not have.

    Raises:
        ConfigError: it names the valid values.
    """
    if overlong not in (valid := get_args(Overlong)):
        raise ConfigError(f"`overlong` must be one of {', '.join(valid)}, got {overlong!r}")


def unfit(excess: Reject) -> BatchError:
    """The error of a sample that fits no row."""
    return BatchError(
        f"a sample does not fit a row: {excess.detail}; raise the limit, pack with this one, or set `overlong` of the "
        "packer to drop"
    )
