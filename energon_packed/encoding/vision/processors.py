"""ProcessorImages: the images of `ProcessorVision`, by any Transformers processor of text with images.

    processor(text of images, images)    ─►  text of each image, tensors for the model           (encode)
    _get_num_multimodal_tokens(sizes)    ─►  number of tokens of each image                      (measure)
    get_rope_index of the model's class  ─►  M-RoPE positions                                    (encode)

The module has no knowledge of single families. When a family is loaded, small images are processed to find:

    the text of an image in the input    the image token; else what the chat template writes for a content part
    its text in the output               as the processor returns it, else from the ids between two special tokens
    the text around it                   in the placeholder; if it depends on the size, in the text of the conversation
    the index of the image in its text   between two special tokens
    the token that features replace      the most frequent token of the longest image
    how the tensors of images join       the dimension; tiles of images join along the tiles

The result is compared with the output of the processor for text with images; a difference is an error. A processor
without `_get_num_multimodal_tokens` processes a blank image of each size in place of the formula.
"""

import json
import re
import string
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jinja2.exceptions import TemplateError

from energon_packed.encoding.pretrained import load_processor
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.encoding.vision.model_class import ModelClass
from energon_packed.encoding.vision.positions import (
    NO_IMAGES,
    ImageRun,
    Int64,
    MediaTokens,
    ModelNeeds,
    Pixels,
    VisionInputs,
    expanded,
)
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.libraries import installed

if TYPE_CHECKING:
    import torch
    from PIL import Image

_PROBES = ((64, 96), (200, 120), (448, 448), (150, 900), (900, 150), (64, 64))  # (height, width) in pixels
_CHANNELS = (1, 3)  # heights that image_utils.infer_channel_dimension_format interprets as a number of channels
CONTEXTS = (("a", "b"), ("a ", " b"), ("a\n", "\nb"), ("", ""))
_KEPT_TEXTS, _KEPT_SIZES = 256, 65536  # cache sizes; the text of an image can be long
OF_TEXT = {"input_ids", "attention_mask"}
# Types of tokens by the argument of the model. M-RoPE models compute positions from the second one.
_TAGS = ("vision_bos_token", "vision_eos_token")  # attributes of the processors of Omni models
OF_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@cache
def trials() -> list[dict[str, str]]:
    """Results of the trial of every model type, from vision_families.json: model_type, processor, result, reason."""
    file = Path(__file__).with_name("vision_families.json")
    rows: list[dict[str, str]] = json.loads(file.read_text(encoding="utf-8"))["families"]
    return rows


class ProcessorImages(VisionFamily):
    """Preprocess images with a Transformers processor.

    Attributes:
        processor: the Transformers processor.
        model: class of the model; None if the folder has no config.json of a vision-language model.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, processor: Any, model: ModelClass | None = None) -> None:
        """Find the text, tokens and joining rules of the processor with a few small images.

        Raises:
            ConfigError: the processor has a behavior that this class does not support; the message names it.
        """
        self.processor, self.model = processor, model
        self.places_audio = model is not None and model.places_audio
        self.image_processor = processor.image_processor
        self.merge_size = 1  # unused: token counts come from the processor, not from patches
        self._ids: dict[str, Int64] = {}
        self._sizes: dict[tuple[int, int], tuple[int, tuple[str, str]]] = {}
        added = [str(token) for token in processor.tokenizer.get_added_vocab()]
        self._special = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        self.template_token = self._text_of_image()
        started = time.perf_counter()
        outputs = {size: self._process([_blank(size)]) for size in _PROBES}
        seconds = (time.perf_counter() - started) / len(_PROBES)
        if any("labels" in out for out, _ in outputs.values()):
            raise self._unsupported("it returns labels: it writes the prompt and the targets of a sample itself")
        self._texts = {size: texts[0] for size, (_, texts) in outputs.items()}
        edges = {self._edges(text): size for size, text in self._texts.items()}
        # Text around all images is part of the placeholder, other text of the conversation.
        self._has_own_edges = len(edges) > 1
        before, after = ("", "") if self._has_own_edges else next(iter(edges))
        ids = {size: self._ids_of(text) for size, text in self._texts.items()}
        # The most frequent token of the longest image is replaced by features; tags and separators are rarer.
        feature = Counter(max(ids.values(), key=len).tolist()).most_common(1)[0][0]
        self.image_token = processor.tokenizer.convert_ids_to_tokens(feature)  # type: ignore[misc]
        self.placeholder = before + self.image_token + after  # type: ignore[misc]
        self.reserved = ()  # type: ignore[misc]
        self._feature = feature
        self._constant = self._formula_constant(ids)
        self._joins_samples = True
        # Text of an image up to its index in the sample, and the tag after it.
        self._number: tuple[str, str] | None = None
        self._dims = self._joins({size: out for size, (out, _) in outputs.items()})
        self._set_needs({name for out, _ in outputs.values() for name in out})
        self.gap = self._gap()
        for size in edges.values():
            self._check_texts(size)
        own = self._ids_of(self._texts[_PROBES[0]])
        are_joined = model is not None and model.position_axes and own[0] == own[-1] == feature
        self.adjacent_images = not are_joined and self._follows(self.template_token, 2)
        self.warnings = self._notices(seconds)

    @property
    def name(self) -> str:
        """Name of the class of the processor."""
        return type(self.processor).__name__

    @classmethod
    def from_folder(cls, folder: Path) -> "ProcessorImages":
        """Load the processor of a model folder.

        Raises:
            ConfigError: Transformers cannot load it here, or it is not a processor of text with images.
        """
        processor = load_processor(folder)
        for name in ("tokenizer", "image_processor"):
            if not getattr(processor, name, None):
                raise ConfigError(f"{type(processor).__name__} of {folder} has no {name} for text with images")
        try:
            return cls(processor, ModelClass.of(folder))
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            detail = f"{release()} does not call it with text and images, {' '.join(str(error).split())[:200]}"
            raise ConfigError(f"{type(processor).__name__} needs a custom VisionFamily: {detail}") from error

    def image_token_run(self, height: int, width: int) -> ImageRun:
        """Tokens of an image of this size, without its pixels."""
        length, edges = self._measured(height, width)
        return ImageRun(length, lambda: self._ids_of(self._text_of(height, width)), edges=edges)

    def numbered(self, runs: list[ImageRun]) -> list[ImageRun]:
        """Tokens of the images of a sample, with the index of each image."""
        if self._number is None:
            return runs
        images, found = 0, list[ImageRun]()
        for run in runs:
            found.append(run if run.is_video else self._with_index(run, images))
            images += not run.is_video
        return found

    def _with_index(self, run: ImageRun, index: int) -> ImageRun:
        """Tokens of the image with an index in the sample, from its tokens for index 0."""
        if self._number is None or run.make is None:
            return run
        (before, closing), make = self._number, run.make
        zero, own = (self._ids_of(f"{before}{number}{closing}") for number in (0, index))
        length = run.length - len(zero) + len(own)
        return replace(run, length=length, make=lambda: np.concatenate([own, make()[len(zero) :]]))

    def preprocess(self, images: "Iterable[Any]") -> Pixels:
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
        measured = self.numbered([self.image_token_run(image.height, image.width) for image in loaded])
        for image, ids, run in zip(loaded, tokens, measured, strict=True):
            if run.length != len(ids):
                raise self._unsupported(
                    f"it computes {run.length} tokens for {image.width}x{image.height} pixels, but writes {len(ids)}"
                )
        runs = [replace(run, make=lambda ids=ids: ids) for run, ids in zip(measured, tokens, strict=True)]  # type: ignore[misc]
        # A tensor (1, tiles, ...) joins along the tiles; for images with as many tiles, it is (images, tiles, ...).
        values = {
            name: _joined(out[name]) if dim == 1 else out[name] for name, dim in self._dims.items() if name in out
        }
        grids = NO_IMAGES if self.model is None or not self.model.grids else out[self.model.grids].numpy()
        return Pixels(runs=runs, inputs=VisionInputs(values, self._dims, len(loaded)), grids=grids)

    def position_ids(self, input_ids: Int64, media: MediaTokens) -> Int64 | None:
        """Positions by the class of the model, int64 (axes, L); None for 0..L-1. Raises the errors of `ModelClass`."""
        return None if self.model is None else self.model.position_ids(input_ids, media)

    def token_type_ids(self, input_ids: Int64) -> Int64 | None:
        """Types of tokens, int64 (L,), for a model with an argument for them; else None."""
        has_types = self.needs is not None and self.needs.types is not None
        return np.isin(input_ids, self._typed).astype(np.int64) if has_types else None

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
                    f"{self.name}; use the tokenizer of the processor's folder"
                )

    def config(self) -> dict[str, Any]:
        """Settings of the image processor, and the text that the processor writes for images of some sizes."""
        return {
            "family": self.name,
            "image_processor": json.loads(self.image_processor.to_json_string()),
            "texts": [self._texts[size] for size in _PROBES],
        }

    def length_config(self) -> dict[str, Any]:
        """Same as `config`: lengths depend on all of it."""
        return self.config()

    def _measured(self, height: int, width: int) -> tuple[int, tuple[str, str]]:
        """Number of tokens of an image and its own text around them, cached by size."""
        size = (height, width)
        if height in _CHANNELS:
            detail = f"{width}x{height} pixels: Transformers reads a height of {height} for color channels"
            raise RecordError(Reason.CORRUPT_IMAGE, detail)
        if size not in self._sizes:
            bound(self._sizes, _KEPT_SIZES)
            # Without a formula that is right for all sizes, each new size is processed once.
            if self._constant is None or self._has_own_edges:
                text = self._text_of(height, width)
                edges = self._edges(text) if self._has_own_edges else ("", "")
                self._sizes[size] = len(self._ids_of(text)), edges
            else:
                self._sizes[size] = self._counted([size])[0] + self._constant, ("", "")
        if self._sizes[size][0] < 1:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{width}x{height} pixels have no token")
        return self._sizes[size]

    def _text_of(self, height: int, width: int) -> str:
        return self._process([_blank((height, width))])[1][0]

    def _counted(self, sizes: list[tuple[int, int]]) -> list[int]:
        """Number of tokens of images by the formula of the processor."""
        try:
            counts = self.processor._get_num_multimodal_tokens(image_sizes=sizes)
        except (ValueError, ZeroDivisionError) as error:
            detail = f"{sizes[0][1]}x{sizes[0][0]} pixels: {error}"
            raise RecordError(Reason.CORRUPT_IMAGE, detail) from error
        return [int(count) for count in counts.num_image_tokens]

    def _text_of_image(self) -> str:
        """Text of an image in the input of the processor: its image token, or the text of its chat template."""
        token = getattr(self.processor, "image_token", None)
        if token is not None:
            if any(tags := self._tags()):
                token = str(token).join(tags)
            try:
                self._call(token, [_blank(_PROBES[0])])
            except ValueError as error:
                problem = str(error)
            else:
                return str(token)
        else:
            problem = "it has no image_token"
        parts = [{"type": "text", "text": "a("}, {"type": "image"}, {"type": "text", "text": ")b"}]
        try:
            rendered = self.processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        except (ValueError, TypeError, TemplateError):  # there is no chat template with images
            rendered = ""
        found = re.search(r"a\((.+)\)b", rendered, re.DOTALL)
        if found is None or not (text := found[1].strip()):
            raise self._unsupported(f"{problem}; add a chat template that writes images")
        return text

    def _tags(self) -> tuple[str, str]:
        """Tags around images and videos that chat templates write, if positions depend on them; else ("", "")."""
        if self.model is None or not self.model.position_axes:
            return "", ""
        before, after = (str(getattr(self.processor, name, "")) for name in _TAGS)
        return before, after

    def _process(self, images: "Sequence[Image.Image]") -> tuple[dict[str, Any], list[str]]:
        """Return the tensors of the processor, and its text of each image."""
        import torch

        mark = self.processor.tokenizer.eos_token or " "
        out = self._call(
            f"{mark}{(self.template_token + mark) * len(images)}", images, return_text_replacement_offsets=True
        )
        if "text_replacement_offsets" not in out:
            texts = self._between(mark, np.asarray(out["input_ids"][0]))
            return {name: to_tensor(value, torch) for name, value in out.items()}, texts
        # Without a replacement, the text of an image has all its tokens already.
        replaced = next(iter(out.pop("text_replacement_offsets")), [{"text": "", "replacement": ""}] * len(images))
        texts = [self.template_token.replace(found["text"], found["replacement"]) for found in replaced]
        return {name: to_tensor(value, torch) for name, value in out.items()}, texts

    def _between(self, mark: str, ids: Int64) -> list[str]:
        """Text of the images between special tokens, from the ids of a processor that does not return it."""
        tokenizer = self.processor.tokenizer
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.convert_tokens_to_ids(mark)))[1:-1]
        texts = [tokenizer.decode(part[1:].tolist(), clean_up_tokenization_spaces=False) for part in parts]
        for text, part in zip(texts, parts, strict=True):
            if tokenizer(text, add_special_tokens=False)["input_ids"] != part[1:].tolist():
                raise self._unsupported("it does not return the text of an image, which does not follow from its ids")
        return texts

    def _call(self, text: str, media: "Sequence[Any]", **settings: Any) -> dict[str, Any]:
        """Output of the processor, as tensors if all images have the same shape."""
        if media:
            settings["images"] = list(media)
        try:
            return dict(self.processor(text=[text], return_tensors="pt", **settings))
        except ValueError:
            return dict(self.processor(text=[text], **settings))

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
            bound(self._ids, _KEPT_TEXTS)
            ids = self.processor.tokenizer(inner, add_special_tokens=False)["input_ids"]
            self._ids[inner] = np.array(ids, dtype=np.int64)
        return self._ids[inner]

    def _formula_constant(self, ids: dict[tuple[int, int], Int64]) -> int | None:
        """Number of tags that the processor's formula omits; None if it has no formula, or omits different numbers."""
        if not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return None
        counts = self._counted(list(ids))
        omitted = {len(tokens) - count for tokens, count in zip(ids.values(), counts, strict=True)}
        return omitted.pop() if len(omitted) == 1 else None

    def _joins(self, outputs: dict[tuple[int, int], dict[str, Any]]) -> dict[str, int]:
        """Find the dimension along which each tensor of two samples joins.

        The joined tensors of two images must equal the tensors of both images in the same sample. The images are
        noise, so that a wrong dimension cannot go unnoticed. Some tensors exist for images of some sizes only.
        """
        dims: dict[str, int] = {}
        names = sorted({name for found in outputs.values() for name in found} - OF_TEXT - set(OF_TYPES))
        while names:
            sizes = [size for size, found in outputs.items() if names[0] in found]
            # Two shapes if there are several: tensors of the same shape may join along another dimension.
            first, second = sizes[0], sizes[min(1, len(sizes) - 1)]
            shape = outputs[first][names[0]].shape
            second = next((size for size in sizes if outputs[size][names[0]].shape != shape), second)
            (left, _), (right, _) = self._process([_noise(first)]), self._process([_noise(second)])
            both, texts = self._process([_noise(first), _noise(second)])
            if texts != (alone := [self._texts[first], self._texts[second]]):
                self._number = self._numbering(*alone, *texts)
            shared = [name for name in names if name in left and name in right]
            dims |= self._join_dims({name: (left[name], right[name], both[name]) for name in shared})
            names = [name for name in names if name not in shared]
        return dims

    def _numbering(self, first: str, second: str, first_of_two: str, second_of_two: str) -> tuple[str, str]:
        """Find the tags around the index of an image in its text; all other text must be equal in both samples."""
        for tags in re.finditer(f"({self._special.pattern})0({self._special.pattern})", second):
            before, after = second[: tags.end(1)], second[tags.start(2) :]
            is_first = all(text.startswith(before + "0" + tags[2]) for text in self._texts.values())
            if is_first and (first_of_two, second_of_two) == (first, before + "1" + after):
                return before, tags[2]
        raise self._unsupported("the text of an image depends on the other images of the sample")

    def _join_dims(self, tensors: "dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]") -> dict[str, int]:
        """`_joins` for the tensors, by name, of two images alone and of both."""
        dims: dict[str, int] = {}
        for name, values in tensors.items():
            shapes = [tuple(value.shape) for value in values]
            if len({len(shape) for shape in shapes}) > 1:
                raise self._unsupported(f"{name} of two samples cannot be joined, {shapes}")
            fitting = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] + sizes[1] == sizes[2]]
            if len(fitting) != 1:
                raise self._unsupported(f"{name} of two samples cannot be joined, {shapes}")
            dims[name] = fitting[0]
        parts = [VisionInputs({name: values[at] for name, values in tensors.items()}, dims, 1) for at in (0, 1)]
        joined, _ = VisionInputs.joined(parts)
        for name, (_, _, both) in tensors.items():
            if joined[name].shape != both.shape:
                raise self._unsupported(f"{name} of two images has another shape than of each image alone")
            # Such as indices that count the patches of all images before: right for the images of one sample.
            self._joins_samples &= bool((joined[name] == both).all())
        return dims

    def _set_needs(self, outputs: set[str]) -> None:
        """Find the argument of the model for the types of tokens, the tokens of type 1, and whether rows are right."""
        arguments, has_axes = (None, False) if self.model is None else (self.model.arguments, self.model.position_axes)
        names = [name for name in OF_TYPES if name in outputs and (arguments is None or name in arguments)]
        if has_axes and "mm_token_type_ids" in names:
            names.remove("mm_token_type_ids")  # used for positions only, which the sample has
        if self.model is None and (unknown := sorted({"mm_token_type_ids", "image_grid_thw"} & outputs)):
            raise self._unsupported(f"it returns {unknown[0]}, whose use depends on the model. Add its config.json")
        if len(names) > 1:
            raise self._unsupported(f"the model has {' and '.join(names)}")
        if names:
            text = f"a {self.template_token} b"
            out = self._call(text, [_blank(_PROBES[0])], add_special_tokens=False)
            ids, types = (np.asarray(out[name][0]) for name in ("input_ids", names[0]))
            self._typed = np.unique(ids[types != 0])
        # A model that attends within an image is wrong for several samples unless it was tested.
        is_wrong = self._trial() != "packed" if names else self._trial() == "one sample"
        # A model of M-RoPE with other than three axes refuses the row of text positions that separates samples.
        is_wrong |= not self._joins_samples or (self.model is not None and self.model.position_axes > 3)
        if names or is_wrong:
            self.needs = ModelNeeds(names[0] if names else None, one_sample=is_wrong)

    def _follows(self, after: str, images: int = 1) -> bool:
        """Whether the processor writes the tokens of the image and the tokens of the text, and no others."""
        size = _PROBES[0]
        theirs = self._call(self.template_token + after, [_blank(size)] * images, add_special_tokens=False)
        runs = self.numbered([self.image_token_run(*size)] * images)
        placeholders = [self.placeholder.join(run.edges) for run in runs]
        text = placeholders[0] + after.replace(self.template_token, placeholders[-1])
        ids = np.array(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        ours = expanded(ids, ids, [self._feature], runs)[0].tolist()
        found = np.asarray(theirs["input_ids"][0]).tolist()
        return any(found[at:][: len(ours)] == ours for at in range(len(found) - len(ours) + 1))

    def _gap(self) -> str:
        """Pattern of the text before which the processor puts a space after an image; "" if there is none."""
        if self._follows("b") or not self._follows(" b"):
            return ""
        return f"(?=[^\\s{re.escape(''.join(mark for mark in string.punctuation if self._follows(f'{mark}b')))}])"

    def _check_texts(self, size: tuple[int, int]) -> None:
        """Compare the tokens of text with an image with the tokens of the processor, for several strings around it.

        A tokenizer may merge the text of an image with the text next to it; the image must not change such tokens.
        """
        tokenizer, run = self.processor.tokenizer, self.image_token_run(*size)
        added = set()
        for before, after in CONTEXTS:
            text = before + self.template_token + after
            expected = self._call(text, [_blank(size)], add_special_tokens=False)
            ids = tokenizer(before + self.placeholder.join(run.edges) + after, add_special_tokens=False)["input_ids"]
            actual, _ = expanded(np.array(ids), np.array(ids), [self._feature], [run])
            theirs = np.asarray(expected["input_ids"][0])
            if self.gap and re.match(self.gap, after):
                continue  # the text of the conversation gets a space there
            # Some processors add a token at an end of every text, as a chat template does.
            starts = [
                at for at in range(len(theirs) - len(actual) + 1) if (theirs[at:][: len(actual)] == actual).all()
            ]
            if not starts:
                raise self._unsupported(
                    f"its tokens of {text!r} differ from the tokens of the text around the image's"
                )
            own = slice(starts[0], starts[0] + len(actual))
            added.add((tuple(theirs[: own.start].tolist()), tuple(theirs[own.stop :].tolist())))
            argument = None if self.needs is None else self.needs.types
            if argument is None or (typed := self.token_type_ids(actual)) is None:
                continue
            if np.asarray(expected[argument][0])[own].tolist() != typed.tolist():
                raise self._unsupported(f"its {argument} do not follow from the token ids")
        if len(added) > 1:
            raise self._unsupported("the tokens that it adds at the ends of a text depend on the text")
        self._added = tuple(tokenizer.convert_ids_to_tokens(list(ids)) for ids in added.pop())

    def _trial(self, column: str = "result") -> str | None:
        """Result of the trial with tiny models of this family, as tools/family_table.py wrote it; None if untested."""
        name = self.name
        key, value = ("processor", name) if self.model is None else ("model_type", self.model.model_type)
        found = {row.get(column) for row in trials() if row[key] == value}
        return found.pop() if len(found) == 1 else None

    def _notices(self, seconds: float) -> tuple[str, ...]:
        """What a user must know of this family; `seconds` is the time of the processor for a blank image."""
        name = self.name
        notices = []
        if self.needs is not None and self.needs.one_sample:
            notices.append(
                f"{name}: rows of several samples with images are refused; pack with max_samples_per_pack=1"
            )
        elif self._trial() in (None, "not tested"):
            notices.append(
                f"{name} is not among the processors whose models were tested packed (docs/vision-families.md); "
                "compare packed with separate logits once"
            )
        for tokens, place in zip(self._added, ("start", "end"), strict=True):
            if tokens:
                notices.append(
                    f"{name} adds {' '.join(tokens)} at the {place} of every text, and `pack` does not: add it to the "
                    "chat template if the model needs it"
                )
        if self._constant is None or self._has_own_edges:
            notices.append(
                f"{name} has no formula for the tokens of an image: it processes a blank image of each size, "
                f"{1 / max(seconds, 1e-6):,.0f} sizes per second"
            )
        return tuple(notices)

    def _unsupported(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name} needs a custom VisionFamily: {reason}")


def bound(cache: dict[Any, Any], limit: int) -> None:
    """Clear a cache that is full; simpler than removing single entries, and rare."""
    if len(cache) >= limit:
        cache.clear()


def _blank(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    return Image.new("RGB", (size[1], size[0]))


def _noise(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))


def _joined(value: Any) -> Any:
    """(1, n * m, ...) of a tensor (n, m, ...)."""
    return value.flatten(0, 1)[None]


def release() -> str:
    """Name and version of the installed Transformers."""
    return f"Transformers {installed('transformers')}"


def to_tensor(value: Any, torch: Any) -> Any:
    """Convert an array, a list of arrays, or numbers to a tensor; arrays of different sizes are joined in row 0."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return torch.stack(value) if len({part.shape for part in value}) == 1 else torch.cat(value)[None]
    return torch.as_tensor(np.asarray(value))
