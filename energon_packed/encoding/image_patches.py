"""ImagePatches: the images of a sample, resized and not yet patches, until the row's `pixel_values` is allocated.

    decode ─► resize, uint8 (encoder) ─► one allocation per row (collator) ─► each image writes its slice

A resized image takes 3 bytes per pixel; its float32 patches take 24.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PatchLayout:
    """How a resized image becomes patches.

    Attributes:
        patch_size: pixels per side of a patch.
        merge_size: patches per side of a merged block.
        temporal_patch_size: how many times an image is repeated.
        table: float32 (3, 256), normalized value of each channel and pixel value.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    table: Float32

    @property
    def patch_dim(self) -> int:
        """Elements of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def write(self, image: UInt8, out: "torch.Tensor") -> None:
        """Write the patches of a resized image (height, width, 3) to `out` (patches, patch_dim), in its dtype."""
        import torch

        from energon_packed.encoding.patch_kernel import write_patches

        bits = torch.int32 if out.dtype == torch.float32 else torch.int16
        table = torch.from_numpy(self.table).to(out.dtype).view(bits).numpy()
        flat = np.ascontiguousarray(image).reshape(len(image), -1)
        sizes = (self.patch_size, self.merge_size, self.temporal_patch_size)
        write_patches(flat, table, *sizes, out.view(bits).numpy())


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """Images of one sample.

    Attributes:
        images: of each image its resized pixels, uint8 (height, width, 3), or its patches, float32 (n, patch_dim),
            where the installed image processor made them.
        layout: of the patches.
    """

    images: Sequence["UInt8 | torch.Tensor"]
    layout: PatchLayout

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of `pixel_values`: (patches, patch_dim)."""
        return sum(map(self._count, self.images)), self.layout.patch_dim

    @property
    def dtype(self) -> "torch.dtype":
        """float32, as the image processors of Transformers give."""
        import torch

        return torch.float32

    def write(self, out: "torch.Tensor") -> None:
        """Write all patches to `out`, contiguous (patches, patch_dim); without a copy in float32 and bfloat16."""
        import torch

        if out.dtype not in (torch.float32, torch.bfloat16):
            out.copy_(self.tensor())
            return
        start = 0
        for image in self.images:
            rows = out[start : start + self._count(image)]
            if isinstance(image, np.ndarray):
                self.layout.write(image, rows)
            else:
                rows.copy_(image)
            start += len(rows)

    def tensor(self) -> "torch.Tensor":
        """All patches, float32 (patches, patch_dim)."""
        out = empty(self.shape, self.dtype)
        self.write(out)
        return out

    def _count(self, image: "UInt8 | torch.Tensor") -> int:
        if isinstance(image, np.ndarray):
            return int(image.shape[0] * image.shape[1] // self.layout.patch_size**2)
        return len(image)


def empty(shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
    """A tensor in memory of NumPy, which requests huge pages: filling it is up to four times as fast."""
    import torch

    if dtype == torch.bfloat16:
        return torch.from_numpy(np.empty(shape, dtype=np.int16)).view(torch.bfloat16)
    return (
        torch.from_numpy(np.empty(shape, dtype=np.float32))
        if dtype == torch.float32
        else torch.empty(shape, dtype=dtype)
    )


class PixelValues:
    """Field of a dataclass that holds a tensor or ImagePatches and gives a tensor, made at the first use.

    Source of the form: "Descriptor-typed fields" of Python's `dataclasses`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, sample: None, owner: type) -> None: ...
    @overload
    def __get__(self, sample: object, owner: type) -> "torch.Tensor | None": ...
    def __get__(self, sample: object | None, owner: type) -> Any:
        if sample is None:
            return None  # the default of the field
        held = sample.__dict__[self._name]
        if isinstance(held, ImagePatches):
            held = sample.__dict__[self._name] = held.tensor()
        return held

    def __set__(self, sample: object, value: "torch.Tensor | ImagePatches | None") -> None:
        sample.__dict__[self._name] = value
