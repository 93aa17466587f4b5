"""EncodedSample: the model inputs of one sample, before collation into a row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.image_runs import VisionInputs
from energon_packed.errors import Reason, RecordError

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a token that is not a target; default `ignore_index` of torch.nn.CrossEntropyLoss."""


class SampleSource(NamedTuple):
    """Where a sample comes from.

    Attributes:
        dataset: path of the data set or file.
        subflavors: what a Metadataset or dataset.yaml says of it.
    """

    dataset: str
    subflavors: dict[str, Any]


def targets_per_sample(labels: npt.NDArray[np.int64], cu_seqlens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Targets of each sample, int64 (S,); the first token of a sample is never one, since nothing predicts it.

    Args:
        labels: int64 (T,), of samples end to end.
        cu_seqlens: (S+1,), their boundaries.
    """
    bounds = np.asarray(cu_seqlens)
    places = (labels != IGNORE_INDEX).nonzero()[0]
    after_first = np.minimum(bounds[:-1] + 1, bounds[1:])
    return np.asarray(places.searchsorted(bounds[1:]) - places.searchsorted(after_first))


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSample:
    """One encoded sample of L tokens.

    Attributes:
        input_ids: int64 (L,); an image is a run of the vision family's image token.
        labels: int64 (L,), unshifted: `input_ids` where supervised, -100 elsewhere.
        id: sample name in reports.
        image_token_id: token that represents image features, or None.
        pixel_values: float32 (patches, patch_dim) of all images, or None.
        image_grid_thw: int64 (images, 3), patches of each image in time, height and width, or None.
        position_ids: int64 (3, L), M-RoPE positions in t, h and w, or None if the model uses 0..L-1.
        patch_positions: int64 (patches, 3), position of each patch as (t, h, w), or None.
        vision_inputs: arguments of a vision tower that takes others than pixel_values and image_grid_thw, or None.
        token_type_ids: int64 (L,), 1 at image tokens, for models that take it, or None.
        source: data set that it comes from, or None.
        dummy: a minimal image sample of its encoder's vision family, which a collator puts into rows without images,
            or None.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    id: str | None = None
    image_token_id: int | None = None
    pixel_values: "torch.Tensor | None" = None
    image_grid_thw: "torch.Tensor | None" = None
    position_ids: npt.NDArray[np.int64] | None = None
    patch_positions: npt.NDArray[np.int64] | None = None
    vision_inputs: VisionInputs | None = None
    token_type_ids: npt.NDArray[np.int64] | None = None
    source: SampleSource | None = None
    dummy: "EncodedSample | None" = None

    @classmethod
    def row(
        cls,
        ids: Sequence[str | None],
        input_ids: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        cu_seqlens: Sequence[int],
        *,
        position_ids: npt.NDArray[np.int64] | None = None,
        image_token_id: int | None = None,
        dummy: "EncodedSample | None" = None,
    ) -> list["EncodedSample"]:
        """The S samples of a row without images, as views of its arrays; faster than one by one.

        Args:
            ids: names of the samples.
            input_ids: int64 (T,).
            labels: int64 (T,), -100 where not supervised.
            cu_seqlens: S + 1 boundaries.
            position_ids: int64 (3, T), or None.
            image_token_id: of all samples.
            dummy: of all samples.
        """
        shared = {"image_token_id": image_token_id, "dummy": dummy}  # else the class's defaults
        made = []
        for ident, (start, end) in zip(ids, pairwise(cu_seqlens), strict=True):
            one = object.__new__(cls)
            fields = vars(one)
            fields.update(shared, id=ident, input_ids=input_ids[start:end], labels=labels[start:end])
            if position_ids is not None:
                fields["position_ids"] = position_ids[:, start:end]
            made.append(one)
        return made

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_images(self) -> int:
        """Number of images."""
        if self.vision_inputs is not None:
            return self.vision_inputs.images
        return 0 if self.image_grid_thw is None else len(self.image_grid_thw)

    @property
    def num_supervised(self) -> int:
        """Number of targets, as `targets_per_sample` counts them."""
        return int(targets_per_sample(self.labels, np.array([0, len(self)]))[0])

    def of(self, source: SampleSource | None) -> "EncodedSample":
        """The same sample with its `source`; pixels are not touched."""
        if source is None:
            return self
        made = object.__new__(type(self))
        vars(made).update(vars(self), source=source)
        return made

    def truncated(self, max_length: int) -> "EncodedSample":
        """Truncate to the first `max_length` tokens; return the sample itself if it is short enough.

        Raises:
            RecordError: `overlong`, if truncation would remove part of an image; `no_supervised_tokens`, if no target
                remains.
        """
        if len(self) <= max_length:
            return self
        if self.image_token_id is not None and (self.input_ids[max_length:] == self.image_token_id).any():
            raise RecordError(
                Reason.OVERLONG, f"{len(self)} tokens; truncation to {max_length} would remove part of an image"
            )
        cut = replace(
            self,
            input_ids=self.input_ids[:max_length],
            labels=self.labels[:max_length],
            position_ids=None if self.position_ids is None else self.position_ids[:, :max_length],
            token_type_ids=None if self.token_type_ids is None else self.token_type_ids[:max_length],
        )
        if cut.num_supervised == 0:
            raise RecordError(
                Reason.NO_SUPERVISED_TOKENS, f"{len(self)} tokens; the first {max_length} contain no target"
            )
        return cut
