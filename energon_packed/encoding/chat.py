"""ChatEncoder: Conversations -> EncodedSamples, or Measurements (lengths and media sizes) for the planner.

It uses the tokenizer's own chat template and, for images, a vision family. Measuring and encoding share a single path
to the token ids, `_tokenize`, so a measured length is always the encoded length:

    Renderer ─► TextTokenizer ─► TokenBatch, ONE image token per image ─► TokenRules ─┬─► lengths        (measure)
                                                                                      ├─► labels         (keep_tokens)
                                                                                      └─► and pixels     (encode)
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.audio.families import AudioFamily
from energon_packed.encoding.audio.media import measure_audio, read_features
from energon_packed.encoding.audio.settings import audio_problem, load_audio
from energon_packed.encoding.pretrained import TokenizerParts, find_pretrained, is_same_folder, load_tokenizer
from energon_packed.encoding.processor import Measurement, Processor, TokenBatch, TokenRules
from energon_packed.encoding.rendering import LOSS_ON, Rendered, Renderer
from energon_packed.encoding.sample import (
    IGNORE_INDEX,
    EncodedRow,
    EncodedSample,
    column_checksums,
    targets_per_sample,
    weight_checksums,
)
from energon_packed.encoding.settings import IMAGES, EncoderSettings
from energon_packed.encoding.special_text import SpecialText, control_tokens_of
from energon_packed.encoding.template import ChatTemplate
from energon_packed.encoding.tokenizer import TextTokenizer, Weights
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.encoding.vision.media import (
    AUDIO_IGNORED,
    measure_media,
    patch_positions,
    read_pixels,
    trained_grids,
    with_frames_as_images,
)
from energon_packed.encoding.vision.positions import (
    AudioSize,
    MediaSize,
    MediaTokens,
    ModelNeeds,
    Pixels,
    expanded,
)
from energon_packed.encoding.vision.processor_videos import ProcessorVision
from energon_packed.encoding.vision.settings import load_vision
from energon_packed.encoding.vision.timestamps import has_timestamps
from energon_packed.errors import ConfigError, Reason, RecordError, Reject
from energon_packed.keywords import EncoderKeywords
from energon_packed.options import declared, make, plain_values
from energon_packed.records import Conversation
from energon_packed.records.columns import FILL, Columns
from energon_packed.records.media.kinds import MEDIA_KINDS
from energon_packed.records.normalize import FPS_STORED, TIMESTAMPS_ADDED, TIMESTAMPS_WRITTEN
from energon_packed.seqlens import position_ids_from_cu_seqlens
from energon_packed.system import announced

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
_M = TypeVar("_M", MediaSize, Pixels)
_BATCH = 256  # conversations tokenized and checked together
_NO_MEDIA = MediaSize()
# Part of the fingerprint; increase it when the same input produces different tokens.
_VERSION = 1
_DIGITS = 12  # characters shown of a fingerprint
_OF_TEXT = ("loss_on", "allow_special_in_text")
"""Settings that change the tokens of an encoder that was made in Python."""


class ChatEncoder(Processor):
    """Tokenize conversations with a chat template; load one with `ChatEncoder.from_pretrained(folder)`.

        encoder = ChatEncoder.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", max_pixels=1024 * 1024)
        sample = encoder.encode(normalize({"messages": [...], "images": [...]}))
        sample.input_ids, sample.labels, sample.pixel_values

    `text` records are tokenized as documents: the tokenizer's own special tokens around them, its end-of-text token
    at the end, every token supervised. `input_ids` records are returned with their ids unchanged.

    Args:
        tokenizer: a fast Transformers tokenizer.
        vision: image processing of the model family; None for text only.
        settings: the settings of text; media are already decided by `vision` and `audio`.
        audio: audio processing of the model family; None without audio.

    Attributes:
        tokenizer: the Transformers tokenizer.
        vision: image processing of the model family; None for text only.
        audio: audio processing of the model family; None without audio.
        settings: the settings of the encoder; with a `tokenizer`, the encoder was loaded by them.

    Raises:
        ConfigError: a slow tokenizer, a tokenizer without the family's image token, or an
            engine that cannot be used.

    Examples:
        >>> encoder = ChatEncoder.from_pretrained("demo-out/source/tokenizer")
        >>> record = {"prompts": ["2 + 2?"], "captions": ["4"]}
        >>> sample = encoder.encode(normalize(record))
        >>> len(sample), sample.num_supervised
        (16, 2)
    """

    reads = "conversations"

    @announced("analyzing the chat template")
    def __init__(
        self,
        tokenizer: Any,
        vision: VisionFamily | None = None,
        settings: EncoderSettings | None = None,
        audio: AudioFamily | None = None,
    ) -> None:
        self.settings = settings = settings or EncoderSettings()
        self.tokenizer = tokenizer
        self.parts = TokenizerParts.of(tokenizer)
        self.vision, self.audio = vision, audio
        control = [] if settings.allow_special_in_text else control_tokens_of(self.parts, vision, audio)
        self.text_tokenizer = TextTokenizer(self.parts.backend, settings.tokenizer_engine, control=control)
        tokens, placeholders = _texts_of_media(vision, audio)
        self.renderer = Renderer(
            ChatTemplate(self.parts, tokens=tokens),
            placeholders=placeholders,
            boxes=vision.boxes if vision else None,
            gap=vision.gap if vision else "",
            end=self.parts.end_of_document,
            loss_on=settings.loss_on,
            special=SpecialText(control, self.parts.chat_template) if control else None,
        )
        if vision is not None:
            vision.check_tokenizer(self.parts.backend)
            if other := self.renderer.template.other_image_text:
                needed = f"{vision.name} needs {vision.template_token!r}"
                warning = (
                    f"the chat template writes {other!r} for a content part of type image, but {needed}. "
                    "Use the chat template of the vision model."
                )
                vision.warnings = (*[line for line in vision.warnings if line != warning], warning)
        if audio is not None:
            audio.check_tokenizer(self.parts.backend)
        self.image_token_id = self.rules.image_token_id

    @classmethod
    def from_pretrained(
        cls, tokenizer: str | Path, processor: str | Path | None = None, **settings: Unpack[EncoderKeywords]
    ) -> Self:
        """Load a tokenizer folder and, for images, a processor folder or a named image processor.

        Args:
            tokenizer, processor, settings: the fields of `EncoderSettings`, such as `max_pixels` and `loss_on`. An
                image processor in the folder of the tokenizer is used, too.

        Raises:
            ConfigError: an unknown setting, an invalid value, a folder without a tokenizer, or contradictory settings.
        """
        values = {"tokenizer": tokenizer, "processor": processor, **settings}
        return cls.of(make(EncoderSettings, values, what="encoder setting"))

    @classmethod
    def of(cls, settings: EncoderSettings) -> Self:
        """Load the tokenizer and the image processor that settings name.

        Raises:
            ConfigError: as `from_pretrained`, or `tokenizer` is None.
        """
        if settings.tokenizer is None:
            raise ConfigError("`tokenizer` must be a folder, or the name of a model, got None. Pass `tokenizer`.")
        # The tokenizer is loaded before the vision family: a wrong folder is reported as a missing tokenizer.
        tokenizer = load_tokenizer(settings.tokenizer)
        vision = load_vision(settings)
        return cls(tokenizer, vision, settings, load_audio(settings))

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Return tokens, labels, pixels and positions of a conversation.

        Raises:
            RecordError: the conversation cannot be used; `reason` and `detail` say why.
            TemplateError: the text of the assistant cannot be located in the output of the chat template.
            ConfigError: images without a vision family, or messages without a chat template.
        """
        result = self.encode_many([conversation])[0]
        if isinstance(result, Reject):
            raise RecordError.of(result)
        return result

    def encode_many(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """Encode several conversations in one batch; return a Reject for each conversation that cannot be used."""
        if not any([c.images or c.videos or c.audios for c in conversations]):
            # Text only: the samples are views of the batch, without copies.
            batch, rejects = self._tokenize(conversations, [_NO_MEDIA] * len(conversations))
            row: Sequence[EncodedSample] = self._as_row([conversation.id for conversation in conversations], batch)
            if batch.columns:
                row = [replace(sample, columns=batch.columns.get(index)) for index, sample in enumerate(row)]
            return [rejects.get(index, sample) for index, sample in enumerate(row)]
        results: dict[int, EncodedSample | Reject] = {}
        media: dict[int, Pixels] = {}
        for index, conversation in enumerate(conversations):
            try:
                media[index] = self._media(conversation, read_pixels, read_features, Pixels())
            except RecordError as error:
                results[index] = error.reject
        batch, rejects = self._tokenize([conversations[index] for index in media], [*media.values()])
        for slot, (index, pixels) in enumerate(media.items()):  # slot: index in the batch, which has no rejects
            if slot in rejects:
                results[index] = rejects[slot]
                continue
            try:
                results[index] = self._with_pixels(conversations[index], pixels, batch, slot)
            except RecordError as error:
                results[index] = error.reject
        return [results[index] for index in range(len(results))]

    def _with_pixels(self, conversation: Conversation, pixels: Pixels, batch: TokenBatch, slot: int) -> EncodedSample:
        sample, audio = self._expanded(conversation, pixels, batch, slot), pixels.audio
        if audio.inputs is not None or self.vision is None:
            sample = replace(sample, audio_inputs=audio.inputs, dummy=self.dummy)
        if self.vision is None or self.image_token_id is None:
            return sample
        media = MediaTokens(
            self.image_token_id, pixels.grids, audio_frames=audio.frames, has_tracks=bool(audio.tracks)
        )
        if pixels.video_grids is not None:
            media = replace(
                media,
                video_token_id=self.rules.video_token_id,
                video_grids=pixels.video_grids.numpy(),
                second_per_grid_ts=pixels.second_per_grid_ts,
            )
        positions = self.vision.position_ids(sample.input_ids, media)
        sample = replace(sample, position_ids=positions, dummy=self.dummy)
        if pixels.video_values is not None:
            sample = replace(
                sample,
                pixel_values_videos=pixels.video_values,
                video_grid_thw=pixels.video_grids,
                second_per_grid_ts=pixels.second_per_grid_ts,
            )
        if pixels.values is None:
            return replace(sample, vision_inputs=pixels.inputs)
        places = patch_positions(self.vision, conversation, pixels)
        grids = trained_grids(self.vision, conversation, pixels.grids_tensor)
        return replace(sample, pixel_values=pixels.values, image_grid_thw=grids, patch_positions=places)

    def measure(self, conversations: Sequence[Conversation], *, keep_tokens: bool = False) -> list[Measurement]:
        """Return length and media size of each conversation, without decoding pixels, in batches.

        Raises:
            TemplateError, ConfigError: as `encode`.
        """
        results: list[Measurement | None] = [None] * len(conversations)
        media: dict[int, MediaSize] = {}
        for index, conversation in enumerate(conversations):
            try:
                media[index] = self._media(conversation, measure_media, measure_audio, _NO_MEDIA)
            except RecordError as error:
                results[index] = Measurement.rejected(error.reject)
        usable = list(media)
        for start in range(0, len(usable), _BATCH):
            indices = usable[start : start + _BATCH]
            chosen, sizes = [conversations[index] for index in indices], [media[index] for index in indices]
            batch, rejects = self._tokenize(chosen, sizes)
            lengths = np.diff(batch.cu_seqlens).tolist()
            # Image tokens are never targets, so the expanded sample has the same counts.
            targets = targets_per_sample(batch.labels, batch.cu_seqlens).tolist()
            checksums = weight_checksums(batch.labels, batch.loss_weights, batch.cu_seqlens).tolist()
            weighted = [checksum != 0 for checksum in checksums]
            for slot, columns in batch.columns.items():
                labels = batch.sample(slot)[1]
                checksums[slot] += int(column_checksums(labels, columns, np.array([0, len(labels)]))[0])
                checksums[slot] %= 2**63
            for slot, (index, size) in enumerate(zip(indices, sizes, strict=True)):
                if slot in rejects:
                    results[index] = Measurement.rejected(rejects[slot])
                    continue
                conversation, length, audio = chosen[slot], lengths[slot], size.audio
                if conversation.input_ids is None:  # stored tokens contain the full run of each image already
                    length += sum([run.length - 1 for run in (*size.runs, *audio.runs)])
                results[index] = Measurement(
                    length,
                    size.num_bytes + audio.num_bytes,
                    sample=self._expanded(conversation, size, batch, slot) if keep_tokens else None,
                    supervised=targets[slot],
                    decoded=size.decoded,
                    frames=size.frames,
                    clips=audio.clips,
                    track_clips=audio.track_clips,
                    weighted=weighted[slot],
                    weight_checksum=checksums[slot],
                    notes=(*size.notes, *audio.notes),
                )
        return [result for result in results if result is not None]

    def _as_row(self, ids: Sequence[str | None], batch: TokenBatch) -> EncodedRow:
        row = super()._as_row(ids, batch)
        if axes := self.position_axes:
            # M-RoPE positions of text are equal in all axes: 0, 1, 2 .. in each sample.
            positions = position_ids_from_cu_seqlens(batch.cu_seqlens)
            row.position_ids = np.broadcast_to(positions, (axes, len(row.input_ids)))
        if self.needs is not None:
            row.needs = self.needs
            row.token_type_ids = None if row.needs.types is None else np.zeros_like(row.input_ids)
        return row

    @cached_property
    def rules(self) -> TokenRules:
        """Conditions that the tokens of a sample must meet, from the tokenizer and the families of media."""
        return TokenRules.of(self.parts, self.vision, self.audio)

    @cached_property
    def dummy(self) -> EncodedSample | None:
        """A minimal sample of one image, or of an audio file without a vision family, for rows without media.

        It has no target. Its own `dummy` is an audio file, if the model has both encoders. None without a family, and
        for a vision family whose patch size is ambiguous.
        """
        if self.vision is None and self.audio is not None:
            return self._dummy_audio(self.audio)
        vision, token = self.vision, self.image_token_id
        if vision is None or token is None or vision.ambiguous_layouts:
            return None
        pixels = vision.smallest()
        placeholder = self.text_tokenizer.encode([vision.placeholder], [None], special=False).input_ids
        ids, _ = expanded(placeholder, placeholder, [token], pixels.runs)
        return EncodedSample(
            id="dummy image",
            input_ids=ids,
            labels=np.full(len(ids), IGNORE_INDEX, dtype=np.int64),
            image_token_id=token,
            pixel_values=pixels.values,
            image_grid_thw=pixels.grids_tensor,
            patch_positions=None if pixels.values is None else vision.patch_positions(pixels.grids),
            vision_inputs=pixels.inputs,
            token_type_ids=np.zeros_like(ids) if vision.needs and vision.needs.types else None,  # no attention
            needs=self.needs,
            dummy=self._dummy_audio(self.audio) if self.audio and self.audio.mixes else None,
        )

    def _dummy_audio(self, audio: AudioFamily) -> EncodedSample:
        inputs, runs = audio.preprocess([np.zeros(audio.rate // 4, dtype=np.float32)])
        placeholder = self.text_tokenizer.encode([audio.placeholder], [None], special=False).input_ids
        token = self.rules.audio_token_id
        ids, _ = expanded(placeholder, placeholder, [token], runs)
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        return EncodedSample(
            id="dummy audio",
            input_ids=ids,
            labels=labels,
            audio_token_id=token,
            audio_inputs=inputs,
            needs=audio.needs,
        )

    def noted(self, conversation: Conversation) -> Conversation:
        """Return the conversation with notes about `fps` that are true for the vision family."""
        if self.vision is None or not self.vision.writes_timestamps or not has_timestamps(conversation):
            return conversation
        others = [note for note in conversation.notes if note not in (FPS_STORED, TIMESTAMPS_ADDED)]
        return replace(conversation, notes=(*others, TIMESTAMPS_WRITTEN))

    def fingerprint(self) -> str:
        """Hex digest of the tokenizer, its template, the settings of images and videos, and of text."""
        return next(self._own_digests())

    def has_fingerprint(self, recorded: str) -> bool:
        """Whether this encoder reads data with the fingerprint `recorded`; also data packed with only a `factor`."""
        return recorded in self._own_digests()

    def image_settings(self) -> dict[str, str]:
        """Settings of images and audio by name, as JSON; {} without such a family."""
        config = {} if self.vision is None else self.vision.config()
        processor = config.pop("image_processor", {})
        audio = {} if self.audio is None else {f"audio {name}": value for name, value in self.audio.config().items()}
        return {name: json.dumps(value, default=str) for name, value in {**config, **processor, **audio}.items()}

    def differences(
        self, packed: Mapping[str, Any], *, template: str, fingerprint: str, images: Mapping[str, str]
    ) -> list[str]:
        """Describe how this encoder differs from the encoder of a dataset, whose fingerprint it does not have.

        Args:
            packed: `encoder` of packing.json: settings that differ from their default.
            template: `template_fingerprint` of packing.json.
            fingerprint: `tokenizer_fingerprint` of packing.json.
            images: `image_settings` of packing.json; {} without a vision family.
        """
        known = dict(plain_values(self.settings))
        if "processor_class" in packed:  # an encoder that was made in Python: only its fingerprint is recorded
            tried = product(LOSS_ON, (False, True))
            values = next((values for values in tried if fingerprint in self._digests(*values)), ())
            packed = dict(zip(_OF_TEXT, values, strict=False))
            known = {name: known[name] for name in packed}
        elif self.settings.tokenizer is None:  # this encoder was made in Python
            known = {name: known[name] for name in _OF_TEXT}
        named: list[str] = []
        folders: list[str] = []
        has_image_option = False
        for setting in declared(EncoderSettings):
            if not setting.decides or setting.name not in known:
                continue
            before, now = packed.get(setting.name, setting.default), known[setting.name]
            is_folder = setting.kind is Path
            if is_folder:  # packing.json has the folder of a model name, and may have a relative path
                before, now = (value and _folder(value) for value in (before, now))
            if before != now and not (is_folder and before and now and is_same_folder(Path(before), Path(now))):
                has_image_option |= setting.group == IMAGES and not is_folder
                was, is_now = ("not set" if value is None else repr(value) for value in (before, now))
                (folders if is_folder else named).append(f"`{setting.name}` was {was}, now {is_now}")
        if template and template != self.renderer.template.fingerprint:
            was, is_now = template[:_DIGITS], self.renderer.template.fingerprint[:_DIGITS] or "none"
            named.append(f"the chat template differs (`template_fingerprint` was {was}, now {is_now})")
        own = self.image_settings()
        if images and not has_image_option:
            named += [
                f"`{name}` of the media was {images.get(name, 'not set')}, now {own.get(name, 'not set')}"
                for name in dict.fromkeys([*images, *own])
                if images.get(name) != own.get(name)
            ]
        text_settings = packed.get("loss_on", self.settings.loss_on), packed.get("allow_special_in_text", False)
        if named and fingerprint in self._digests(*text_settings):
            return named  # the tokenizer and the image settings are equal, maybe in another folder
        if not named:
            parts = ["the tokenizer"]
            parts += [] if template else ["its chat template"]
            parts += [] if images else ["the image settings of its folder"]
            verb = "differs" if len(parts) == 1 else "differ"
            named.append(f"{' or '.join(parts)} (`tokenizer_fingerprint`) {verb}")
        return [*named, *folders]

    def _own_digests(self) -> Iterator[str]:
        return self._digests(self.settings.loss_on, self.settings.allow_special_in_text)

    def _digests(self, loss_on: str, allow_special_in_text: bool) -> Iterator[str]:
        """Yield the hex digests of the data that this encoder reads with these settings of text.

        The first is its own digest. The second is of data that was packed with only a `factor` (`length_config`). Each
        needs milliseconds, as the text of the whole tokenizer is in it, so the second is computed if it is needed.
        """
        vision = self.vision
        images = [None] if vision is None else [vision.config(), vision.length_config()]
        parts = {
            "version": _VERSION,
            "tokenizer": self.text_tokenizer.serialized,
            "special": self.parts.special_tokens,
            "template": self.parts.chat_template,
            "loss_on": loss_on,
            "allow_special_in_text": allow_special_in_text,
            "videos": None if vision is None else vision.video_config(),
        }
        if self.audio is not None:
            parts["audio"] = self.audio.config()
        for config in images:
            text = json.dumps(parts | {"images": config}, sort_keys=True, default=str)
            yield hashlib.sha256(text.encode()).hexdigest()

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _tokenize(
        self, conversations: Sequence[Conversation], media: Sequence[MediaSize]
    ) -> tuple[TokenBatch, dict[int, Reject]]:
        """Tokenize S conversations, with one token per image, video and audio; `input_ids` records keep their ids.

        This is the only way from a conversation to token ids.

        Returns:
            The tokens, and a Reject by the index of each unusable conversation.
        """
        rejects: dict[int, Reject] = {}
        rendered: dict[int, Rendered] = {}
        if self.vision is not None:
            conversations = [size.spelled or c for c, size in zip(conversations, media, strict=True)]
            if self.vision.video_token is None:
                conversations = [
                    with_frames_as_images(conversation, self.vision, size.frames)
                    if conversation.videos
                    else conversation
                    for conversation, size in zip(conversations, media, strict=True)
                ]
        for index, conversation in enumerate(conversations):
            if conversation.members:
                detail = "it is a group of samples; encode its `members`"
                rejects[index] = Reject(Reason.UNSUPPORTED_FIELD, detail)
            elif conversation.input_ids is None:
                try:
                    size = media[index]
                    rendered[index] = self.renderer.render(conversation, size.runs, size.audio.runs)
                except RecordError as error:
                    rejects[index] = error.reject
        pieces: list[tuple[Int64, Int64, Float32 | None] | None] = [None] * len(conversations)
        columns: dict[int, Columns] = {}
        # Documents and messages are two calls, because only documents get the tokenizer's own special tokens.
        for is_document in (False, True):
            chosen = {index: text for index, text in rendered.items() if text.is_document == is_document}
            if not chosen:
                continue
            texts, spans = [one.text for one in chosen.values()], [one.spans for one in chosen.values()]
            # With values, tokens get the number of their span first, from 1; weights and columns follow from it.
            weights: list[Weights] = [
                one.weights if one.values is None else range(1, len(one.values) + 1) for one in chosen.values()
            ]
            tokens = self.text_tokenizer.encode(
                texts, spans, special=is_document, weights=weights if any(weights) else None
            )
            rejects |= {index: tokens.rejects[i] for i, index in enumerate(chosen) if i in tokens.rejects}
            labels = np.where(tokens.covered, tokens.input_ids, IGNORE_INDEX)
            batch = TokenBatch(tokens.input_ids, labels, tokens.cu_seqlens, tokens.weights)
            own = _values_of_spans(batch, list(chosen.values()))
            columns |= {index: own[slot] for slot, index in enumerate(chosen) if slot in own}
            if len(chosen) == len(conversations):  # the usual case: nothing to reorder or copy
                batch, unusable = self._checked(conversations, media, batch)
                return _with_columns(batch, columns, conversations), unusable | rejects
            for slot, index in enumerate(chosen):
                pieces[index] = batch.sample(slot)
        for index, conversation in enumerate(conversations):
            if conversation.input_ids is not None:
                ids = conversation.input_ids
                labels = ids if conversation.labels is None else conversation.labels
                pieces[index] = (ids, labels, conversation.loss_weights)
                if conversation.columns:
                    columns[index] = conversation.columns
        batch, unusable = self._checked(conversations, media, TokenBatch.joined(pieces))
        return _with_columns(batch, columns, conversations), unusable | rejects

    def _checked(
        self, conversations: Sequence[Conversation], media: Sequence[MediaSize], batch: TokenBatch
    ) -> tuple[TokenBatch, dict[int, Reject]]:
        """`TokenRules.check` of a batch, with a clearer reason for conversations without an assistant turn."""
        in_vocabulary = all([conversation.input_ids is None for conversation in conversations])
        needed: dict[str, list[int]] = {}
        if any([size is not _NO_MEDIA for size in media]):
            pairs = list(zip(conversations, media, strict=True))
            needed = {kind: [self._needed(kind, *pair) for pair in pairs] for kind in self.rules.media}
        batch = batch.scaled([conversation.weight for conversation in conversations])
        batch, rejects = self.rules.check(batch, needed, in_vocabulary=in_vocabulary)
        for index, conversation in enumerate(conversations):
            if (
                conversation.videos
                and self.vision is not None
                and (problem := self.vision.media_problem(conversation))
            ):
                rejects.setdefault(index, Reject(Reason.UNSUPPORTED_MEDIA, problem))
        for index in self._joined_images(conversations, batch):
            detail = "two images without a token between them, which its model cannot separate; add text between them"
            rejects.setdefault(index, Reject(Reason.UNSUPPORTED_MEDIA, detail))
        for index, reject in list(rejects.items()):
            if reject.reason is not Reason.NO_SUPERVISED_TOKENS:
                continue
            conversation = conversations[index]
            roles = [message.role for message in conversation.messages]
            if not conversation.needs_targets:
                del rejects[index]
            elif roles and "assistant" not in roles:
                rejects[index] = Reject(reject.reason, f"no assistant turn among {', '.join(roles)}")
        return batch, rejects

    def _joined_images(self, conversations: Sequence[Conversation], batch: TokenBatch) -> list[int]:
        """Conversations with two images or videos side by side, if positions of the model need a token between."""
        if self.vision is None or self.vision.adjacent_images:
            return []
        if not any([len(c.images) > 1 or len(c.videos) > 1 for c in conversations]):
            return []
        ids, tokens = batch.input_ids, [self.image_token_id, self.rules.video_token_id]
        is_media = np.isin(ids, [token for token in tokens if token is not None])
        is_pair = np.flatnonzero(is_media[1:] & (ids[1:] == ids[:-1])) + 1
        found = np.unique(np.searchsorted(batch.cu_seqlens, is_pair[~np.isin(is_pair, batch.cu_seqlens)], "right") - 1)
        return [index for index in found.tolist() if conversations[index].input_ids is None]

    def _needed(self, kind: str, conversation: Conversation, size: MediaSize) -> int:
        """Number of tokens of a kind of media that a conversation must have."""
        if conversation.input_ids is None:  # rendered text has a single token per file so far
            return len(getattr(conversation, MEDIA_KINDS[kind].field))
        token, _ = self.rules.media[kind]  # stored tokens have the full runs
        if kind == "audio":
            return sum([run.features(token) for run in size.audio.runs]) + sum(size.audio.tracks.values())
        # In some families, image tokens are in the runs of videos.
        is_video = kind == "video"
        return sum([run.features(token) for run in size.runs if run.is_video == is_video or run.make is not None])

    def _expanded(self, conversation: Conversation, media: MediaSize, batch: TokenBatch, slot: int) -> EncodedSample:
        """Sample `slot` of a batch, with all tokens of its images, videos and audio files."""
        ids, labels, weights = batch.sample(slot)
        columns = batch.columns.get(slot)
        token, audio_token = self.image_token_id, self.rules.audio_token_id
        # Audio first: the tokens of a video may contain tokens of its audio track.
        of_kinds = (((audio_token,), media.audio.runs), ((token, self.rules.video_token_id), media.runs))
        for tokens, found in of_kinds if conversation.input_ids is None else ():
            if not found:
                continue
            if weights is not None or columns is not None:
                repeated = expanded(ids, np.arange(len(ids)), tokens, found)[1]
                weights = None if weights is None else weights[repeated]
                columns = None if columns is None else {name: column[repeated] for name, column in columns.items()}
            ids, labels = expanded(ids, labels, tokens, found)
        return EncodedSample(
            id=conversation.id,
            input_ids=ids,
            labels=labels,
            loss_weights=weights,
            columns=columns,
            image_token_id=token,
            video_token_id=self.rules.video_token_id,
            audio_token_id=audio_token,
            token_type_ids=self._types(ids),
            needs=self.needs,
        )

    @cached_property
    def needs(self) -> ModelNeeds | None:
        """Needs of the model for a row with images or audio."""
        of_images = None if self.vision is None else self.vision.needs
        of_audio = None if self.audio is None else self.audio.needs
        if of_audio is None or of_images is None:
            return of_images or of_audio
        return replace(of_images, one_audio=of_audio.one_audio)

    def _types(self, ids: Int64) -> Int64 | None:
        """Types of tokens, int64 (L,), for a model with an argument for them; else None."""
        types = None if self.vision is None else self.vision.token_type_ids(ids)
        if types is not None and self.audio is not None:
            types[ids == self.rules.audio_token_id] = self.audio.token_type
        return types

    @cached_property
    def position_axes(self) -> int:
        """Number of axes of M-RoPE positions, tried with a sample of one token; 0 if positions are 0..L-1."""
        positions = None
        if self.vision is not None:
            positions = self.vision.position_ids(np.zeros(1, dtype=np.int64), MediaTokens(-1))
        return 0 if positions is None else len(positions)

    def _vision(self, conversation: Conversation) -> VisionFamily:
        if self.vision is None:
            if (named := self.settings.vision_family) is not None:
                cause, remedy = f"`vision_family` is {named}", "Remove it"
            else:
                folder = self.settings.tokenizer or "the folder of the tokenizer"
                cause = f"{folder} has no image settings (preprocessor_config.json)"
                remedy = "Set `processor` to the processor folder of the model, or `image_processor`"
            record = "a record" if conversation.id is None else f"record {conversation.id}"
            raise ConfigError(f"{record} has images or videos, but {cause}. {remedy}.")
        return self.vision

    def _media(
        self,
        conversation: Conversation,
        see: Callable[[VisionFamily, Conversation], _M],
        hear: Callable[[AudioFamily, Conversation], AudioSize],
        none: _M,
    ) -> _M:
        """Measure or read images and videos by `see` and audio by `hear`; `none` is the result without media."""
        media = see(self._vision(conversation), conversation) if conversation.images or conversation.videos else none
        has_tracks = self.audio is not None and self.audio.uses_tracks and conversation.videos
        if not (conversation.audios or has_tracks):
            return media
        audio = hear(self._audio(conversation), conversation)
        return self._with_tracks(replace(media, audio=audio), audio) if audio.tracks else replace(media, audio=audio)

    def _with_tracks(self, media: _M, audio: AudioSize) -> _M:
        """Put the tokens of audio tracks among the tokens of their videos."""
        vision, runs = self.vision, list(media.runs)
        assert isinstance(vision, ProcessorVision), "only such a family has videos and an audio family with tracks"
        videos = [at for at, run in enumerate(runs) if run.is_video]
        for video, tokens in audio.tracks.items():
            runs[videos[video]] = vision.heard_run(media.frames[video], tokens)
        notes = tuple([note for note in media.notes if note != AUDIO_IGNORED])
        return replace(media, runs=runs, notes=notes)

    def _audio(self, conversation: Conversation) -> AudioFamily:
        if self.audio is None:
            folder = self.settings.processor or self.settings.tokenizer or "the folder of the tokenizer"
            record = "a record" if conversation.id is None else f"record {conversation.id}"
            cause = audio_problem(self.settings) or f"{folder} has no audio processor that is supported"
            raise ConfigError(
                f"{record} has audio, but {cause}. Set `processor` to the processor folder of an audio model, or "
                "remove the audio."
            )
        has_positions = not self.position_axes or (self.vision is not None and self.vision.places_audio)
        problem = self.audio.problem or ("" if has_positions else "M-RoPE positions with audio")
        if problem:
            raise ConfigError(f"audio of {self.audio.name} is not supported: {problem}. Remove the audio.")
        return self.audio


def _texts_of_media(vision: VisionFamily | None, audio: AudioFamily | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return (text that a template writes for a content part, text of a file that is not a part), by kind."""
    tokens, placeholders = dict[str, str](), dict[str, str]()
    if vision is not None:
        tokens["image"], placeholders["image"] = vision.template_token, vision.placeholder
        if vision.video_token is not None:
            placeholders["video"] = vision.video_placeholder
            if vision.takes_clips:
                tokens["video"] = vision.video_token
    if audio is not None:
        tokens["audio"], placeholders["audio"] = audio.token, audio.placeholder
    return tokens, placeholders


def _values_of_spans(batch: TokenBatch, rendered: Sequence[Rendered]) -> dict[int, Columns]:
    """Replace the numbers of spans in the loss weights of a batch by weights; return the columns that spans have.

    Args:
        batch: S samples; `loss_weights` is changed in place.
        rendered: their texts.

    Returns:
        float32 (L,) columns of each sample with values, by its index; `FILL` outside spans with a value.
    """
    found: dict[int, Columns] = {}
    for slot, text in enumerate(rendered):
        weights = batch.sample(slot)[2]
        if text.values is None or weights is None:
            continue
        spans = weights.astype(np.int64)  # 0 outside
        weights[:] = np.array([0, *(text.weights or [1.0] * len(text.values))], dtype=np.float32)[spans]
        found[slot] = {
            name: np.array([FILL, *[of_span.get(name, FILL) for of_span in text.values]], dtype=np.float32)[spans]
            for name in sorted({name for of_span in text.values for name in of_span})
        }
    return found


def _with_columns(
    batch: TokenBatch, columns: Mapping[int, Columns], conversations: Sequence[Conversation]
) -> TokenBatch:
    """Return the batch with the columns of samples, by index; values of turns are `FILL` at tokens without target."""
    if not columns:
        return batch
    own: dict[int, Columns] = {}
    for index, of_sample in columns.items():
        if conversations[index].input_ids is None:
            is_target = batch.sample(index)[1] != IGNORE_INDEX
            of_sample = {name: np.where(is_target, column, np.float32(FILL)) for name, column in of_sample.items()}
        own[index] = of_sample
    return replace(batch, columns=own)


def _folder(name: str) -> str:
    """Absolute path of a folder, or of the folder of a model name."""
    try:
        return str(find_pretrained(name).absolute())
    except ConfigError:  # packing.json may name a folder of another machine
        return name
