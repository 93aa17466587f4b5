"""Base class of encoders, and the checks of their tokens.

    Processor    Conversation -> EncodedSample (`encode`) or Measurement (`measure`); subclasses implement `encode`
    TokenRules   TokenBatch (tokens of S samples end to end) -> the batch, and a Reject for each unusable sample
    StoredTokens the Processor of conversations that are stored as token ids

Only TokenRules decides whether a sample is empty, supervised, in the vocabulary, and has the image tokens that its
images need. Measuring, encoding and stored tokens all use it, so they reject the same samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.audio.families import AudioFamily
from energon_packed.encoding.pretrained import TokenizerParts
from energon_packed.encoding.sample import (
    IGNORE_INDEX,
    EncodedRow,
    EncodedSample,
    join_values,
    joined_columns,
    targets_per_sample,
)
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.errors import ConfigError, Reason, RecordError, Reject
from energon_packed.records import AudioClip, Conversation, FrameSelection
from energon_packed.records.columns import Columns, check_columns
from energon_packed.records.media.kinds import MEDIA_KINDS

Int64 = npt.NDArray[np.int64]
Reads = Literal["conversations", "any", "raw"]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of S samples.

    Attributes:
        input_ids: int64 (T,).
        labels: int64 (T,), -100 if not supervised.
        cu_seqlens: int64 (S+1,), boundaries of the samples.
        loss_weights: float32 (T,), loss weight of each token; None if all weights are 1.
        columns: columns of the samples that have any, (L,) or (L, k) each, by the index of the sample.
    """

    input_ids: Int64
    labels: Int64
    cu_seqlens: Int64
    loss_weights: Float32 | None = None
    columns: Mapping[int, Columns] = field(default_factory=dict)

    @classmethod
    def joined(cls, pieces: Sequence[tuple[Int64, Int64, Float32 | None] | None]) -> "TokenBatch":
        """Join samples, (input_ids, labels, loss_weights) each; None, a rejected sample, has no tokens then."""
        empty = np.zeros(0, dtype=np.int64)
        filled = [(empty, empty, None) if piece is None else piece for piece in pieces]
        # `empty` leads so that a batch without samples can be concatenated.
        ids = np.concatenate([empty, *[ids for ids, _, _ in filled]])
        labels = np.concatenate([empty, *[labels for _, labels, _ in filled]])
        weights = join_values([(own, len(ids)) for ids, _, own in filled], np.float32(1))
        return cls(ids, labels, np.cumsum([0, *[len(ids) for ids, _, _ in filled]]), weights)

    def sample(self, index: int) -> tuple[Int64, Int64, Float32 | None]:
        """(input_ids, labels, loss_weights) of sample `index`, (L,) each."""
        tokens = slice(int(self.cu_seqlens[index]), int(self.cu_seqlens[index + 1]))
        weights = None if self.loss_weights is None else self.loss_weights[tokens]
        return self.input_ids[tokens], self.labels[tokens], weights

    def scaled(self, weights: Sequence[float]) -> "TokenBatch":
        """Multiply the loss weights of each sample by a number, S numbers."""
        if all([weight == 1 for weight in weights]):
            return self
        scales = np.repeat(np.asarray(weights, dtype=np.float64), np.diff(self.cu_seqlens))
        scaled = scales if self.loss_weights is None else scales * self.loss_weights
        return replace(self, loss_weights=scaled.astype(np.float32))


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Conditions that the tokens of a sample must meet.

    Attributes:
        vocabulary: number of token ids; None does not check ids.
        media: token that represents a file, and its string for messages, by the name of its kind; only of kinds that
            the families have.
        reserved: tokens that text must not contain.
        reserved_strings: their strings, for messages.
    """

    vocabulary: int | None = None
    media: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    reserved: tuple[int, ...] = ()
    reserved_strings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, tokenizer: TokenizerParts, vision: VisionFamily | None, audio: AudioFamily | None = None
    ) -> "TokenRules":
        """Rules of a tokenizer, a vision family and an audio family."""
        to_id, reserved_strings = tokenizer.backend.token_to_id, vision.reserved if vision else ()
        strings: dict[str, str | None] = {}
        if vision is not None:
            strings = {"image": vision.image_token, "video": vision.video_token}
        if audio is not None:
            strings["audio"] = audio.token
        media = {
            kind: (ident, token) for kind, token in strings.items() if token and (ident := to_id(token)) is not None
        }
        reserved = {to_id(token) for token in reserved_strings} - {None, *(ident for ident, _ in media.values())}
        return cls(tokenizer.vocabulary, media, tuple(sorted(reserved)), reserved_strings)

    @property
    def image_token_id(self) -> int | None:
        """Token that represents an image; None for text models."""
        return self._token("image")

    @property
    def video_token_id(self) -> int | None:
        """Token that represents a video; None for families without it."""
        return self._token("video")

    @property
    def audio_token_id(self) -> int | None:
        """Token that represents an audio file; None for families without it."""
        return self._token("audio")

    def _token(self, kind: str) -> int | None:
        return self.media[kind][0] if kind in self.media else None

    def check(
        self,
        batch: TokenBatch,
        needed: Mapping[str, Sequence[int]],
        *,
        in_vocabulary: bool = False,
    ) -> tuple[TokenBatch, dict[int, Reject]]:
        """Remove targets at tokens of media and of weight 0, and find the samples that cannot be used.

        Args:
            batch: S samples.
            needed: number of tokens of a kind of media that each sample must have, S integers by the name of the kind;
                none of a kind that is left out.
            in_vocabulary: the ids come from the tokenizer itself, so they are not compared with the vocabulary.

        Returns:
            The batch, and a Reject by the index of each unusable sample.
        """
        # A sample gets its first reject only, in this order: empty, ids, tokens of media, reserved tokens, targets.
        rejects: dict[int, Reject] = {}
        for index in np.flatnonzero(batch.cu_seqlens[1:] == batch.cu_seqlens[:-1]).tolist():
            rejects[index] = Reject(Reason.EMPTY, "its text has no token")
        if self.vocabulary is not None and not in_vocabulary:
            self._check_ids(batch, rejects)
        labels = batch.labels
        for name, (token_id, token) in self.media.items():
            kind, is_media = MEDIA_KINDS[name], batch.input_ids == token_id
            counts = _per_sample(is_media, batch.cu_seqlens)
            expected = np.asarray(needed.get(name) or [0] * len(counts))
            for index in np.flatnonzero(counts != expected).tolist():
                detail = f"{counts[index]} {token} tokens, but the {kind.plural} need {expected[index]}"
                rejects.setdefault(index, Reject(kind.mismatch, detail))
            if counts.any():
                labels = np.where(is_media, IGNORE_INDEX, labels)
        self._check_reserved(batch, rejects)
        weights = batch.loss_weights
        if weights is not None:
            labels = np.where(weights == 0, IGNORE_INDEX, labels)
            if (weights[labels != IGNORE_INDEX] == 1).all():
                weights = None
        for index in np.flatnonzero(targets_per_sample(labels, batch.cu_seqlens) == 0).tolist():
            rejects.setdefault(index, Reject(Reason.NO_SUPERVISED_TOKENS, "no token after the first is a target"))
        return replace(batch, labels=labels, loss_weights=weights), rejects

    def _check_ids(self, batch: TokenBatch, rejects: dict[int, Reject]) -> None:
        assert self.vocabulary is not None
        # Minimum and maximum of the whole batch decide the usual case, in which no sample is rejected.
        lowest = np.where(batch.labels == IGNORE_INDEX, 0, batch.labels).min(initial=0)
        highest = max(batch.input_ids.max(initial=0), batch.labels.max(initial=0))
        if min(lowest, batch.input_ids.min(initial=0)) >= 0 and highest < self.vocabulary:
            return
        for name, values in (("input_ids", batch.input_ids), ("labels", batch.labels)):
            wrong = (values < 0) | (values >= self.vocabulary)
            if name == "labels":
                wrong &= values != IGNORE_INDEX
            for index, at in _first_of_each(wrong, batch.cu_seqlens):
                detail = f"{name} contains {values[at]}, outside the {self.vocabulary} tokens of the tokenizer"
                rejects.setdefault(index, Reject(Reason.MISSING_FIELD, detail))

    def _check_reserved(self, batch: TokenBatch, rejects: dict[int, Reject]) -> None:
        for token in self.reserved:
            for index, _ in _first_of_each(batch.input_ids == token, batch.cu_seqlens):
                detail = f"the text contains one of the tokens {' '.join(self.reserved_strings)}"
                rejects.setdefault(index, Reject(Reason.IMAGE_COUNT_MISMATCH, detail))


def _first_of_each(flags: npt.NDArray[np.bool_], cu_seqlens: Int64) -> list[tuple[int, int]]:
    """(sample index, token index of its first True flag) of each sample with a True flag."""
    tokens = np.flatnonzero(flags)
    samples, first = np.unique(np.searchsorted(cu_seqlens, tokens, side="right") - 1, return_index=True)
    return list(zip(samples.tolist(), tokens[first].tolist(), strict=True))


def _per_sample(flags: npt.NDArray[np.bool_], cu_seqlens: Int64) -> Int64:
    """Number of True flags of each sample, int64 (S,)."""
    sums = np.concatenate([[0], np.cumsum(flags)])
    return np.asarray(sums[cu_seqlens[1:]] - sums[cu_seqlens[:-1]])


@dataclass(frozen=True, slots=True)
class Measurement:
    """Properties of a sample that the planner needs.

    Attributes:
        length: number of tokens that `encode` returns; -1 if the sample is rejected.
        media_bytes: bytes of its images, videos, audio files and .npy files.
        reject: why it cannot be used, or None.
        sample: its tokens and labels if requested; pixels may be missing.
        supervised: targets among the tokens, as `targets_per_sample` counts them; -1 when unknown.
        decoded: images whose pixels were decoded; the others were checked by header and structure.
        frames: the selected frames of each video file.
        clips: the samples of each audio file.
        track_clips: the samples of the audio track of each video file; empty if tracks are not used.
        weighted: its targets have loss weights other than 1.
        weight_checksum: checksum of these weights and of its columns, as `EncodedSample.weight_checksum`.
        notes: what was decided for its media, for the counts of a run.
        extracted_bytes: estimate of `media_bytes` with the selected frames as images in place of the video files;
            0 if they are stored as files.
        members: measurements of the samples of a record that is a group.

    Examples:
        >>> [measured] = encoder.measure([normalize({"text": "A document."})])
        >>> measured.length, measured.reject
        (9, None)
    """

    length: int
    media_bytes: int = 0
    reject: Reject | None = None
    sample: EncodedSample | None = None
    supervised: int = -1
    decoded: int = 0
    frames: Sequence[FrameSelection] = ()
    clips: Sequence[AudioClip] = ()
    track_clips: Sequence[AudioClip] = ()
    weighted: bool = False
    weight_checksum: int = 0
    notes: tuple[str, ...] = ()
    extracted_bytes: int = 0
    members: "Sequence[Measurement]" = ()

    @classmethod
    def rejected(cls, reject: Reject) -> "Measurement":
        """Measurement of a sample that cannot be used."""
        return cls(-1, 0, reject)

    @classmethod
    def joined(cls, members: "Sequence[Measurement]", roles: Sequence[str | None]) -> "Measurement":
        """Measurement of a group: sums over its samples, and their tokens end to end.

        Args:
            members: measurements of its samples; if one is rejected, the group is.
            roles: roles of the samples, for messages.
        """
        for place, (member, role) in enumerate(zip(members, roles, strict=True)):
            if (reject := member.reject) is not None:
                name = f"sample {place}" if role is None else f"sample {place} ({role})"
                return cls.rejected(Reject(reject.reason, f"{name} of the group: {reject.detail}"))
        samples = [member.sample for member in members if member.sample is not None]
        supervised = [member.supervised for member in members]
        return cls(
            sum([member.length for member in members]),
            sum([member.media_bytes for member in members]),
            sample=EncodedSample(**joined_columns(samples)) if len(samples) == len(members) else None,
            supervised=-1 if min(supervised) < 0 else sum(supervised),
            decoded=sum([member.decoded for member in members]),
            weighted=any([member.weighted for member in members]),
            weight_checksum=sum([member.weight_checksum for member in members]) % 2**63,
            notes=tuple(dict.fromkeys([note for member in members for note in member.notes])),
            members=members,
        )


class Processor(ABC):
    """Encodes conversations; the same object measures them offline and encodes them at training time.

    A subclass implements `encode`; the other methods follow from it, and are overridden only to be faster, with the
    same result: `length(c) == len(encode(c))` always.

    Attributes:
        image_token_id: token that represents image features, or None.
        vision: family of the image processor, or None.
        audio: family of the audio processor, or None.
        reads: items of a distributor that `encode` gets. `any`: Conversations made of records of a known format, and
            all other items as they are, such as `{"x": tensor}`; `encode` may return any sample for its collator.
            `raw`: all items as they are. `conversations`: other records are rejected.

    Examples:
        >>> class Characters(Processor):
        ...     def encode(self, conversation):
        ...         ids = np.array([ord(character) for character in conversation.text])
        ...         return EncodedSample(input_ids=ids, labels=ids)
        >>> Characters().length(normalize({"text": "abc"}))
        3
    """

    image_token_id: int | None = None
    vision: VisionFamily | None = None
    audio: AudioFamily | None = None
    reads: Reads = "any"

    @property
    def dummy(self) -> EncodedSample | None:
        """A minimal sample of one image without a target, for rows without images; None without a vision family."""
        return None

    @abstractmethod
    def encode(self, conversation: Conversation) -> EncodedSample:
        """Return tokens, labels, pixels and positions of a conversation.

        Raises:
            RecordError: the conversation cannot be used; `reason` and `detail` say why.
        """

    def encode_many(self, conversations: Sequence[Conversation]) -> list[EncodedSample | Reject]:
        """Encode several conversations; return a Reject for each conversation that cannot be used."""
        return [self._encode(conversation) for conversation in conversations]

    def measure(self, conversations: Sequence[Conversation], *, keep_tokens: bool = False) -> list[Measurement]:
        """Return the length and media size of each conversation, or the reason for its rejection.

        Args:
            conversations: S conversations.
            keep_tokens: return the tokens as well, for datasets that store them.
        """
        return [self._measure(conversation, keep_tokens) for conversation in conversations]

    def encode_row(
        self,
        ids: Sequence[str | None],
        input_ids: Int64,
        labels: Int64,
        cu_seqlens: npt.ArrayLike,
        loss_weights: Float32 | None = None,
    ) -> EncodedRow:
        """Return the samples of a row of stored tokens without images; the tokens are unchanged.

        Args:
            ids: names of the S samples.
            input_ids: int64 (T,).
            labels: int64 (T,), -100 if not supervised.
            cu_seqlens: (S+1,), boundaries.
            loss_weights: float32 (T,), loss weight of each token; None if all weights are 1.

        Raises:
            RecordError: a sample has no token, or no target after the first token.
        """
        row = TokenBatch(input_ids, labels, np.asarray(cu_seqlens), loss_weights)
        # An encoder with the same fingerprint compared the ids with the vocabulary when they were packed.
        batch, rejects = self.rules.check(row, {}, in_vocabulary=True)
        for reject in rejects.values():
            raise RecordError.of(reject)
        return self._as_row(ids, batch)

    @property
    def rules(self) -> TokenRules:
        """Conditions that the tokens of a sample must meet."""
        return TokenRules(media={} if self.image_token_id is None else {"image": (self.image_token_id, "")})

    def _as_row(self, ids: Sequence[str | None], batch: TokenBatch) -> EncodedRow:
        """The samples of a batch without images."""
        return EncodedRow(
            ids=ids,
            input_ids=batch.input_ids,
            labels=batch.labels,
            cu_seqlens=batch.cu_seqlens,
            loss_weights=batch.loss_weights,
            image_token_id=self.image_token_id,
            video_token_id=self.rules.video_token_id,
            audio_token_id=self.rules.audio_token_id,
            dummy=self.dummy,
            sources=[None] * len(ids),
        )

    def length(self, conversation: Conversation) -> int:
        """Number of tokens of the encoded conversation. Raises the errors of `encode`."""
        measured = self.measure([conversation])[0]
        if measured.reject is not None:
            raise RecordError.of(measured.reject)
        return measured.length

    def fingerprint(self) -> str:
        """Hex digest of everything that decides lengths and tokens; "" (the default) disables the length cache."""
        return ""

    def has_fingerprint(self, recorded: str) -> bool:
        """Whether data with the fingerprint `recorded` was packed with the tokens and lengths of this encoder."""
        return recorded == self.fingerprint()

    def _encode(self, conversation: Conversation) -> EncodedSample | Reject:
        try:
            return self._weighted(conversation, self.encode(conversation))
        except RecordError as error:
            return error.reject

    def _weighted(self, conversation: Conversation, sample: EncodedSample) -> EncodedSample:
        """Return a sample; reject a text with loss weights, and columns, that a subclass does not apply."""
        if sample.columns:
            check_columns(sample.columns, len(sample))
        if sample.columns is None and (conversation.columns or any([turn.values for turn in conversation.messages])):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"{type(self).__name__} applies no per-token values, and the record has them; return an EncodedSample "
                "with `columns`",
            )
        if sample.loss_weights is None and conversation.input_ids is None:
            weights = {conversation.weight, *[message.weight for message in conversation.messages]}
            if not weights <= {0, 1}:
                raise RecordError(
                    Reason.UNSUPPORTED_FIELD,
                    f"{type(self).__name__} applies no loss weights, and the record has weights other than 0 and 1; "
                    "return an EncodedSample with `loss_weights`",
                )
        return sample

    def _measure(self, conversation: Conversation, keep_tokens: bool) -> Measurement:
        try:
            media = sum([file.num_bytes() for file in conversation.files])
            sample = self._weighted(conversation, self.encode(conversation))
        except RecordError as error:
            return Measurement.rejected(error.reject)
        return Measurement(
            len(sample),
            media,
            sample=sample if keep_tokens else None,
            supervised=sample.num_supervised,
            decoded=0 if sample.pixel_values is None and sample.vision_inputs is None else len(conversation.images),
            weighted=sample.loss_weights is not None,
            weight_checksum=sample.weight_checksum,
        )


class StoredTokens(Processor):
    """Returns `input_ids` and `labels` as they are stored; needs no tokenizer."""

    reads = "conversations"

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Return the tokens of a conversation that is stored as tokens.

        Raises:
            ConfigError: it is text or has images, which a ChatEncoder must encode.
            RecordError: no token after the first is a target.
        """
        ids, labels = conversation.input_ids, conversation.labels
        if ids is None or conversation.media_files:
            raise ConfigError(
                f"sample {conversation.id} has {'text' if ids is None else 'images or videos'}, which an encoder must "
                "turn into tokens and pixels: pass ChatEncoder.from_pretrained(...)"
            )
        batch = TokenBatch(ids, ids if labels is None else labels, np.array([0, len(ids)]), conversation.loss_weights)
        weights = batch.scaled([conversation.weight]).loss_weights
        # Subclasses for data without weights may not have the argument.
        optional = () if weights is None else (weights,)
        sample = self.encode_row([conversation.id], ids, batch.labels, batch.cu_seqlens, *optional)[0]
        return sample if conversation.columns is None else replace(sample, columns=conversation.columns)
