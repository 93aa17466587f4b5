"""What stands for images in a sample: the tokens of each (ImageRun), and what the vision tower reads (Pixels).

VisionInputs: the arguments of a vision tower other than patches and grids, and how those of several samples join.

pixel_values   (images, 3, H, W)          joined along the images, padded to the largest H and W
image_sizes    (images, 2)                joined along the images
pixel_values   (1, tiles, 3, H, W)        joined along the tiles, as a batch of one row has it

M-RoPE positions: one (t, h, w) triple per token, as in Qwen2-VL and its successors.

    tokens     A  B  [image 1 x 2 x 3 merged]  C
    t          0  1   2 2 2 2 2 2              5
    h          0  1   2 2 2 3 3 3              5
    w          0  1   2 3 4 2 3 4              5

Text positions increase by one in all three rows. An image starts at the current position in each row and spans its
grid; the text after it starts at start + max(height, width) of the merged grid. Source: P. Wang et al., "Qwen2-VL",
2024, section 2.1; tests compare with `get_rope_index` of Qwen2VLModel in Transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int64 = npt.NDArray[np.int64]
NO_IMAGES: Int64 = np.zeros((0, 3), dtype=np.int64)
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


@dataclass(frozen=True, slots=True)
class ImageRun:
    """The tokens of one image.

    Attributes:
        length: tokens.
        make: gives their ids, int64 (length,); None where all are the family's image token.
    """

    length: int
    make: Callable[[], Int64] | None = None

    def features(self, image_token_id: int | None) -> int:
        """How many of them are image tokens, which the vision tower's features replace."""
        return self.length if self.make is None else int((self.make() == image_token_id).sum())


@dataclass(frozen=True, slots=True)
class Pixels:
    """Pixels of the images of a conversation.

    Attributes:
        values: float32 (patches, patch_dim) tensor, or None without images.
        grids_tensor: int64 (images, 3) tensor, patches in t, h and w.
        grids: the same as an array.
        runs: tokens of each image.
        inputs: what a family has in place of values and grids.
    """

    values: Any = None
    grids_tensor: Any = None
    grids: Int64 = field(default_factory=lambda: NO_IMAGES)
    runs: Sequence[ImageRun] = ()
    inputs: VisionInputs | None = None

    @property
    def patches(self) -> list[int]:
        """Patches of each image."""
        return [int(count) for count in self.grids.prod(axis=1)]


def expanded(ids: Int64, labels: Int64, image_token_id: int | None, runs: Sequence[ImageRun]) -> tuple[Int64, Int64]:
    """Token ids and labels, each int64 (L,), with the run of each image in place of its one image token.

    Args:
        ids: int64 (n,), with one image token for each run.
        labels: int64 (n,), -100 at image tokens.
        image_token_id: token that stands for image features.
        runs: of each image.
    """
    repeats = np.ones(len(ids), dtype=np.int64)
    places = np.flatnonzero(ids == image_token_id)
    repeats[places] = lengths = [run.length for run in runs]
    ends = np.cumsum(repeats)[places]
    ids, labels = np.repeat(ids, repeats), np.repeat(labels, repeats)
    for run, end, length in zip(runs, ends.tolist(), lengths, strict=True):
        if run.make is not None:
            ids[end - length : end] = run.make()
    return ids, labels


def mrope_positions(input_ids: Int64, image_token_id: int, grids: Int64, merge_size: int) -> Int64:
    """Compute the positions of one sample.

    Args:
        input_ids: int64 (L,).
        image_token_id: token whose runs represent images.
        grids: int64 (images, 3), patches in t, h, w before merging.
        merge_size: patches merged along each side into one token.

    Returns:
        int64 (3, L): rows t, h, w.

    Raises:
        ValueError: the number of image tokens does not match the grids.
    """
    merged = grids // np.array([1, merge_size, merge_size])
    counts = merged.prod(axis=1)
    places = np.flatnonzero(input_ids == image_token_id)
    if len(places) != counts.sum():
        raise ValueError(f"`input_ids` has {len(places)} image tokens, but `grids` require {counts.sum()}")
    starts = places[(np.cumsum(counts) - counts)]
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    done = 0  # tokens numbered so far
    here = 0  # position of the next token
    for start, count, (t, h, w) in zip(starts, counts, merged, strict=True):
        text = start - done
        positions[:, done:start] = here + np.arange(text)
        here += text
        positions[:, start : start + count] = here + np.indices((t, h, w)).reshape(3, -1)
        here += max(h, w)
        done = start + count
    positions[:, done:] = here + np.arange(len(input_ids) - done)
    return positions
