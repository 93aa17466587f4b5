"""SequentialPacker: rows of consecutive samples, in the order they come."""

import numpy as np
import numpy.typing as npt

from energon_packed.dataflow.packers.base import Packer, check_overlong, check_positive, in_order
from energon_packed.pipeline.options import Overlong
from energon_packed.seqlens import round_up


class SequentialPacker(Packer):
    """Fills a row until the next sample does not fit.

    Args:
        max_tokens: tokens per row.
        max_samples: samples per row; None for no limit.
        multiple: each sample counts as padded to a multiple of this many tokens.
        max_images, max_patches, overlong: as for PoolPacker.

    Raises:
        ConfigError: an argument is out of range.
    """

    keeps = True
    buffer_size = 2

    def __init__(
        self,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        multiple: int = 1,
        max_images: int | None = None,
        max_patches: int | None = None,
        overlong: Overlong = "error",
    ) -> None:
        check_positive(max_tokens=max_tokens, max_samples=max_samples, multiple=multiple)
        check_positive(max_images=max_images, max_patches=max_patches)
        self.max_tokens = max_tokens
        self.longest = max_tokens - max_tokens % multiple
        self.max_samples = max_samples
        self.multiple = multiple
        self.max_images, self.max_patches = max_images, max_patches
        check_overlong(overlong)
        self.overlong = overlong

    def select(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return groups of consecutive sample numbers."""
        return in_order(round_up(lengths, self.multiple), self.longest or 1, self.max_samples)
