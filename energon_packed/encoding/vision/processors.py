"""ProcessorVision: any family of Transformers whose processor tells the tokens of an image by its size.

    processor(text=image token, images)  ─►  its text of each image, its tensors        (encode)
    _get_num_multimodal_tokens(sizes)    ─►  tokens of each image                       (measure)

Nothing of a family is known here: what an image's text begins and ends with, which token takes the features, and how
the tensors of several images join is found with small pictures when the family is loaded, and compared with what the
processor itself gives.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.encoding.vision.positions import ImageRun, Int64, Pixels, VisionInputs, expanded
from energon_packed.errors import ConfigError, Reason, RecordError

if TYPE_CHECKING:
    from PIL import Image

_PROBES = ((64, 96), (200, 120), (448, 448), (150, 900), (900, 150))  # (height, width) in pixels
_CHANNELS = (1, 3)  # heights that image_utils.infer_channel_dimension_format takes for a number of channels
_CONTEXTS = (("a", "b"), ("a ", " b"), ("a\n", "\nb"), ("", ""))
_KEPT_TEXTS, _KEPT_SIZES = 256, 65536  # texts of images can be long
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "text_replacement_offsets"}
_OF_POSITIONS = {"image_grid_thw", "mm_token_type_ids", "image_position_ids"}
TESTED = (
    *("LlavaProcessor", "LlavaNextProcessor", "LlavaOnevisionProcessor", "Idefics3Processor", "AyaVisionProcessor"),
    *("PixtralProcessor", "InternVLProcessor"),
)


class ProcessorVision(VisionFamily):
    """Images as a Transformers processor sees them; loaded by `from_folder` where no family has the folder's name.

    Attributes:
        processor: of Transformers.
        token_types: whether the model takes `token_type_ids`, 1 at image tokens.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, processor: Any) -> None:
        """Find out how the processor writes and joins images.

        Raises:
            ConfigError: it does something that this class cannot do; the message says what.
        """
        self.processor = processor
        self.image_processor = processor.image_processor
        self.merge_size = 1
        self._ids: dict[str, Int64] = {}
        self._lengths: dict[tuple[int, int], int] = {}
        added = [str(token) for token in processor.tokenizer.get_added_vocab()]
        self._special = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        seen = {size: self._process([_blank(size)]) for size in _PROBES}
        self._texts = {size: texts[0] for size, (_, texts) in seen.items()}
        edges = {self._edges(text) for text in self._texts.values()}
        if len(edges) != 1:
            raise self._refused("the text around an image depends on its size")
        self._before, self._after = edges.pop()
        ids = {size: self._ids_of(text) for size, text in self._texts.items()}
        feature = Counter(max(ids.values(), key=len).tolist()).most_common(1)[0][0]
        self.image_token = processor.tokenizer.convert_ids_to_tokens(feature)  # type: ignore[misc]
        self.placeholder = self._before + self.image_token + self._after  # type: ignore[misc]
        self.reserved = ()  # type: ignore[misc]
        self._feature = feature
        more = {len(one) - count for one, count in zip(ids.values(), self._counted(list(ids)), strict=True)}
        self._constant = more.pop() if len(more) == 1 else None
        self.token_types = "token_type_ids" in seen[_PROBES[0]][0]
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
        """By the processor of a model folder.

        Raises:
            ConfigError: Transformers cannot load it here, or it does not tell the tokens of an image.
        """
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
        except ImportError as error:
            reason = " ".join(str(error).split()).split(" but it was not found")[0].split(". ")[0]
            raise ConfigError(f"the processor of {folder} cannot be loaded here: {reason}; install it") from error
        except Exception as error:  # whatever a processor class raises
            detail = " ".join(str(error).split())[:200]
            raise ConfigError(f"Transformers cannot load the processor of {folder} here: {detail}") from error
        if not hasattr(processor, "_get_num_multimodal_tokens") or not hasattr(processor, "tokenizer"):
            raise ConfigError(f"the {type(processor).__name__} of {folder} does not tell the tokens of an image")
        try:
            return cls(processor)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            if isinstance(error, ConfigError):
                raise
            detail = f"it does not take text with images, {' '.join(str(error).split())[:200]}"
            raise ConfigError(f"{type(processor).__name__} needs a family of its own: {detail}") from error

    def run(self, height: int, width: int) -> ImageRun:
        """Tokens of an image of this size, without its pixels."""
        return ImageRun(self._length(height, width), lambda: self._run_ids(height, width))

    def read(self, images: "Iterable[Image.Image]") -> Pixels:
        """Tokens and arguments of the vision tower for all images of a sample.

        Raises:
            RecordError: `corrupt_image`, an image that the processor refuses.
            ConfigError: the processor writes another number of tokens than it told.
        """
        pictures = list(images)
        try:
            out, texts = self._process(pictures)
        except (ValueError, ZeroDivisionError, IndexError) as error:
            raise RecordError(Reason.CORRUPT_IMAGE, " ".join(str(error).split())[:200]) from error
        ids = [self._ids_of(text) for text in texts]
        for picture, one in zip(pictures, ids, strict=True):
            told = self._length(picture.height, picture.width)
            if told != len(one):
                raise self._refused(
                    f"it tells {told} tokens for {picture.width}x{picture.height} pixels, not {len(one)}"
                )
        runs = [ImageRun(len(one), lambda one=one: one) for one in ids]  # type: ignore[misc]
        inputs = VisionInputs({name: out[name] for name in self._dims}, self._dims, len(pictures))
        return Pixels(runs=runs, inputs=inputs)

    def smallest(self) -> Pixels:
        """As `read`, of a small black image."""
        return self.read([_blank((64, 64))])

    def check_tokenizer(self, tokenizer: Any) -> None:
        """As of the base class, by the tokens of some images."""
        super().check_tokenizer(tokenizer)
        for text in self._texts.values():
            if tokenizer.encode(self._inner(text), add_special_tokens=False).ids != self._ids_of(text).tolist():
                raise ConfigError(
                    f"the tokenizer gives other tokens for an image than that of the {type(self.processor).__name__}; "
                    "use the tokenizer of the processor's folder"
                )

    def config(self) -> dict[str, Any]:
        """The settings of the image processor, and the text that the processor makes of some sizes."""
        return {
            "family": type(self.processor).__name__,
            "image_processor": json.loads(self.image_processor.to_json_string()),
            "texts": [self._texts[size] for size in _PROBES],
        }

    def length_config(self) -> dict[str, Any]:
        """The same: pixels and lengths depend on all of it."""
        return self.config()

    def _length(self, height: int, width: int) -> int:
        size = (height, width)
        if height in _CHANNELS:
            detail = f"{width}x{height} pixels: Transformers takes a height of {height} for color channels"
            raise RecordError(Reason.CORRUPT_IMAGE, detail)
        if size not in self._lengths:
            _bound(self._lengths, _KEPT_SIZES)
            known = None if self._constant is None else self._counted([size])[0] + self._constant
            self._lengths[size] = len(self._run_ids(height, width)) if known is None else known
        if self._lengths[size] < 1:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{width}x{height} pixels give no token")
        return self._lengths[size]

    def _run_ids(self, height: int, width: int) -> Int64:
        return self._ids_of(self._process([_blank((height, width))])[1][0])

    def _counted(self, sizes: list[tuple[int, int]]) -> list[int]:
        """Tokens by the processor's own formula."""
        try:
            told = self.processor._get_num_multimodal_tokens(image_sizes=sizes)
        except (ValueError, ZeroDivisionError) as error:
            detail = f"{sizes[0][1]}x{sizes[0][0]} pixels: {error}"
            raise RecordError(Reason.CORRUPT_IMAGE, detail) from error
        return [int(count) for count in told.num_image_tokens]

    def _process(self, images: "Sequence[Image.Image]") -> tuple[dict[str, Any], list[str]]:
        """The processor's tensors, and its text of each image."""
        import torch

        text = " ".join([self.processor.image_token] * len(images))
        out = self.processor(text=[text], images=list(images), return_text_replacement_offsets=True)
        texts = [one["replacement"] for one in out.pop("text_replacement_offsets")[0]]
        return {name: _tensor(value, torch) for name, value in out.items()}, texts

    def _edges(self, text: str) -> tuple[str, str]:
        """Plain text at both ends, which may share a token with the text around it."""
        found = list(self._special.finditer(text))
        if not found:
            raise self._refused("the text of an image has no special token")
        return text[: found[0].start()], text[found[-1].end() :]

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
        """The dimension along which each tensor of two samples joins, compared with both images in one sample."""
        (one, _), (two, _) = self._process([_noise(first)]), self._process([_noise(second)])
        both, texts = self._process([_noise(first), _noise(second)])
        if texts != [self._texts[first], self._texts[second]]:
            raise self._refused("the text of an image depends on the other images of the sample")
        if positions := sorted(_OF_POSITIONS & both.keys()):
            raise self._refused(f"its model takes {positions[0]}, from which it computes positions")
        dims: dict[str, int] = {}
        for name in sorted(both.keys() - _OF_TEXT):
            shapes = [tuple(out[name].shape) for out in (one, two, both)]
            fitting = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] + sizes[1] == sizes[2]]
            if len(fitting) != 1:
                raise self._refused(f"{name} of two samples cannot be joined, {shapes}")
            dims[name] = fitting[0]
        joined, _ = VisionInputs.joined([VisionInputs(out, dims, 1) for out in (one, two)])
        for name in dims:
            if not (joined[name].shape == both[name].shape and bool((joined[name] == both[name]).all())):
                raise self._refused(f"{name} of two images differs from those of the images one by one")
        return dims

    def _check_texts(self, size: tuple[int, int]) -> None:
        """Compare tokens with those of the processor, between several texts."""
        tokenizer, run = self.processor.tokenizer, self.run(*size)
        for before, after in _CONTEXTS:
            text = before + self.processor.image_token + after
            theirs = self.processor(text=[text], images=[_blank(size)], add_special_tokens=False)
            ids = tokenizer(before + self.placeholder + after, add_special_tokens=False)["input_ids"]
            ours, _ = expanded(np.array(ids), np.array(ids), self._feature, [run])
            if ours.tolist() != list(theirs["input_ids"][0]):
                raise self._refused(f"its tokens of {text!r} differ from the text's with the image's in between")
            types = np.asarray(theirs.get("token_type_ids", [ours == self._feature])[0])
            if types.tolist() != (ours == self._feature).tolist():
                raise self._refused("its token_type_ids are not 1 at image tokens and 0 elsewhere")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{type(self.processor).__name__} needs a family of its own: {why}")


def _bound(kept: dict[Any, Any], most: int) -> None:
    """Forget everything where there is no room for one more."""
    if len(kept) >= most:
        kept.clear()


def _blank(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    return Image.new("RGB", (size[1], size[0]))


def _noise(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))


def _tensor(value: Any, torch: Any) -> Any:
    """A tensor of an array, a list of arrays of one shape, or numbers."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(np.asarray(value))
