"""ChatEncoder: conversations to tokens, with the tokenizer's own template and a Transformers image processor.

Measuring and encoding share one path to the token ids, `_tokenize`, which takes many conversations or one:

    Renderer ─► TextTokenizer ─► TokenBatch, ONE image token per image ─► TokenRules ─┬─► lengths        (measure)
                                                                                      ├─► labels         (keep_tokens)
                                                                                      └─► and pixels     (encode)
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.engines import EngineName
from energon_packed.encoding.pretrained import TokenizerParts, load_tokenizer
from energon_packed.encoding.processor import Measurement, Processor, TokenBatch, TokenRules
from energon_packed.encoding.rendering import LOSS_ON, LossOn, Rendered, Renderer
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedRow, EncodedSample, targets_per_sample
from energon_packed.encoding.settings import EncoderSettings
from energon_packed.encoding.special_text import SpecialText, control_tokens_of
from energon_packed.encoding.template import ChatTemplate
from energon_packed.encoding.tokenizer import TextTokenizer
from energon_packed.encoding.vision.families import PatchOrder, VisionFamily
from energon_packed.encoding.vision.media import MediaSize, measure_media, patch_positions, read_pixels
from energon_packed.encoding.vision.positions import NO_IMAGES, ImageRun, Pixels, expanded
from energon_packed.encoding.vision.settings import load_vision
from energon_packed.errors import ConfigError, Reason, RecordError, Reject
from energon_packed.options import make
from energon_packed.records import Conversation
from energon_packed.seqlens import position_ids_from_cu_seqlens

if TYPE_CHECKING:
    from energon_packed.encoding.vision.families import VisionFamily

Int64 = npt.NDArray[np.int64]
_BATCH = 256  # conversations tokenized and checked together
_NO_MEDIA = MediaSize()
_NO_VISION = "a record has images, but no image processor is set; pass `processor` or `image_processor`"
_VERSION = 7  # raise it when the same input gives other tokens
_DATE_NOTE = "{# energon-packed: always the same date #}"  # in the digest since version 4
_SPECIAL_IN_TEXT = 6
"""The version before special tokens in texts stayed text: an encoder that allows them gives the tokens of that one."""


class ChatEncoder(Processor):
    """Encodes conversations with a tokenizer, its chat template and, for images, a vision family.

    `text` records are tokenized as documents: the tokenizer's own special tokens around them, its end-of-text token
    at the end, every token supervised. `input_ids` records pass through.

    Attributes:
        tokenizer: the Transformers tokenizer.
        vision: how images are seen; None for text only.
    """

    def __init__(
        self,
        tokenizer: Any,
        vision: VisionFamily | None = None,
        *,
        loss_on: LossOn = "assistant",
        tokenizer_engine: EngineName = "auto",
        allow_special_in_text: bool = False,
    ) -> None:
        """Wrap loaded parts; `from_pretrained` loads them.

        Args:
            tokenizer: a fast Transformers tokenizer.
            vision: how images are seen; None for text only.
            loss_on: which text is supervised: every assistant turn, the last one, or all text.
            tokenizer_engine: as `TextTokenizer` takes it; the ids are the same.
            allow_special_in_text: special tokens written in a text are control tokens, not text.

        Raises:
            ConfigError: a slow tokenizer, an unknown `loss_on`, a tokenizer without the family's image token, or an
                engine that cannot be used.
        """
        if loss_on not in LOSS_ON:
            raise ConfigError(f"`loss_on` is {loss_on!r}; use one of {', '.join(LOSS_ON)}")
        self.tokenizer = tokenizer
        self.parts = TokenizerParts.of(tokenizer)
        self.vision = vision
        control = [] if allow_special_in_text else control_tokens_of(self.parts, vision)
        self.text_tokenizer = TextTokenizer(self.parts.backend, tokenizer_engine, control=control)
        self.renderer = Renderer(
            ChatTemplate(self.parts),
            placeholder=vision.placeholder if vision else None,
            end=self.parts.end_of_document,
            loss_on=loss_on,
            special=SpecialText(control, self.parts.chat_template) if control else None,
        )
        if vision is not None:
            vision.check_tokenizer(self.parts.backend)
        self.image_token_id = self.rules.image_token_id

    @classmethod
    def from_pretrained(
        cls,
        tokenizer: str | Path,
        processor: str | Path | None = None,
        *,
        image_processor: str | None = None,
        vision_family: str | None = None,
        factor: int | None = None,
        patch_size: int | None = None,
        merge_size: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        patch_order: PatchOrder = "auto",
        loss_on: LossOn = "assistant",
        tokenizer_engine: EngineName = "auto",
        allow_special_in_text: bool = False,
    ) -> "ChatEncoder":
        """Load a tokenizer folder and, for images, a processor folder or a named image processor.

        The parameters are the fields of `EncoderSettings`, and the options of `energon-packed pack` and `verify`.

        Args:
            tokenizer: folder with tokenizer.json; its image processor is used where it has one. Or the name of a model
                in the local Hugging Face cache.
            processor: folder with preprocessor_config.json.
            image_processor: name of the processor, such as `Qwen2_5_VLProcessor`; determines the family if set.
            vision_family: name of the family, such as `llava_onevision2`, where several use one image processor.
            factor: pixels per token side: `patch_size` times `merge_size`.
            patch_size, merge_size: pixels of a patch side, patches merged along each side into one token.
            min_pixels, max_pixels: limits of the resized image in pixels.
            patch_order: order of patches in .npy files of positions: `row`, `block`, or `auto`, by what is in them.
            loss_on: `assistant` (every assistant turn), `last` (the last one) or `all` (all text).
            tokenizer_engine: `fastokens` where it is proved equal (`auto`), or one of `tokenizers`, `fastokens`.
            allow_special_in_text: special tokens written in a text are control tokens, not text.

        Raises:
            ConfigError: an invalid value, a folder without a tokenizer, or settings that contradict each other.
        """
        # locals() are the parameters alone here, so no setting can be left out.
        settings = make(EncoderSettings, {name: value for name, value in locals().items() if name != "cls"})
        loaded = load_tokenizer(tokenizer)
        options: Any = {"tokenizer_engine": tokenizer_engine, "allow_special_in_text": allow_special_in_text}
        return cls(loaded, load_vision(settings), loss_on=loss_on, **options)

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Tokens, labels, pixels and positions of one conversation.

        Raises:
            RecordError: the conversation cannot be used; `reason` and `detail` say why.
            TemplateError: the chat template cannot tell what the assistant wrote.
            ConfigError: images without a vision family, or messages without a chat template.
        """
        found = self.encode_many([conversation])[0]
        if isinstance(found, Reject):
            raise RecordError.of(found)
        return found

    def encode_many(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """As `encode` of each, or why it cannot be used; texts are tokenized in one batch."""
        if not any([one.images for one in conversations]):
            return self._encoded_texts(conversations)
        results: dict[int, EncodedSample | Reject] = {}
        seen: dict[int, Pixels] = {}
        for place, conversation in enumerate(conversations):
            try:
                seen[place] = read_pixels(self._vision(), conversation) if conversation.images else Pixels()
            except RecordError as error:
                results[place] = error.reject
        sizes = [MediaSize(one.runs) for one in seen.values()]
        batch, rejects = self._tokenize([conversations[place] for place in seen], sizes)
        for number, (place, pixels) in enumerate(seen.items()):
            if number in rejects:
                results[place] = rejects[number]
                continue
            try:
                results[place] = self._encoded(conversations[place], pixels, batch, number)
            except RecordError as error:
                results[place] = error.reject
        return [results[place] for place in range(len(results))]

    def _encoded_texts(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """`encode_many` without images: the samples are views of one batch."""
        batch, rejects = self._tokenize(conversations, [_NO_MEDIA] * len(conversations))
        found = self._as_row([one.id for one in conversations], batch)
        return [rejects.get(number, one) for number, one in enumerate(found)]

    def _encoded(self, conversation: Conversation, pixels: Pixels, batch: TokenBatch, number: int) -> EncodedSample:
        sample = self._expanded(conversation, pixels.runs, batch, number)
        if self.vision is None or self.image_token_id is None:
            return sample
        positions = self.vision.position_ids(sample.input_ids, self.image_token_id, pixels.grids)
        if pixels.values is None:
            return replace(sample, position_ids=positions, dummy=self.dummy, vision_inputs=pixels.inputs)
        return replace(
            sample,
            dummy=self.dummy,
            position_ids=positions,
            pixel_values=pixels.values,
            image_grid_thw=pixels.grids_tensor,
            patch_positions=patch_positions(self.vision, conversation, pixels),
        )

    def measure(self, conversations: Sequence[Conversation], *, keep_tokens: bool = False) -> list[Measurement]:
        """Length and media size of each conversation, without decoding pixels; texts are tokenized in batches.

        Raises:
            TemplateError, ConfigError: as `encode`.
        """
        results: list[Measurement | None] = [None] * len(conversations)
        media: dict[int, MediaSize] = {}
        for place, conversation in enumerate(conversations):
            try:
                media[place] = measure_media(self._vision(), conversation) if conversation.images else _NO_MEDIA
            except RecordError as error:
                results[place] = Measurement.rejected(error.reject)
        places = list(media)
        for start in range(0, len(places), _BATCH):
            part = places[start : start + _BATCH]
            chosen, sizes = [conversations[place] for place in part], [media[place] for place in part]
            batch, rejects = self._tokenize(chosen, sizes)
            lengths = np.diff(batch.cu_seqlens).tolist()
            targets = targets_per_sample(batch.labels, batch.cu_seqlens).tolist()  # image tokens are none
            for number, (place, size) in enumerate(zip(part, sizes, strict=True)):
                if number in rejects:
                    results[place] = Measurement.rejected(rejects[number])
                    continue
                conversation, length = chosen[number], lengths[number]
                if conversation.input_ids is None:
                    length += sum([run.length - 1 for run in size.runs])
                results[place] = Measurement(
                    length,
                    size.num_bytes,
                    sample=self._expanded(conversation, size.runs, batch, number) if keep_tokens else None,
                    supervised=targets[number],
                    decoded=size.decoded,
                )
        return [result for result in results if result is not None]

    def _as_row(self, ids: Sequence[str | None], batch: TokenBatch) -> EncodedRow:
        positions: Int64 | None = None
        if self._has_mrope:
            # M-RoPE numbers text alike in all three rows: 0, 1, 2 .. in each sample.
            positions = np.broadcast_to(position_ids_from_cu_seqlens(batch.cu_seqlens), (3, len(batch.input_ids)))
        return EncodedRow(
            ids=ids,
            input_ids=batch.input_ids,
            labels=batch.labels,
            cu_seqlens=batch.cu_seqlens,
            position_ids=positions,
            token_type_ids=np.zeros_like(batch.input_ids) if self.vision and self.vision.token_types else None,
            image_token_id=self.image_token_id,
            dummy=self.dummy,
        )

    @cached_property
    def rules(self) -> TokenRules:
        """What the tokens of a sample must keep, by the tokenizer and the vision family."""
        return TokenRules.of(self.parts, self.vision)

    @cached_property
    def dummy(self) -> EncodedSample | None:
        """A minimal sample of one image without a target, for rows without images.

        None without a vision family, and for a family that does not know its patch size.
        """
        vision, token = self.vision, self.image_token_id
        if vision is None or token is None or vision.ambiguous_layouts:
            return None
        pixels = vision.smallest()
        placeholder = self.text_tokenizer.encode([vision.placeholder], [None], special=False).input_ids
        ids, _ = expanded(placeholder, placeholder, token, pixels.runs)
        return EncodedSample(
            id="dummy image",
            input_ids=ids,
            labels=np.full(len(ids), IGNORE_INDEX, dtype=np.int64),
            image_token_id=token,
            pixel_values=pixels.values,
            image_grid_thw=pixels.grids_tensor,
            patch_positions=None if pixels.values is None else vision.patch_positions(pixels.grids),
            vision_inputs=pixels.inputs,
            token_type_ids=np.zeros(len(ids), dtype=np.int64) if vision.token_types else None,  # no attention
        )

    def fingerprint(self) -> str:
        """Hex digest of the tokenizer, its template, the image settings and `loss_on`."""
        return next(self._digests())

    def has_fingerprint(self, recorded: str) -> bool:
        """Also of data packed by a `factor` alone, which decides lengths, where this encoder knows more."""
        return recorded in self._digests()

    def _digests(self) -> Iterator[str]:
        """Yield the hex digests of the data that this encoder reads: first its own.

        It also reads data that was packed knowing nothing of images but how many tokens they take, and data of the
        version before, whose texts hold special tokens rarely; lengths are checked sample by sample.
        """
        source, vision = self.parts.chat_template, self.vision
        parts = {
            "tokenizer": self.text_tokenizer.serialized,
            "special": self.parts.special_tokens,
            "template": None if source is None else source + _DATE_NOTE,
            "loss_on": self.renderer.loss_on,
        }
        images = [vision.config(), vision.length_config()] if vision else [None]
        versions = [_SPECIAL_IN_TEXT] if self.renderer.special is None else [_VERSION, _SPECIAL_IN_TEXT]
        for version, image in product(versions, images):
            text = json.dumps({**parts, "version": version, "vision": image}, sort_keys=True, default=str)
            yield hashlib.sha256(text.encode()).hexdigest()

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _tokenize(
        self, conversations: Sequence[Conversation], media: Sequence[MediaSize]
    ) -> tuple[TokenBatch, dict[int, Reject]]:
        """Tokens of S conversations with one image token per image (`input_ids` records as they are), and the rejects.

        This is the only way from a conversation to token ids.
        """
        rejects: dict[int, Reject] = {}
        rendered: dict[int, Rendered] = {}
        for number, conversation in enumerate(conversations):
            if conversation.input_ids is None:
                try:
                    rendered[number] = self.renderer.render(conversation)
                except RecordError as error:
                    rejects[number] = error.reject
        pieces: list[tuple[Int64, Int64] | None] = [None] * len(conversations)
        for is_document in (False, True):
            chosen = {number: one for number, one in rendered.items() if one.is_document == is_document}
            if not chosen:
                continue
            texts, spans = [one.text for one in chosen.values()], [one.spans for one in chosen.values()]
            found = self.text_tokenizer.encode(texts, spans, special=is_document)
            labels = np.where(found.covered, found.input_ids, IGNORE_INDEX)
            if len(chosen) == len(conversations):
                return self._checked(conversations, media, TokenBatch(found.input_ids, labels, found.cu_seqlens))
            for number, (start, end) in zip(chosen, pairwise(found.cu_seqlens.tolist()), strict=True):
                pieces[number] = (found.input_ids[start:end], labels[start:end])
        for number, conversation in enumerate(conversations):
            if conversation.input_ids is not None:
                ids = conversation.input_ids
                pieces[number] = (ids, ids if conversation.labels is None else conversation.labels)
        batch, unusable = self._checked(conversations, media, TokenBatch.joined(pieces))
        return batch, unusable | rejects

    def _checked(
        self, conversations: Sequence[Conversation], media: Sequence[MediaSize], batch: TokenBatch
    ) -> tuple[TokenBatch, dict[int, Reject]]:
        are_ours = all([one.input_ids is None for one in conversations])
        expected: Sequence[int] = ()  # without a vision family, images are rejected earlier
        if self.vision is not None:
            expected = [
                len(one.images) if one.input_ids is None else sum([r.features(self.image_token_id) for r in size.runs])
                for one, size in zip(conversations, media, strict=True)
            ]
        batch, rejects = self.rules.check(batch, expected, are_ours=are_ours)
        for number, reject in rejects.items():
            roles = [message.role for message in conversations[number].messages]
            if roles and reject.reason is Reason.NO_SUPERVISED_TOKENS and "assistant" not in roles:
                rejects[number] = Reject(reject.reason, f"no assistant turn among {', '.join(roles)}")
        return batch, rejects

    def _expanded(
        self, conversation: Conversation, runs: Sequence[ImageRun], batch: TokenBatch, number: int
    ) -> EncodedSample:
        """One sample of a batch, with the tokens of each image."""
        ids, labels = batch.sample(number)
        token = self.image_token_id
        if conversation.input_ids is None and runs:
            ids, labels = expanded(ids, labels, token, runs)
        return EncodedSample(
            id=conversation.id,
            input_ids=ids,
            labels=labels,
            image_token_id=token,
            token_type_ids=(ids == token).astype(np.int64) if self.vision and self.vision.token_types else None,
        )

    @property
    def _has_mrope(self) -> bool:
        one = np.zeros(1, dtype=np.int64)
        return self.vision is not None and self.vision.position_ids(one, -1, NO_IMAGES) is not None

    def _vision(self) -> VisionFamily:
        if self.vision is None:
            raise ConfigError(_NO_VISION)
        return self.vision
