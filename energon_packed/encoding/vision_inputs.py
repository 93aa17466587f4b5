"""VisionInputs: the arguments of a vision tower other than patches and grids, and how those of several samples join.

pixel_values   (images, 3, H, W)          joined along the images, padded to the largest H and W
image_sizes    (images, 2)                joined along the images
pixel_values   (1, tiles, 3, H, W)        joined along the tiles, as a batch of one row has it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Place = tuple[slice, ...]
"""Where a value of one sample is in that of its row."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionInputs:
    """Arguments of the model for the images of one sample.

    Attributes:
        values: tensors by argument, as the family's processor gives them.
        dims: along which dimension each is joined; all others are padded with zeros to the largest.
        images: how many there are.
    """

    values: "dict[str, torch.Tensor]"
    dims: dict[str, int]
    images: int

    @classmethod
    def joined(cls, parts: "Sequence[VisionInputs]") -> "tuple[dict[str, torch.Tensor], list[dict[str, Place]]]":
        """The arguments for a row of samples, and where each sample's are in them."""
        rows: dict[str, torch.Tensor] = {}
        places: list[dict[str, Place]] = [{} for _ in parts]
        for name, dim in parts[0].dims.items():
            tensors = [part.values[name] for part in parts]
            shape = [max(sizes) for sizes in zip(*(one.shape for one in tensors), strict=True)]
            shape[dim] = sum(one.shape[dim] for one in tensors)
            rows[name] = tensors[0].new_zeros(shape)
            start = 0
            for tensor, place in zip(tensors, places, strict=True):
                slices = [slice(0, size) for size in tensor.shape]
                slices[dim] = slice(start, start := start + tensor.shape[dim])
                place[name] = tuple(slices)
                rows[name][place[name]] = tensor
        return rows, places
