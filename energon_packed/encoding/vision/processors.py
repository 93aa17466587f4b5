"""ProcessorVision: a VisionFamily for any Transformers processor that computes token counts from image sizes.

    processor(text=image token, images)  ─►  text of each image, tensors for the vision tower    (encode)
    _get_num_multimodal_tokens(sizes)    ─►  number of tokens of each image                      (measure)

The module has no knowledge of single families. When a family is loaded, small images are processed to find the text
around an image, the token that the features replace, and how the tensors of several images join. The
result is compared with the output of the processor for text with images; a difference is an error.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from energon_packed.encoding.pretrained import load_processor
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.encoding.vision.positions import ImageRun, Int64, Pixels, VisionInputs, expanded
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.libraries import installed

if TYPE_CHECKING:
    from PIL import Image

_PROBES = ((64, 96), (200, 120), (448, 448), (150, 900), (900, 150))  # (height, width) in pixels
_CHANNELS = (1, 3)  # heights that image_utils.infer_channel_dimension_format interprets as a number of channels
_CONTEXTS = (("a", "b"), ("a ", " b"), ("a\n", "\nb"), ("", ""))
_KEPT_TEXTS, _KEPT_SIZES = 256, 65536  # cache sizes; the text of an image can be long
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "text_replacement_offsets"}
_OF_POSITIONS = {"image_grid_thw", "mm_token_type_ids", "image_position_ids"}
TESTED = (
    *("LlavaProcessor", "LlavaNextProcessor", "LlavaOnevisionProcessor", "Idefics3Processor", "AyaVisionProcessor"),
    *("PixtralProcessor", "InternVLProcessor"),
)


class ProcessorVision(VisionFamily):
    """Preprocess images with a Transformers processor; used for folders that no registered family matches.

    Attributes:
        processor: the Transformers processor.
        token_types: whether the model has an argument `token_type_ids`, 1 at image tokens.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, processor: Any) -> None:
        """Find the text, tokens and joining rules of the processor with a few small images.

        Raises:
            ConfigError: the processor has a behavior that this class does not support; the message names it.
        """
        self.processor = processor
        self.image_processor = processor.image_processor
        self.merge_size = 1  # unused: token counts come from the processor, not from patches
        self._ids: dict[str, Int64] = {}
        self._lengths: dict[tuple[int, int], int] = {}
        added = [str(token) for token in processor.tokenizer.get_added_vocab()]
        self._special = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        outputs = {size: self._process([_blank(size)]) for size in _PROBES}
        self._texts = {size: texts[0] for size, (_, texts) in outputs.items()}
        edges = {self._edges(text) for text in self._texts.values()}
        if len(edges) != 1:
            raise self._unsupported("the text around an image depends on its size")
        self._before, self._after = edges.pop()
        ids = {size: self._ids_of(text) for size, text in self._texts.items()}
        # The most frequent token of the longest image is replaced by features; tags and separators are rarer.
        feature = Counter(max(ids.values(), key=len).tolist()).most_common(1)[0][0]
        self.image_token = processor.tokenizer.convert_ids_to_tokens(feature)  # type: ignore[misc]
        self.placeholder = self._before + self.image_token + self._after  # type: ignore[misc]
        self.template_token = processor.image_token
        self.reserved = ()  # type: ignore[misc]
        self._feature = feature
        # The processor's formula may omit tags. If it omits the same number for all sizes, it is used with that
        # constant; otherwise each new size is processed once.
        omitted = {len(tokens) - count for tokens, count in zip(ids.values(), self._counted(list(ids)), strict=True)}
        self._constant = omitted.pop() if len(omitted) == 1 else None
        self.token_types = "token_type_ids" in outputs[_PROBES[0]][0]
        self._dims = self._joins(_PROBES[0], _PROBES[1])
        self._check_texts(_PROBES[0])
        name = type(processor).__name__
        if self.token_types:
            self.warnings = (
                f"{name}: rows of several samples with images are refused; pack with max_samples_per_pack=1",
            )
        elif name not in TESTED:
            self.warnings = (
                f"{name} is not among the processors whose models were tested packed ({', '.join(TESTED)}); "
                "compare packed with separate logits once",
            )

    @classmethod
    def from_folder(cls, folder: Path) -> "ProcessorVision":
        """Load the processor of a model folder.

        Raises:
            ConfigError: Transformers cannot load it here, or it cannot compute the number of image tokens.
        """
        processor = load_processor(folder)
        if not hasattr(processor, "_get_num_multimodal_tokens") or not hasattr(processor, "tokenizer"):
            raise ConfigError(
                f"{type(processor).__name__} of {folder} cannot compute the number of image tokens "
                f"(no `_get_num_multimodal_tokens` in {_release()})"
            )
        try:
            return cls(processor)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            if isinstance(error, ConfigError):
                raise
            detail = f"{_release()} does not call it with text and images, {' '.join(str(error).split())[:200]}"
            raise ConfigError(f"{type(processor).__name__} needs a custom VisionFamily: {detail}") from error

    def image_token_run(self, height: int, width: int) -> ImageRun:
        """Tokens of an image of this size, without its pixels."""
        return ImageRun(self._length(height, width), lambda: self._run_ids(height, width))

    def preprocess(self, images: "Iterable[Image.Image]") -> Pixels:
        """Return tokens and vision tower arguments for all images of a sample.

        Raises:
            RecordError: `corrupt_image`, an image that the processor does not accept.
            ConfigError: the processor writes another number of tokens than it computed from the size.
        """
        loaded = list(images)
        try:
            out, texts = self._process(loaded)
        except (ValueError, ZeroDivisionError, IndexError) as error:
            raise RecordError(Reason.CORRUPT_IMAGE, " ".join(str(error).split())[:200]) from error
        tokens = [self._ids_of(text) for text in texts]
        # A wrong formula would make planned lengths differ from encoded lengths, so every image is compared.
        for image, ids in zip(loaded, tokens, strict=True):
            expected = self._length(image.height, image.width)
            if expected != len(ids):
                raise self._unsupported(
                    f"it computes {expected} tokens for {image.width}x{image.height} pixels, but writes {len(ids)}"
                )
        runs = [ImageRun(len(ids), lambda ids=ids: ids) for ids in tokens]  # type: ignore[misc]
        inputs = VisionInputs({name: out[name] for name in self._dims}, self._dims, len(loaded))
        return Pixels(runs=runs, inputs=inputs)

    def smallest(self) -> Pixels:
        """Return `preprocess` of a small black image."""
        return self.preprocess([_blank((64, 64))])

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that a tokenizer has the image token and produces the same tokens for images of some sizes."""
        super().check_tokenizer(tokenizer)
        for text in self._texts.values():
            if tokenizer.encode(self._inner(text), add_special_tokens=False).ids != self._ids_of(text).tolist():
                raise ConfigError(
                    "the tokenizer produces other tokens for an image than the tokenizer of the "
                    f"{type(self.processor).__name__}; use the tokenizer of the processor's folder"
                )

    def config(self) -> dict[str, Any]:
        """Settings of the image processor, and the text that the processor writes for images of some sizes."""
        return {
            "family": type(self.processor).__name__,
            "image_processor": json.loads(self.image_processor.to_json_string()),
            "texts": [self._texts[size] for size in _PROBES],
        }

    def length_config(self) -> dict[str, Any]:
        """Same as `config`: lengths depend on all of it."""
        return self.config()

    def _length(self, height: int, width: int) -> int:
        """Number of tokens of an image, cached by size."""
        size = (height, width)
        if height in _CHANNELS:
            detail = f"{width}x{height} pixels: Transformers reads a height of {height} for color channels"
            raise RecordError(Reason.CORRUPT_IMAGE, detail)
        if size not in self._lengths:
            _bound(self._lengths, _KEPT_SIZES)
            known = None if self._constant is None else self._counted([size])[0] + self._constant
            self._lengths[size] = len(self._run_ids(height, width)) if known is None else known
        if self._lengths[size] < 1:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{width}x{height} pixels have no token")
        return self._lengths[size]

    def _run_ids(self, height: int, width: int) -> Int64:
        return self._ids_of(self._process([_blank((height, width))])[1][0])

    def _counted(self, sizes: list[tuple[int, int]]) -> list[int]:
        """Number of tokens of images by the formula of the processor."""
        try:
            counts = self.processor._get_num_multimodal_tokens(image_sizes=sizes)
        except (ValueError, ZeroDivisionError) as error:
            detail = f"{sizes[0][1]}x{sizes[0][0]} pixels: {error}"
            raise RecordError(Reason.CORRUPT_IMAGE, detail) from error
        return [int(count) for count in counts.num_image_tokens]

    def _process(self, images: "Sequence[Image.Image]") -> tuple[dict[str, Any], list[str]]:
        """Return the tensors of the processor, and its text of each image."""
        import torch

        text = " ".join([self.processor.image_token] * len(images))
        out = self.processor(text=[text], images=list(images), return_text_replacement_offsets=True)
        texts = [replaced["replacement"] for replaced in out.pop("text_replacement_offsets")[0]]
        return {name: _tensor(value, torch) for name, value in out.items()}, texts

    def _edges(self, text: str) -> tuple[str, str]:
        """Plain text at both ends, which may share a token with the text around it."""
        special = list(self._special.finditer(text))
        if not special:
            raise self._unsupported("the text of an image has no special token")
        return text[: special[0].start()], text[special[-1].end() :]

    def _inner(self, text: str) -> str:
        """An image's text without the plain text at its ends."""
        before, after = self._edges(text)
        return text[len(before) : len(text) - len(after)]

    def _ids_of(self, text: str) -> Int64:
        """Tokens of an image's text, without the plain text at its ends."""
        inner = self._inner(text)
        if inner not in self._ids:
            _bound(self._ids, _KEPT_TEXTS)
            ids = self.processor.tokenizer(inner, add_special_tokens=False)["input_ids"]
            self._ids[inner] = np.array(ids, dtype=np.int64)
        return self._ids[inner]

    def _joins(self, first: tuple[int, int], second: tuple[int, int]) -> dict[str, int]:
        """Find the dimension along which each tensor of two samples joins.

        The joined tensors of two images must equal the tensors of both images in the same sample. The images are
        noise, so that a wrong dimension cannot go unnoticed.
        """
        (left, _), (right, _) = self._process([_noise(first)]), self._process([_noise(second)])
        both, texts = self._process([_noise(first), _noise(second)])
        if texts != [self._texts[first], self._texts[second]]:
            raise self._unsupported("the text of an image depends on the other images of the sample")
        if positions := sorted(_OF_POSITIONS & both.keys()):
            raise self._unsupported(f"its model gets {positions[0]}, from which models compute positions")
        dims: dict[str, int] = {}
        for name in sorted(both.keys() - _OF_TEXT):
            shapes = [tuple(out[name].shape) for out in (left, right, both)]
            fitting = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] + sizes[1] == sizes[2]]
            if len(fitting) != 1:
                raise self._unsupported(f"{name} of two samples cannot be joined, {shapes}")
            dims[name] = fitting[0]
        joined, _ = VisionInputs.joined([VisionInputs(out, dims, 1) for out in (left, right)])
        for name in dims:
            if not (joined[name].shape == both[name].shape and bool((joined[name] == both[name]).all())):
                raise self._unsupported(f"{name} of two images differs from {name} of each image alone")
        return dims

    def _check_texts(self, size: tuple[int, int]) -> None:
        """Compare the tokens of text with an image with the tokens of the processor, for several strings around it.

        A tokenizer may merge the text of an image with the text next to it; the image must not change such tokens.
        """
        tokenizer, run = self.processor.tokenizer, self.image_token_run(*size)
        for before, after in _CONTEXTS:
            text = before + self.processor.image_token + after
            expected = self.processor(text=[text], images=[_blank(size)], add_special_tokens=False)
            ids = tokenizer(before + self.placeholder + after, add_special_tokens=False)["input_ids"]
            actual, _ = expanded(np.array(ids), np.array(ids), [self._feature], [run])
            if actual.tolist() != list(expected["input_ids"][0]):
                raise self._unsupported(
                    f"its tokens of {text!r} differ from the tokens of the text around the image's"
                )
            types = np.asarray(expected.get("token_type_ids", [actual == self._feature])[0])
            if types.tolist() != (actual == self._feature).tolist():
                raise self._unsupported("its token_type_ids are not 1 at image tokens and 0 elsewhere")

    def _unsupported(self, reason: str) -> ConfigError:
        return ConfigError(f"{type(self.processor).__name__} needs a custom VisionFamily: {reason}")


def _bound(cache: dict[Any, Any], limit: int) -> None:
    """Clear a cache that is full; simpler than removing single entries, and rare."""
    if len(cache) >= limit:
        cache.clear()


def _blank(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    return Image.new("RGB", (size[1], size[0]))


def _noise(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))


def _release() -> str:
    return f"Transformers {installed('transformers')}"


def _tensor(value: Any, torch: Any) -> Any:
    """Convert an array, a list of arrays of the same shape, or numbers to a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(np.asarray(value))
