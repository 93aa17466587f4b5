"""ChatEncoder: conversations to tokens, with the tokenizer's own template and a Transformers image processor.

Measuring and encoding share one path up to the token ids:

    Renderer ──► tokenizer ──► ids with ONE image token per image ──┬─► count, and add the image sizes  (measure)
                                                                    ├─► repeat image tokens, labels     (encode_tokens)
                                                                    └─► and pixels                      (encode)
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.conversation import Conversation, MediaReference
from energon_packed.encoding.images import load_image, read_header
from energon_packed.encoding.patch_positions import check_patch_positions, load_patch_positions
from energon_packed.encoding.processor import Measured, Processor
from energon_packed.encoding.rendering import LOSS_ON, LossOn, Renderer
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedSample
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.template import ChatTemplate
from energon_packed.encoding.vision import VisionFamily, load_vision
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.seqlens import position_ids_from_cu_seqlens

Int64 = npt.NDArray[np.int64]
_BATCH = 64  # texts in one call of the tokenizer, whose results take 100 bytes a token: this many stay in the cache
_NO_IMAGES: Int64 = np.zeros((0, 3), dtype=np.int64)
_VERSION = 4  # raise it when the same input gives other tokens


class ChatEncoder(Processor):
    """Encodes conversations with a tokenizer, its chat template and, for images, a vision family.

    `text` records are tokenized as documents: the tokenizer's own special tokens around them, its end-of-text token
    at the end, every token supervised. `input_ids` records pass through.
    """

    def __init__(self, tokenizer: Any, vision: VisionFamily | None = None, *, loss_on: LossOn = "assistant") -> None:
        """Wrap loaded parts; `from_pretrained` loads them.

        Args:
            tokenizer: a fast Transformers tokenizer.
            vision: how images are seen; None for text only.
            loss_on: which text is supervised: every assistant turn, the last one, or all text.

        Raises:
            ConfigError: a slow tokenizer, an unknown `loss_on`, or a tokenizer without the family's image token.
        """
        if loss_on not in LOSS_ON:
            raise ConfigError(f"loss_on is {loss_on!r}; use one of {', '.join(LOSS_ON)}")
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"{type(tokenizer).__name__} is a slow tokenizer; a tokenizer.json is needed")
        self.tokenizer = tokenizer
        self.vision = vision
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        ends = self._backend.encode("a", add_special_tokens=True).ids[-1:]
        self.renderer = Renderer(
            ChatTemplate(tokenizer),
            placeholder=vision.placeholder if vision else None,
            end="" if ends == [tokenizer.eos_token_id] else tokenizer.eos_token or "",
            loss_on=loss_on,
        )
        self.image_token_id: int | None = None
        self._reserved: frozenset[int] = frozenset()
        if vision is not None:
            self.image_token_id = self._backend.token_to_id(vision.image_token)
            if self.image_token_id is None:
                raise ConfigError(
                    f"the tokenizer has no {vision.image_token} token, which {type(vision).__name__} needs; "
                    "use the tokenizer of the vision model"
                )
            reserved = {self._backend.token_to_id(token) for token in vision.reserved}
            self._reserved = frozenset(reserved - {None, self.image_token_id})

    @classmethod
    def from_pretrained(
        cls,
        tokenizer_dir: str | Path,
        processor_dir: str | Path | None = None,
        *,
        loss_on: LossOn = "assistant",
        image_processor: str | None = None,
        factor: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> "ChatEncoder":
        """Load a tokenizer folder and, for images, a processor folder or a named image processor.

        Args:
            tokenizer_dir: folder with tokenizer.json; its image processor is used where it has one.
            processor_dir: folder with preprocessor_config.json.
            loss_on: `assistant` (every assistant turn), `last` (the last one) or `all` (all text).
            image_processor: name such as `Qwen2_5_VLProcessor`, for settings without a folder.
            factor: pixels per token side (patch size times merge size).
            min_pixels, max_pixels: limits of the resized image.

        Raises:
            ConfigError: a folder without a tokenizer, or settings that contradict each other.
        """
        for folder in (tokenizer_dir, processor_dir):
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(f"{folder} is not a folder; give the folder of a tokenizer or processor")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{tokenizer_dir} holds no tokenizer that Transformers can load: {_line(error)}"
            ) from error
        vision = load_vision(
            processor_dir or tokenizer_dir,
            image_processor=image_processor,
            factor=factor,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        )
        if vision is None and processor_dir is not None:
            raise ConfigError(f"{processor_dir} has no preprocessor_config.json; give --image-processor NAME instead")
        return cls(tokenizer, vision, loss_on=loss_on)

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Tokens, labels, pixels and positions of one conversation.

        Raises:
            RecordError: the conversation cannot be used; `reason` says why.
            TemplateError: the chat template cannot tell what the assistant wrote.
            ConfigError: images without a vision family, or messages without a chat template.
        """
        if not conversation.images:
            return self.encode_tokens(conversation)
        vision = self._vision()
        images = [load_image(image) for image in conversation.images]
        for image in images:
            vision.num_patches(image.height, image.width)  # refuses shapes that the processor would crash on
        pixel_values, grids = vision.pixels(images)
        grid = grids.numpy().astype(np.int64)
        patches = grid.prod(axis=1)
        ids, supervised = self._with_images(conversation, patches)
        given = [load_patch_positions(p, int(n)) for p, n in self._with_patches(conversation, patches)]
        default = vision.patch_positions(grid)
        return replace(
            self._finish(conversation, ids, supervised, grid),
            pixel_values=pixel_values,
            image_grid_thw=grids,
            patch_positions=np.concatenate(given) if given and vision.takes_patch_positions else default,
        )

    def adopt_tokens(
        self, ids: Sequence[str | None], input_ids: Int64, labels: Int64, cu_seqlens: Sequence[int]
    ) -> list[EncodedSample]:
        """As `encode` of each tokenized text, with the checks made on the whole row."""
        if self.vision is not None:
            self._check_placeholders(input_ids.tolist(), 0)
        supervised = labels != IGNORE_INDEX
        supervised[np.asarray(cu_seqlens[:-1])] = False  # the first token of a sample is predicted by nothing
        if not np.logical_or.reduceat(supervised, cu_seqlens[:-1]).all():
            return super().adopt_tokens(ids, input_ids, labels, cu_seqlens)  # says which
        positions: Int64 | None = None
        if self.vision is not None and self.vision.position_ids(input_ids[:1], -1, _NO_IMAGES) is not None:
            # M-RoPE counts text alike in all three: 0, 1, 2 .. in each sample.
            positions = np.broadcast_to(position_ids_from_cu_seqlens(np.asarray(cu_seqlens)), (3, len(input_ids)))
        return [
            EncodedSample(
                id=ident,
                input_ids=input_ids[start:end],
                labels=labels[start:end],
                image_token_id=self.image_token_id,
                position_ids=None if positions is None else positions[:, start:end],
            )
            for ident, (start, end) in zip(ids, pairwise(cu_seqlens), strict=True)
        ]

    def encode_tokens(self, conversation: Conversation) -> EncodedSample:
        """Tokens and labels as `encode` gives them, without pixels; image sizes come from headers."""
        if not conversation.images:
            ids, supervised = self._tokens(conversation)
            self._check_placeholders(ids.tolist(), 0)
            return self._finish(conversation, ids, supervised, _NO_IMAGES)
        patches, _ = self._read_headers(conversation)
        return self._finish(conversation, *self._with_images(conversation, patches), None)

    def measure_tokens(self, conversation: Conversation) -> tuple[Measured, EncodedSample]:
        """As `measure` of one conversation, with its tokens and labels; image sizes come from headers."""
        if conversation.input_ids is not None:
            self._check_token_ids(conversation)
        if not conversation.images:
            encoded, num_bytes = self.encode_tokens(conversation), 0
        else:
            patches, num_bytes = self._read_headers(conversation)
            encoded = self._finish(conversation, *self._with_images(conversation, patches), None)
        return Measured(len(encoded), num_bytes), encoded

    def measure(self, conversations: Sequence[Conversation]) -> list[Measured | RecordError]:
        """Length and media size of each conversation, without decoding pixels; texts are tokenized in one batch.

        Raises:
            TemplateError, ConfigError: as `encode`.
        """
        results: list[Measured | RecordError | None] = [None] * len(conversations)
        texts: dict[bool, tuple[list[int], list[str]]] = {True: ([], []), False: ([], [])}
        media: dict[int, tuple[int, int]] = {}
        for place, conversation in enumerate(conversations):
            try:
                media[place] = self._measure_media(conversation)
                if conversation.input_ids is not None:
                    self._check_token_ids(conversation)
                    results[place] = self._measured(conversation, None, *media[place])
                    continue
                text = self.renderer.supervised_text(conversation)
            except RecordError as error:
                results[place] = error
                continue
            is_document = conversation.text is not None
            texts[is_document][0].append(place)
            texts[is_document][1].append(text)
        for is_document, (places, batch) in texts.items():
            for start in range(0, len(batch), _BATCH):
                part = slice(start, start + _BATCH)
                encodings = self._backend.encode_batch_fast(batch[part], add_special_tokens=is_document)
                for place, encoding in zip(places[part], encodings, strict=True):
                    results[place] = self._measured(conversations[place], encoding, *media[place])
        return [result for result in results if result is not None]

    def fingerprint(self) -> str:
        """Hex digest of the tokenizer, its template, the image settings and `loss_on`."""
        parts = {
            "version": _VERSION,
            "tokenizer": self._backend.to_str(),
            "special": dict(self.tokenizer.special_tokens_map),
            "template": self.renderer.template.source,
            "vision": self.vision.config() if self.vision else None,
            "loss_on": self.renderer.loss_on,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    # --- text and tokens -------------------------------------------------------------------------------------------

    def _tokens(self, conversation: Conversation) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Token ids int64 (L,) before image tokens are repeated, and which are supervised, bool (L,)."""
        if conversation.input_ids is not None:
            labels = conversation.labels if conversation.labels is not None else conversation.input_ids
            return conversation.input_ids, labels != IGNORE_INDEX
        if conversation.text is not None:
            encoding = self._backend.encode(self.renderer.document(conversation), add_special_tokens=True)
            return np.array(encoding.ids, dtype=np.int64), np.ones(len(encoding.ids), dtype=bool)
        text, spans = self.renderer.messages_and_spans(conversation)
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64), _covered(encoding, spans, len(text))

    def _with_images(self, conversation: Conversation, patches: Any) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Token ids int64 (L,) with a run of image tokens for each image, and which are supervised, bool (L,)."""
        counts = np.array([self._vision().num_tokens(int(count)) for count in patches], dtype=np.int64)
        ids, supervised = self._tokens(conversation)
        if conversation.input_ids is not None:
            self._check_placeholders(ids.tolist(), int(counts.sum()))
            return ids, supervised
        self._check_placeholders(ids.tolist(), len(conversation.images))
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[ids == self.image_token_id] = counts
        return np.repeat(ids, repeats), np.repeat(supervised, repeats)

    def _finish(
        self, conversation: Conversation, ids: Int64, supervised: npt.NDArray[np.bool_], grids: Int64 | None
    ) -> EncodedSample:
        """A sample without pixels; M-RoPE positions where the family has them and the grids are known."""
        if self.image_token_id is not None:
            supervised = supervised & (ids != self.image_token_id)
        if len(ids) == 0:
            raise RecordError(Reason.EMPTY, "its text gives no token")
        if not supervised[1:].any():
            raise RecordError(Reason.NO_SUPERVISED_TOKENS, "no token after the first is supervised")
        targets = ids if conversation.labels is None else conversation.labels
        positions = None
        if self.vision is not None and self.image_token_id is not None and grids is not None:
            positions = self.vision.position_ids(ids, self.image_token_id, grids)
        return EncodedSample(
            id=conversation.id,
            input_ids=ids,
            labels=np.where(supervised, targets, IGNORE_INDEX),
            image_token_id=self.image_token_id,
            position_ids=positions,
        )

    # --- measuring -------------------------------------------------------------------------------------------------

    def _check_token_ids(self, conversation: Conversation) -> None:
        ids, labels = conversation.input_ids, conversation.labels
        assert ids is not None
        known = len(self.tokenizer)
        for name, values in (("input_ids", ids), ("labels", ids if labels is None else labels)):
            wrong = values[(values < 0) | (values >= known)]
            wrong = wrong[wrong != IGNORE_INDEX] if name == "labels" else wrong
            if len(wrong):
                raise RecordError(
                    Reason.MISSING_FIELD, f"{name} holds {wrong[0]}, which is no token of the {known} in the tokenizer"
                )
        targets = (ids if labels is None else labels) != IGNORE_INDEX
        if self.image_token_id is not None:
            targets &= ids != self.image_token_id
        if not targets[1:].any():
            raise RecordError(Reason.NO_SUPERVISED_TOKENS, "no label after the first is a target")

    def _measured(
        self, conversation: Conversation, encoding: Any, image_tokens: int, media_bytes: int
    ) -> Measured | RecordError:
        """What planning needs, from the tokenizer's result before image tokens are repeated (None for `input_ids`)."""
        ids = conversation.input_ids if encoding is None else encoding
        assert ids is not None
        if len(ids) == 0:
            return RecordError(Reason.EMPTY, "its text gives no token")
        if len(ids) == 1:
            return RecordError(Reason.NO_SUPERVISED_TOKENS, "it is one token, which nothing predicts")
        repeated = 0
        try:
            if encoding is None:
                self._check_placeholders(ids.tolist(), image_tokens)
            else:
                repeated = image_tokens - len(conversation.images)
                if self.vision is not None:
                    self._check_placeholders(encoding.ids, len(conversation.images))
        except RecordError as error:
            return error
        return Measured(len(ids) + repeated, media_bytes)

    def _measure_media(self, conversation: Conversation) -> tuple[int, int]:
        """(image tokens, bytes of images and .npy files), from headers alone."""
        if not conversation.images:
            return 0, 0
        patches, num_bytes = self._read_headers(conversation)
        return sum(self._vision().num_tokens(count) for count in patches), num_bytes

    def _read_headers(self, conversation: Conversation) -> tuple[list[int], int]:
        """(patches of each image, bytes of images and .npy files)."""
        vision = self._vision()
        headers = [read_header(image) for image in conversation.images]
        patches = [vision.num_patches(header.height, header.width) for header in headers]
        num_bytes = sum(header.num_bytes for header in headers)
        for positions, count in self._with_patches(conversation, patches):
            num_bytes += check_patch_positions(positions, count)
        return patches, num_bytes

    def _check_placeholders(self, ids: list[int], expected: int) -> None:
        if self.vision is None:
            return
        found = ids.count(self.image_token_id)  # type: ignore[arg-type]
        if found != expected:
            raise RecordError(
                Reason.IMAGE_COUNT_MISMATCH,
                f"{found} {self.vision.image_token} tokens where the images need {expected}",
            )
        if not self._reserved.isdisjoint(ids):
            raise RecordError(
                Reason.IMAGE_COUNT_MISMATCH,
                f"the text holds one of the tokens {' '.join(self.vision.reserved)}",
            )

    # --- parts -----------------------------------------------------------------------------------------------------

    def _vision(self) -> VisionFamily:
        if self.vision is None:
            raise ConfigError(
                "a record has images, but no image processor is set; give --processor or --image-processor"
            )
        return self.vision

    @staticmethod
    def _with_patches(conversation: Conversation, patches: Any) -> list[tuple[MediaReference, int]]:
        return list(zip(conversation.patch_positions, patches, strict=True)) if conversation.patch_positions else []


def _covered(encoding: Any, spans: Sequence[Span], size: int) -> npt.NDArray[np.bool_]:
    """Tokens that hold at least one character of a span of a text of `size` characters: bool (L,)."""
    covered = np.zeros(len(encoding), dtype=bool)
    for start, end in spans:
        # Asking for the ends of a span is much cheaper than taking the offsets of all tokens out of the tokenizer.
        first = encoding.char_to_token(start)
        after = encoding.char_to_token(end) if end < size else len(covered)
        if first is None or after is None or start >= end:  # a character in no token: dropped white space
            starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            covered |= (starts < end) & (ends > start)
            continue
        while after < len(covered) and encoding.token_to_chars(after)[0] < end:  # tokens across the end
            after += 1
        covered[first:after] = True
    return covered


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
