"""Vision families: token counts, pixel values and positions of images for each model family.

To add a family, register a small class with its configuration names and its differences from the base class.

    @register_vision
    class MyVision(VisionFamily):
        names = ("myvl",)
        patch_size = 16
"""

import json
from abc import ABC
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.fused_pixels import FusedPixels, settings_of
from energon_packed.encoding.image_patches import ImagePatches
from energon_packed.encoding.mrope import mrope_positions
from energon_packed.errors import ConfigError, Reason, RecordError

if TYPE_CHECKING:
    import torch
    from PIL import Image

Int64 = npt.NDArray[np.int64]


class VisionFamily(ABC):
    """Image handling of one model family, based on a Transformers image processor such as that of Qwen2-VL.

    Attributes:
        names: lower-case prefixes of the processor, image processor or model_type names of this family;
            punctuation is ignored.
        image_token: token whose run represents an image.
        placeholder: text of one image in a conversation, with one `image_token`.
        reserved: tokens that text must not contain.
        takes_patch_positions: whether the vision tower takes patch positions; otherwise they are only validated.
        patch_size, image_mean, image_std, min_pixels, max_pixels: defaults without a processor folder; limits as in
            the preprocessor_config.json of the published models.
        layouts: (patch size, merge size) of the published models of this family; `factor` chooses among them.
    """

    names: ClassVar[tuple[str, ...]]
    image_token: ClassVar[str] = "<|image_pad|>"
    placeholder: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    reserved: ClassVar[tuple[str, ...]] = ("<|image_pad|>", "<|video_pad|>")
    takes_patch_positions: ClassVar[bool] = False
    patch_size: ClassVar[int] = 14
    layouts: ClassVar[tuple[tuple[int, int], ...]] = ((14, 2), (16, 2))
    image_mean: ClassVar[tuple[float, float, float]] = (0.48145466, 0.4578275, 0.40821073)  # CLIP
    image_std: ClassVar[tuple[float, float, float]] = (0.26862954, 0.26130258, 0.27577711)
    min_pixels: ClassVar[int] = 56 * 56
    max_pixels: ClassVar[int] = 28 * 28 * 16384

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.merge_size = int(image_processor.merge_size)

    def num_patches(self, height: int, width: int) -> int:
        """Number of patches of an image of `height` x `width` pixels, before merging.

        Raises:
            RecordError: `corrupt_image`, for a shape that the image processor rejects.
        """
        try:
            return int(self.image_processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{width}x{height} pixels: {error}") from error

    def num_tokens(self, patches: int) -> int:
        """Number of tokens of an image with this many patches."""
        return patches // self.merge_size**2

    def pixels(self, images: "list[Image.Image]") -> "tuple[torch.Tensor, torch.Tensor]":
        """(pixel_values float32 (patches, patch_dim), image_grid_thw int64 (images, 3)) of RGB images.

        By the installed image processor. A family that overrides this method gets its own pixels everywhere.
        """
        out = self.image_processor(images=images, return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]

    def patches(self, images: "Iterable[Image.Image]") -> "tuple[ImagePatches | torch.Tensor, torch.Tensor]":
        """As `pixels`, with the same values; images wait, resized, for the buffer of their row where `fused` is on.

        Args:
            images: RGB images; each is released before the next one is taken where `fused` is on.
        """
        fused = self.fused
        if fused is None:
            return self.pixels(list(images))
        import torch

        prepared = [fused.prepared(image) for image in images]
        grids = torch.tensor([grid for _, grid in prepared], dtype=torch.int64).reshape(-1, 3)
        return ImagePatches([pixels for pixels, _ in prepared], fused.layout), grids

    @property
    def fused(self) -> FusedPixels | None:
        """The faster way to the pixels of `pixels`, or None where it is not proved to give the same ones."""
        if type(self).pixels is not VisionFamily.pixels:
            return None
        settings = settings_of(self.image_processor)
        if self._proved is None or self._proved[0] != settings:
            self._proved = (settings, FusedPixels.of(self.image_processor))
        return self._proved[1]

    _proved: "tuple[tuple[str, ...], FusedPixels | None] | None" = None

    def position_ids(self, input_ids: Int64, image_token_id: int, grids: Int64) -> Int64 | None:
        """M-RoPE positions, int64 (3, L), or None for models that use 0..L-1."""
        return None

    def patch_positions(self, grids: Int64) -> Int64 | None:
        """Patch positions, int64 (patches, 3) as (t, h, w), or None for vision towers without them."""
        return None

    def config(self) -> dict[str, Any]:
        """Settings that determine lengths and pixels, for fingerprints."""
        return {
            "family": type(self).__name__,
            "image_processor": json.loads(self.image_processor.to_json_string()),
        }


_FAMILIES: list[type[VisionFamily]] = []


def register_vision(family: type[VisionFamily]) -> type[VisionFamily]:
    """Register a family under its names (class decorator)."""
    _FAMILIES.append(family)
    return family


@register_vision
class Qwen2VLVision(VisionFamily):
    """Qwen2-VL and Qwen2.5-VL: 14-pixel patches, 2 x 2 merged, M-RoPE."""

    names = ("qwen2vl", "qwen25vl")

    def position_ids(self, input_ids: Int64, image_token_id: int, grids: Int64) -> Int64:
        """M-RoPE positions, int64 (3, L); for text, all three rows increase by one."""
        return mrope_positions(input_ids, image_token_id, grids, self.merge_size)


@register_vision
class Qwen3VLVision(Qwen2VLVision):
    """Qwen3-VL: as Qwen2-VL, with 16-pixel patches and other pixel statistics."""

    names = ("qwen3vl", "qwen35")
    patch_size = 16
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    min_pixels = 256 * 256
    max_pixels = 4096 * 4096


@register_vision
class LlavaOnevision2Vision(VisionFamily):
    """LLaVA-OneVision-1.5 and -2: sequential text positions, and (t, h, w) per patch for the vision tower."""

    names = ("llavaonevision2", "llavaonevision15", "llavaov")
    takes_patch_positions = True
    layouts = ((14, 2), (16, 2), (16, 3))

    def patch_positions(self, grids: Int64) -> Int64:
        """Patch positions, int64 (patches, 3), in the order of `pixel_values`: merged blocks in row-major order."""
        m = self.merge_size
        parts = []
        for t, h, w in grids:
            grid = np.moveaxis(np.indices((t, h, w)), 0, -1)
            blocks = grid.reshape(t, h // m, m, w // m, m, 3).transpose(0, 1, 3, 2, 4, 5)
            parts.append(blocks.reshape(-1, 3))
        return np.concatenate(parts) if parts else np.zeros((0, 3), dtype=np.int64)


def load_vision(
    folder: str | Path | None,
    *,
    image_processor: str | None = None,
    factor: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> VisionFamily | None:
    """Load the vision family from a processor folder, or from a name and a factor.

    Args:
        folder: folder with preprocessor_config.json (or processor_config.json), or None.
        image_processor: name of the processor, such as `Qwen2_5_VLProcessor`; determines the family if set.
        factor: pixels per token side (patch size times merge size), for `image_processor` without a folder.
        min_pixels, max_pixels: limits of the resized image in pixels.

    Returns:
        The family, or None if no image processor is configured.

    Raises:
        ConfigError: an unknown family, or conflicting settings.
    """
    settings = _processor_settings(Path(folder)) if folder is not None else {}
    if not settings and image_processor is None:
        if factor or min_pixels or max_pixels:
            raise ConfigError("`factor`, `min_pixels` and `max_pixels` require `image_processor` or `processor`")
        return None
    family = _family(image_processor, settings)
    if not settings:
        min_pixels = family.min_pixels if min_pixels is None else min_pixels
        max_pixels = family.max_pixels if max_pixels is None else max_pixels
    if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
        raise ConfigError(f"`min_pixels` is {min_pixels}; it must be at most `max_pixels` {max_pixels}")
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    limits = {name: value for name, value in limits.items() if value is not None}
    if settings:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(str(folder), **limits)
        side = processor.patch_size * processor.merge_size
        if factor is not None and factor != side:
            raise ConfigError(f"`factor` is {factor}, but {folder} has {side}; omit `factor` or `processor`")
        return family(processor)
    patch, merge = _layout(family, factor)
    return family(
        _qwen_image_processor()(
            patch_size=patch,
            merge_size=merge,
            image_mean=list(family.image_mean),
            image_std=list(family.image_std),
            **limits,
        )
    )


def _layout(family: type[VisionFamily], factor: int | None) -> tuple[int, int]:
    """(patch size, merge size) of `factor`: a published one of the family, else 2 x 2 patches merged."""
    if factor is None:
        return family.patch_size, 2
    for patch, merge in family.layouts:
        if patch * merge == factor:
            return patch, merge
    if factor < 2 or factor % 2:
        raise ConfigError(f"`factor` is {factor}; it must be a positive multiple of 2 (patch size times merge size)")
    return factor // 2, 2


def _qwen_image_processor() -> Any:
    """Image processor class: the torchvision one if torchvision is installed, else the Pillow one."""
    import transformers
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or not hasattr(transformers, "Qwen2VLImageProcessorPil"):
        return transformers.Qwen2VLImageProcessor
    return transformers.Qwen2VLImageProcessorPil


def _processor_settings(folder: Path) -> dict[str, Any]:
    """JSON files of a processor folder by name; {} if it has no image processor."""
    found: dict[str, Any] = {}
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
        path = folder / name
        if path.is_file():
            try:
                found[name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is not valid JSON: {error}; fix or remove it") from error
    nested = "image_processor" in found.get("processor_config.json", {})
    return found if "preprocessor_config.json" in found or nested else {}


def _family(name: str | None, settings: dict[str, Any]) -> type[VisionFamily]:
    """Find the family by explicit name, else by the names in the folder, most specific first."""
    candidates = [name] if name else []
    if not name:
        for key in ("model_type", "processor_class", "image_processor_type"):
            candidates += [part[key] for part in settings.values() if part.get(key)]
    for candidate in candidates:
        plain = "".join(c for c in str(candidate).lower() if c.isalnum())
        for family in _FAMILIES:
            if plain.startswith(family.names):
                return family
    valid = ", ".join(sorted(n for family in _FAMILIES for n in family.names))
    raise ConfigError(
        f"unknown image processor {', '.join(map(repr, candidates)) or 'without a name'}; "
        f"set `image_processor` to one of {valid}"
    )
