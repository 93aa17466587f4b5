"""FusedPixels: the pixels of Transformers' Qwen2-VL image processor, with Pillow's resize and one pass to patches.

It stands in for an image processor only where it is proved to give the same pixels: the processor is Transformers' own
Pillow class, its settings are among those below, and a picture gives the same bits in both. torchvision resizes to
other pixels (0.03 apart after normalization), so its processors run as they are.
"""

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from energon_packed.encoding.image_patches import ImagePatches, PatchLayout

if TYPE_CHECKING:
    import torch

UInt8 = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)
_SETTINGS = (
    *("do_resize", "do_convert_rgb", "do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std"),
    *("resample", "patch_size", "merge_size", "temporal_patch_size"),
)


@dataclass(frozen=True, slots=True, eq=False)
class FusedPixels:
    """Resizes images as `image_processor` does; `layout` makes its patches.

    Attributes:
        image_processor: Transformers' image processor, for images that are not plain RGB.
        smart_resize: its function from (height, width) and limits to the resized (height, width).
        layout: patches and normalization by its settings.
        settings: those that `layout` was made of.
    """

    image_processor: Any
    smart_resize: Any
    layout: PatchLayout
    settings: tuple[str, ...]

    @classmethod
    def of(cls, image_processor: Any) -> "FusedPixels | None":
        """For an image processor, or None where the same pixels are not proved."""
        import transformers

        trusted = getattr(transformers, "Qwen2VLImageProcessorPil", None)
        if trusted is None or type(image_processor) is not trusted:
            return None
        if not (image_processor.do_resize and image_processor.do_convert_rgb):
            return None
        fused = cls(
            image_processor,
            sys.modules[trusted.__module__].smart_resize,
            PatchLayout(
                int(image_processor.patch_size),
                int(image_processor.merge_size),
                int(image_processor.temporal_patch_size),
                _table(image_processor),
            ),
            settings_of(image_processor),
        )
        if not fused._equals_installed():
            _log.warning(
                "transformers %s resizes or normalizes images in another way than expected; its %s is used as it is",
                transformers.__version__,
                trusted.__name__,
            )
            return None
        return fused

    def prepared(self, image: Image.Image) -> "tuple[UInt8 | torch.Tensor, tuple[int, int, int]]":
        """Resized pixels of an image, uint8 (height, width, 3), and its patches in time, height and width.

        An image that is not plain RGB gives its patches, float32 (patches, patch_dim), by the installed processor.
        """
        if image.mode != "RGB" or image.info.get("transparency") is not None:
            out = self.image_processor(images=[image], return_tensors="pt")
            return out["pixel_values"], tuple(out["image_grid_thw"][0].tolist())
        side, limits = self.layout.patch_size, self.image_processor.size
        height, width = self.smart_resize(
            image.height,
            image.width,
            factor=side * self.layout.merge_size,
            min_pixels=limits["shortest_edge"],
            max_pixels=limits["longest_edge"],
        )
        if image.size != (width, height):
            image = image.resize((width, height), self.image_processor.resample)
        return np.asarray(image), (1, height // side, width // side)

    def _equals_installed(self) -> bool:
        """Whether a picture of noise gives the same bits by both."""
        noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
        picture = Image.fromarray(noise)
        installed = self.image_processor(images=[picture], return_tensors="pt")["pixel_values"]
        ours = ImagePatches([self.prepared(picture)[0]], self.layout).tensor()
        return installed.dtype == ours.dtype and installed.shape == ours.shape and bool((installed == ours).all())


def settings_of(image_processor: Any) -> tuple[str, ...]:
    """The settings that decide a layout, to notice a change."""
    return tuple(repr(getattr(image_processor, name, None)) for name in _SETTINGS)


def _table(image_processor: Any) -> npt.NDArray[np.float32]:
    """Normalized value of each channel and pixel value, float32 (3, 256), by the processor's own arithmetic."""
    values = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
    if image_processor.do_rescale:
        values = image_processor.rescale(values, image_processor.rescale_factor)
    if image_processor.do_normalize:
        values = image_processor.normalize(values, image_processor.image_mean, image_processor.image_std)
    return np.ascontiguousarray(values[:, 0], dtype=np.float32)
