"""EncodedSample: one sample as a model sees it, before it is laid in a row with others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason, RecordError

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a token that is no target, as torch.nn.CrossEntropyLoss ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedSample:
    """One encoded sample of L tokens.

    Attributes:
        input_ids: int64 (L,); an image stands as a run of its family's image token.
        labels: int64 (L,), unshifted: `input_ids` where supervised, -100 elsewhere.
        id: name of the sample in reports.
        image_token_id: token that stands for image features, or None.
        pixel_values: float32 (patches, patch_dim) of all images, or None.
        image_grid_thw: int64 (images, 3), patches of each image in time, height and width, or None.
        position_ids: int64 (3, L), M-RoPE positions in t, h and w, or None where the model counts 0..L-1.
        patch_positions: int64 (patches, 3), position of each patch as (t, h, w), or None.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    id: str | None = None
    image_token_id: int | None = None
    pixel_values: "torch.Tensor | None" = None
    image_grid_thw: "torch.Tensor | None" = None
    position_ids: npt.NDArray[np.int64] | None = None
    patch_positions: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        """Labels that are targets; the first token of a sample never is, since nothing predicts it."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))

    def truncated(self, max_length: int) -> "EncodedSample":
        """The first `max_length` tokens; the sample itself when it is short enough.

        Raises:
            RecordError: `overlong`, when the cut would fall before the end of an image; `no_supervised_tokens`,
                when no target is left.
        """
        if len(self) <= max_length:
            return self
        if self.image_token_id is not None and (self.input_ids[max_length:] == self.image_token_id).any():
            raise RecordError(
                Reason.OVERLONG, f"{len(self)} tokens, and a cut at {max_length} would lose part of an image"
            )
        cut = replace(
            self,
            input_ids=self.input_ids[:max_length],
            labels=self.labels[:max_length],
            position_ids=None if self.position_ids is None else self.position_ids[:, :max_length],
        )
        if cut.num_supervised == 0:
            raise RecordError(
                Reason.NO_SUPERVISED_TOKENS, f"{len(self)} tokens, and the first {max_length} hold no target"
            )
        return cut
