"""Packer: token counts of buffered samples to groups of sample indices; each group becomes one row.

A subclass implements `select(lengths)`. The base class keeps groups within `max_images` and `max_patches`, decides
when the buffer is packed, and states why a sample fits no row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon_packed.encoding import EncodedSample
from energon_packed.errors import BatchError, ConfigError, Reason, Reject
from energon_packed.loading.costs.model import RowSizes
from energon_packed.packing.balance import Int64
from energon_packed.pipeline.options import GroupBy, Overlong
from energon_packed.pipeline.rejects import images_detail, not_split, overlong_detail


class Sizes(NamedTuple):
    """Sizes of n buffered samples, by which a packer groups them.

    Attributes:
        lengths: int64 (n,), tokens.
        images: int64 (n,), images.
        patches: int64 (n,), patches of their images and videos.
    """

    lengths: Int64
    images: Int64
    patches: Int64


class Packer(ABC):
    """Base class: `select(lengths)` groups buffered samples, int64 (n,) token counts, into rows.

        class Pairs(Packer):
            buffer_size = 2

            def select(self, lengths):
                return [np.arange(len(lengths))]

    Attributes:
        longest: maximum sample length in tokens that fits a row; None for no limit. Longer samples are never passed
            to `select`.
        buffer_size: samples that are collected before `select` is called.
        carry_over_last: the last group of `select` waits for more samples, until the epoch ends.
        max_images, max_patches: limits of a row beside its tokens; a group above a limit is divided.
        max_tokens: tokens of a row; at least `longest`.
        multiple: each sample is padded to a multiple of this many tokens.
        group_by: `media` fills a row with samples of one kind (text, images, videos or audio).
        overlong: handling of a sample above a limit, as with `pack`: `error` stops loading, `drop` drops and counts
            the sample, `truncate` keeps its first `longest` tokens, `split` divides documents and token records into
            fragments, which repeat `split_overlap` tokens (both with DataflowLoader).
        rows: items in each row, if their number alone decides; None otherwise.
        size_fn: size of a sample, in place of its tokens; needed for samples that have no `input_ids`.

    Examples:
        >>> class Pairs(Packer):
        ...     buffer_size = 2
        ...
        ...     def select(self, lengths):
        ...         return [np.arange(len(lengths))]
        >>> loader = DataflowLoader(MapDistributor([{"text": "A document."}] * 4), encoder, Pairs())
        >>> [batch.num_samples for batch in loader]
        [2, 2]
    """

    longest: int | None = None
    buffer_size: int = 256
    carry_over_last: bool = False
    max_images: int | None = None
    max_patches: int | None = None
    max_tokens: int | None = None
    multiple: int = 1
    group_by: GroupBy = "none"
    overlong: Overlong = "error"
    split_overlap: int = 1
    rows: int | None = None
    size_fn: Callable[[Any], int] | None = None

    @abstractmethod
    def select(self, lengths: Int64) -> list[Int64]:
        """Return groups of sample indices; every sample is in exactly one group.

        Args:
            lengths: int64 (n,), tokens of the buffered samples.

        """

    def groups(self, sizes: Sizes) -> list[Int64]:
        """Call `select`, and divide groups above `max_images` or `max_patches` in their order.

        Raises:
            BatchError: `select` lost or repeated a sample.
        """
        selected = [np.asarray(group, dtype=np.int64) for group in self.select(sizes.lengths)]
        selected = [group for group in selected if len(group)]
        indices = np.sort(np.concatenate(selected)) if selected else np.zeros(0, dtype=np.int64)
        # Checked for custom packers: a lost sample would be missing from training without any sign.
        if not np.array_equal(indices, np.arange(len(sizes.lengths))):
            raise BatchError(
                f"{type(self).__name__}.select must return every sample in exactly one group, got {len(indices)} "
                f"sample indices for {len(sizes.lengths)} samples."
            )
        if self.max_images is None and self.max_patches is None:
            return selected
        return [part for group in selected for part in self._within_limits(group, sizes)]

    def sample_size(self, sample: Any) -> int:
        """Return the size of a sample that a processor returned: `size_fn`, by default the number of its `input_ids`.

        Raises:
            ConfigError: the sample has no `input_ids`, or the size is not an integer of at least 0.
        """
        if self.size_fn is not None:
            size = self.size_fn(sample)
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
                raise ConfigError(f"`size_fn` must return an integer of at least 0, got {size!r}.")
            return int(size)
        if isinstance(sample, EncodedSample):
            return len(sample)
        if self.rows is not None:  # no packer reads it
            return 0
        if isinstance(sample, Mapping) and "input_ids" in sample:
            return len(sample["input_ids"])
        raise ConfigError(
            f"{type(self).__name__} needs the size of each sample, got a {type(sample).__name__} without `input_ids`. "
            "Pass `size_fn`, or use `batch_size`."
        )

    def parts(self, kinds: Int64) -> list[Int64]:
        """Return the indices of the samples that may share rows: all samples, or the samples of each kind.

        Args:
            kinds: int64 (n,), kind of each sample as a number.
        """
        if self.group_by == "none":
            return [np.arange(len(kinds))]
        return [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]

    def groups_of(self, sizes: Sizes, kinds: Int64) -> list[Int64]:
        """Return the `groups` of each of the `parts`, of samples that are all known.

        Args:
            sizes: of n samples.
            kinds: as for `parts`.
        """
        parts = self.parts(kinds)
        return [part[group] for part in parts for group in self.groups(Sizes(*[column[part] for column in sizes]))]

    def should_flush(self, waiting: int) -> bool:
        """Return whether to call `select` with `waiting` samples in the buffer, at least `buffer_size`."""
        return True

    def pop_ready(self, groups: list[Int64], sizes: RowSizes, *, final: bool) -> tuple[list[Int64], list[Int64]]:
        """Return (groups that become rows, in this order; groups whose samples stay in the buffer).

        Args:
            groups: result of `groups`.
            sizes: of each group.
            final: the epoch ended, and no sample can wait.
        """
        return (groups[:-1], groups[-1:]) if self.carry_over_last and not final else (groups, [])

    def identity(self) -> dict[str, Any]:
        """Return class and settings, for loader states."""
        plain = {n.lstrip("_"): v for n, v in vars(self).items() if isinstance(v, int | float | str | dict | None)}
        return {"packer": type(self).__name__, **plain}

    def reject_reason(self, tokens: int, images: int, patches: int) -> Reject | None:
        """Return why a sample fits no row, or None if it fits."""
        if self.longest is not None and tokens > self.longest:
            # Samples that `split` may split were split before.
            detail = not_split if self.overlong == "split" else overlong_detail
            return Reject(Reason.OVERLONG, detail(tokens, self.max_tokens or self.longest, self.multiple))
        if self.max_images is None and self.max_patches is None:
            return None
        for name, value, limit in (("images", images, self.max_images), ("patches", patches, self.max_patches)):
            if limit is not None and value > limit:
                return Reject(Reason.OVERLONG, images_detail(value, limit, name))
        return None

    def _within_limits(self, group: Int64, sizes: Sizes) -> list[Int64]:
        # In the order of the group: `select` may have chosen the order, and the last group may be the emptiest.
        parts: list[list[int]] = [[]]
        images = patches = 0
        for index in group.tolist():
            images, patches = images + int(sizes.images[index]), patches + int(sizes.patches[index])
            above = (self.max_images is not None and images > self.max_images) or (
                self.max_patches is not None and patches > self.max_patches
            )
            if above and parts[-1]:
                parts.append([])
                images, patches = int(sizes.images[index]), int(sizes.patches[index])
            parts[-1].append(index)
        return [np.array(part, dtype=np.int64) for part in parts]


def kind_of(images: int, videos: int, audios: int = 0) -> int:
    """Kind of a sample with these numbers of media, for `group_by`: 0 text, 1 images, 2 videos, 3 audio alone."""
    return 2 if videos else 1 if images else 3 if audios else 0


def in_order(lengths: Sequence[int] | Int64, capacity: int, max_samples: int | None = None) -> list[Int64]:
    """Return groups of consecutive samples, each of at most `capacity` tokens and `max_samples` samples."""
    groups: list[list[int]] = [[]]
    free = capacity
    for index, length in enumerate(np.asarray(lengths).tolist()):
        if groups[-1] and (length > free or len(groups[-1]) == max_samples):
            groups.append([])
            free = capacity
        groups[-1].append(index)
        free -= length
    return [np.array(group, dtype=np.int64) for group in groups if group]


def unfit(reject: Reject) -> BatchError:
    """Return the error of a sample that fits no row."""
    return BatchError(
        f"a sample does not fit a row: {reject.detail}. Raise the limit, pack the dataset with this limit, or set "
        "`overlong` of the packer to 'drop'."
    )
