"""PoolPacker: the offline planner over a buffer of samples."""

import re

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.packers.base import Packer, check_overlong, check_positive
from energon_packed.errors import BatchError
from energon_packed.packing import pack_lengths
from energon_packed.pipeline.options import Overlong


class PoolPacker(Packer):
    """Collects `pool_size` samples, packs them by best fit, and keeps the emptiest row for the next round.

    With algorithm `window_N`, windows of N samples are packed on their own, as offline: pool_size is N.

    Args:
        max_tokens: tokens per row.
        pool_size: samples in the buffer; more pack better, and cost memory and reading at a restore.
        algorithm, max_samples, multiple: as for `pack_lengths`.
        max_images, max_patches: images, and patches of them, in one row; None for no limit.
        overlong: what happens to samples that fit no row: `error`, `drop` or `truncate`.

    Raises:
        ConfigError: an argument is out of range.
    """

    keeps = True

    def __init__(
        self,
        max_tokens: int,
        *,
        pool_size: int = 256,
        algorithm: str = "bfd",
        max_samples: int | None = None,
        multiple: int = 1,
        max_images: int | None = None,
        max_patches: int | None = None,
        overlong: Overlong = "error",
    ) -> None:
        check_positive(pool_size=pool_size, max_images=max_images, max_patches=max_patches)
        pack_lengths([], max_tokens, algorithm=algorithm, max_samples=max_samples, multiple=multiple)
        self.max_tokens, self.multiple = max_tokens, multiple
        self.longest = max_tokens - max_tokens % multiple
        self.buffer_size = pool_size
        self.max_images, self.max_patches = max_images, max_patches
        check_overlong(overlong)
        self.overlong = overlong
        if window := re.fullmatch(r"window_(\d+)", algorithm):
            self.buffer_size, self.keeps = int(window[1]), False
        self._options = {"algorithm": algorithm, "max_samples": max_samples, "multiple": multiple}

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return groups of sample numbers, each of at most `max_tokens` tokens; the emptiest is the last one.

        Raises:
            BatchError: a sample is longer than `longest`.
        """
        plan = pack_lengths(lengths, self.max_tokens, **self._options)  # type: ignore[arg-type]
        if len(plan.overlong):
            raise BatchError(f"{len(plan.overlong)} of the samples are longer than `longest` {self.longest}")
        groups = list(plan)
        if groups and self._options["algorithm"] != "sequential":
            emptiest = int(np.argmin([int(lengths[group].sum()) for group in groups]))
            groups.append(groups.pop(emptiest))
        return groups
