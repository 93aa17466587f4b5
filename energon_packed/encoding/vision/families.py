"""VisionFamily: image preprocessing of a model: (height, width) -> token count, RGB images -> pixels and positions.

The built-in families are at the end. To add a family, register a small class with its configuration names and its
differences from the base class:

    @register_vision
    class MyVision(VisionFamily):
        names = ("myvl",)
        patch_size = 16
"""

import json
import sys
from abc import ABC
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.vision.positions import ImageRun, Pixels, mrope_positions
from energon_packed.errors import ConfigError, Reason, RecordError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from PIL import Image

Int64 = npt.NDArray[np.int64]
PatchOrder = Literal["auto", "row", "block"]
PATCH_ORDERS: tuple[PatchOrder, ...] = ("auto", "row", "block")


class VisionFamily(ABC):
    """Image preprocessing of a model family, based on a Transformers image processor such as Qwen2VLImageProcessor.

    Attributes:
        names: lower-case prefixes of the processor, image processor or model_type names of this family;
            punctuation is ignored.
        image_token: token whose run represents an image.
        placeholder: text of an image in a conversation, with a single `image_token`.
        reserved: tokens that text must not contain.
        token_types: whether the model has an argument `token_type_ids`, 1 at image tokens.
        takes_patch_positions: whether the vision tower uses patch positions; otherwise they are only validated.
        patch_size, default_merge, temporal_patch_size, image_mean, image_std, min_pixels, max_pixels: used if there is
            no processor folder; limits as in the preprocessor_config.json of the published models.
        layouts: (patch size, merge size) of the published models of this family; `factor` selects among them.
        ambiguous_layouts: pairs (patch size, merge size) that `factor` may mean, if there are several: lengths are
            the same for all of them, pixels are not, so an error is raised when pixels are needed.
        patch_order: order of patches in .npy files: `row`, `block`, or `auto` (by the content of the file).
        warnings: decisions made while it was loaded, for the user.
    """

    names: ClassVar[tuple[str, ...]]
    image_token: ClassVar[str] = "<|image_pad|>"
    placeholder: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    reserved: ClassVar[tuple[str, ...]] = ("<|image_pad|>", "<|video_pad|>")
    token_types: bool = False
    takes_patch_positions: ClassVar[bool] = False
    patch_size: ClassVar[int] = 14
    default_merge: ClassVar[int] = 2
    temporal_patch_size: ClassVar[int] = 2
    layouts: ClassVar[tuple[tuple[int, int], ...]] = ((14, 2), (16, 2))
    image_mean: ClassVar[tuple[float, float, float]] = (0.48145466, 0.4578275, 0.40821073)  # CLIP
    image_std: ClassVar[tuple[float, float, float]] = (0.26862954, 0.26130258, 0.27577711)
    min_pixels: ClassVar[int] = 56 * 56
    max_pixels: ClassVar[int] = 28 * 28 * 16384
    ambiguous_layouts: tuple[tuple[int, int], ...] = ()
    patch_order: PatchOrder = "auto"
    warnings: tuple[str, ...] = ()

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.merge_size = int(image_processor.merge_size)

    @cached_property
    def template_token(self) -> str:
        """Text that a chat template writes for a content part of type `image`; a family can set another one."""
        return self.placeholder

    @classmethod
    def from_folder(cls, folder: "Path") -> "VisionFamily | None":
        """Load the family from a processor folder; overridden if its image processor differs from Qwen2-VL's.

        A family that overrides it has no `factor`, `patch_size`, `merge_size`, `min_pixels` and `max_pixels`.

        Returns:
            The family; None (the default) to load AutoImageProcessor with these options.
        """
        return None

    def num_patches(self, height: int, width: int) -> int:
        """Number of patches of an image of `height` x `width` pixels, before merging.

        Raises:
            RecordError: `corrupt_image`, for a size that the image processor rejects.
        """
        try:
            return int(self.image_processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{width}x{height} pixels: {error}") from error

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches of an image of `height` x `width` pixels along each side, (in height, in width)."""
        processor, side = self.image_processor, int(self.image_processor.patch_size)
        # The function of the installed processor, so that the grid is the one that the processor computes.
        resized = sys.modules[type(processor).__module__].smart_resize(
            height,
            width,
            factor=side * self.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        return resized[0] // side, resized[1] // side

    def num_tokens(self, patches: int) -> int:
        """Number of tokens of an image with this many patches."""
        return patches // self.merge_size**2

    def pixels(self, images: "list[Image.Image]") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return pixel_values, float32 (patches, patch_dim), and image_grid_thw, int64 (images, 3), of RGB images.

        Calls the installed image processor. A family that overrides this method uses its own pixels everywhere.
        """
        out = self.image_processor(images=images, return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]

    def image_token_run(self, height: int, width: int) -> ImageRun:
        """Tokens of an image of `height` x `width` pixels. Raises the errors of `num_patches`."""
        return ImageRun(self.num_tokens(self.num_patches(height, width)))

    def preprocess(self, images: "Iterable[Image.Image]") -> Pixels:
        """Return pixels and tokens of all images of a sample, given as RGB images."""
        return self._with_runs(*self.pixels(list(images)))

    def smallest(self) -> Pixels:
        """Return `preprocess` of a grey image of a single token, whatever the limits of the processor.

        A family with its own `pixels` returns the pixels and tokens of a black image of 64 x 64 pixels.
        """
        import torch
        from PIL import Image

        values, grids = self.pixels([Image.new("RGB", (64, 64))])
        if type(self).pixels is VisionFamily.pixels:
            # The processor would resize to at least `min_pixels`; dtype and patch_dim of its result are right.
            m = self.merge_size
            values = values.new_zeros((m * m, *values.shape[1:]))
            grids = torch.tensor([[1, m, m]], dtype=torch.int64)
        return self._with_runs(values, grids)

    def _with_runs(self, values: "torch.Tensor", grids: "torch.Tensor") -> Pixels:
        array = grids.numpy().astype(np.int64)
        return Pixels(values, grids, array, [ImageRun(self.num_tokens(int(n))) for n in array.prod(axis=1)])

    def position_ids(self, input_ids: Int64, image_token_id: int, grids: Int64) -> Int64 | None:
        """M-RoPE positions, int64 (3, L), or None for models that use 0..L-1."""
        return None

    def patch_positions(self, grids: Int64) -> Int64 | None:
        """Patch positions, int64 (patches, 3) as (t, h, w), or None for vision towers without them."""
        return None

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that a tokenizer writes images as this family expects.

        Args:
            tokenizer: `tokenizers.Tokenizer`.

        Raises:
            ConfigError: it has no `image_token`, or produces other tokens for an image.
        """
        if tokenizer.token_to_id(self.image_token) is None:
            raise ConfigError(
                f"the tokenizer has no {self.image_token} token, which {type(self).__name__} needs; "
                "use the tokenizer of the vision model"
            )

    def config(self) -> dict[str, Any]:
        """Settings that determine lengths and pixels, for fingerprints; only lengths if `ambiguous_layouts`."""
        if self.ambiguous_layouts:
            return self.length_config()
        # The default is left out, so that fingerprints from before this setting stay valid.
        order = {} if self.patch_order == "auto" else {"patch_order": self.patch_order}
        return {
            "family": type(self).__name__,
            "image_processor": json.loads(self.image_processor.to_json_string()),
        } | order

    def length_config(self) -> dict[str, Any]:
        """Settings that determine lengths: the same for all patch and merge sizes of one `factor`."""
        processor = self.image_processor
        return {
            "factor": int(processor.patch_size) * self.merge_size,
            "limits": [int(processor.size[name]) for name in ("shortest_edge", "longest_edge")],
            "placeholder": self.placeholder,
            "image_token": self.image_token,
        }

    def check_decided(self) -> None:
        """Raise an error if `factor` has several meanings, before pixels are computed.

        Raises:
            ConfigError: the message lists the candidates.
        """
        if self.ambiguous_layouts:
            raise ConfigError(
                f"`factor` {ambiguous(self.ambiguous_layouts)}, and pixels and patch positions depend on it; pass "
                "`patch_size`, `merge_size` or `vision_family`, or the processor folder of the model as `processor`"
            )


_FAMILIES: list[type[VisionFamily]] = []


def ambiguous(layouts: tuple[tuple[int, int], ...]) -> str:
    """Text such as `48 is 16 x 3 or 24 x 2 (patch size x merge size)`, for messages."""
    products = " or ".join(f"{patch} x {merge}" for patch, merge in layouts)
    return f"{layouts[0][0] * layouts[0][1]} is {products} (patch size x merge size)"


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
    """LLaVA-OneVision-2: sequential text positions, and (t, h, w) per patch for the vision tower.

    Its models have four layouts; without a `factor`, 16-pixel patches, 3 x 3 merged. A patch covers a single frame.
    Source: `llava_onevision2_config.py` and `merge_ov2/variants` of EvolvingLMMs-Lab/LLaVA-OneVision-2.
    """

    names: ClassVar[tuple[str, ...]] = ("llavaonevision2",)
    takes_patch_positions = True
    patch_size = 16
    default_merge = 3
    temporal_patch_size = 1
    layouts: ClassVar[tuple[tuple[int, int], ...]] = ((16, 3), (14, 2), (16, 2), (14, 3))
    max_pixels = 2000 * 2000

    def patch_positions(self, grids: Int64) -> Int64:
        """Patch positions, int64 (patches, 3), in the order of `pixel_values`: merged blocks in row-major order."""
        m = self.merge_size
        images = []
        for t, h, w in grids:
            grid = np.moveaxis(np.indices((t, h, w)), 0, -1)
            blocks = grid.reshape(t, h // m, m, w // m, m, 3).transpose(0, 1, 3, 2, 4, 5)
            images.append(blocks.reshape(-1, 3))
        return np.concatenate(images) if images else np.zeros((0, 3), dtype=np.int64)


@register_vision
class LlavaOnevision15Vision(LlavaOnevision2Vision):
    """LLaVA-OneVision-1.5: as LLaVA-OneVision-2, with 14-pixel patches, 2 x 2 merged."""

    names = ("llavaonevision15", "llavaov")
    patch_size = 14
    default_merge = 2
    layouts = ((14, 2),)


def vision_families() -> tuple[type[VisionFamily], ...]:
    """All registered families, in the order of registration."""
    return tuple(_FAMILIES)
